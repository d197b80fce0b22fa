"""Measures what a policy needs to know of a model before it runs, and keeps it in one file.

    python -m scripts.profile_policy --method=skewing --out=skew.npz
    python -m scripts.profile_policy --method=filter_layers --num_filters=3 --out=filters.npz
    python -m scripts.profile_policy --method=duo_gates --out=gates.npz

The file names the model by the hash of its weights, and policies refuse it for any other. It is an
option of `infinigen`, `omnikv` and `duo`:

    python -m eval.run_needle --policies=dense,omnikv:profile=filters.npz,duo:profile=gates.npz

profiles/ holds what the last two commands make of SmolLM2, and of the small models. The first takes
20 s and makes 1.4 MB, which is not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli, texts
from kvjax import CacheConfig, KVCache, decode_step, prepare
from kvjax.engine.generate import prefill
from kvjax.policies.duo import retrieval_heads
from kvjax.profiling import Profile, duo_gates, filter_layers, save_profile, skewing
from kvjax.types import Policy
from models import Loaded, load
from scripts import passkeys

Measured = tuple[Mapping[str, np.ndarray], str]  # arrays, and a line about them


class Request(NamedTuple):
  """How much to measure; see the flags of these names."""

  prompt_tokens: int
  steps: int
  num_filters: int
  seed: int


class Method(NamedTuple):
  """A way to measure.

  Attributes:
    measure: `measure(loaded, text, request)`.
    reads: what it reads, as a format of the request's fields.
    prompt_tokens: by default.
    steps: by default; 0 for a method without.
  """

  measure: Callable[[Loaded, str, Request], Measured]
  reads: str
  prompt_tokens: int
  steps: int = 0


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.DEFINE_enum("method", None, sorted(METHODS), "What to measure.", required=True)
  flags.DEFINE_string("text_file", None, "Plain text to measure with; default: King James.")
  flags.DEFINE_integer(
    "prompt_tokens",
    None,
    f"Tokens that are read at once; by default {_defaults('prompt_tokens')}.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "steps",
    None,
    "filter_layers: tokens of the text that follow one by one; duo_gates: updates, each of another "
    f"text; by default {_defaults('steps')}.",
    lower_bound=1,
  )
  flags.DEFINE_integer("num_filters", 3, "filter_layers: most of them.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Seed of what is read.", lower_bound=0)
  flags.DEFINE_string("out", None, "New .npz file of the profile.", required=True)


def main(args: flags.FlagValues) -> None:
  """Says what it will do, measures, writes one file."""
  out = Path(args.out).expanduser()
  if out.exists():
    raise ValueError(f"{out} exists; give --out the name of a new file")
  method = METHODS[args.method]
  request = Request(
    prompt_tokens=args.prompt_tokens or method.prompt_tokens,
    steps=(args.steps or method.steps) if method.steps else 0,
    num_filters=args.num_filters,
    seed=args.seed,
  )
  text = texts.king_james() if args.text_file is None else texts.read_text(Path(args.text_file))
  text_name = args.text_file or "King James Bible"
  loaded = load(args.model)
  check_tokens(loaded, request.prompt_tokens + request.steps * (args.method != duo_gates.METHOD))
  print(
    f"model   {loaded.name}, sha256 {loaded.content_hash[:16]}\n"
    f"method  {args.method}\n"
    f"text    {text_name}, {method.reads.format(**request._asdict())}, seed {args.seed}",
    flush=True,
  )
  arrays, report = method.measure(loaded, text, request)
  settings = {
    "text": text_name,
    "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    "prompt_tokens": request.prompt_tokens,
    "steps": request.steps,
    "seed": request.seed,
  }
  save_profile(out, Profile(args.method, loaded.name, loaded.content_hash, settings, arrays))
  print(f"{report}\n{out}: {out.stat().st_size:,} bytes")


def check_tokens(loaded: Loaded, count: int) -> None:
  """Raises ValueError for a model that cannot read a text of so many tokens."""
  if loaded.tokenizer is None:
    raise ValueError(f"{loaded.name} has no tokenizer to read a text with; use another --model")
  longest = loaded.model.config.max_tokens
  if count > longest:
    raise ValueError(
      f"{count} tokens exceed the context of {longest} of {loaded.name}; lower --prompt_tokens"
    )


def passage(loaded: Loaded, text: str, count: int, seed: int) -> list[int]:
  """Count tokens of the text from a place that the seed draws.

  Raises:
    ValueError: the model cannot read so much, or the text is too short.
  """
  check_tokens(loaded, count)
  assert loaded.tokenizer is not None
  start = int(np.random.default_rng(seed).integers(max(1, len(text) - 8 * count)))
  tokens = loaded.tokenizer.encode(text[start : start + 8 * count])[:count]
  if len(tokens) < count:
    raise ValueError(
      f"the text gives {len(tokens)} tokens and {count} are needed; give a longer one"
    )
  return tokens


def measure_skew(loaded: Loaded, text: str, request: Request) -> Measured:
  """A of every layer and KV head."""
  cache = _run(loaded, skewing.watch_queries(), text, request)
  skew = skewing.skew_of(cache.policy_state)
  squares = np.stack([np.asarray(layer[0], np.float64) for layer in cache.policy_state])
  few = max(1, skew.shape[-1] // 5)
  energy = np.einsum("lkde,lkdz,lkez->lkz", squares, skew, skew)
  plain = -np.sort(-np.diagonal(squares, axis1=2, axis2=3), axis=-1)
  shares = [x[..., :few].sum() / x.sum() for x in (plain, energy)]
  report = (
    f"the best {few} of {skew.shape[-1]} channels hold {shares[0]:.1%} of the energy of the "
    f"queries, {shares[1]:.1%} after the skew"
  )
  return {"skew": skew}, report


def measure_filters(loaded: Loaded, text: str, request: Request) -> Measured:
  """The captured mass and the layers that it chooses."""
  cache = _run(loaded, filter_layers.watch_attention(), text, request)
  mass = filter_layers.captured(cache.policy_state)
  first = min(2, len(mass) // 4)  # the original's 2, but in a shallow model
  filters = filter_layers.choose_filters(mass, request.num_filters, first=first)
  above = {f: mass[f, f + 1 :].mean() for f in filters if f + 1 < len(mass)}
  report = "filter layers " + ", ".join(
    f"{f} ({above[f]:.1%} of the attention above it)" if f in above else str(f) for f in filters
  )
  return {"mass": mass, "filters": np.array(filters, np.int32)}, report


def measure_gates(loaded: Loaded, text: str, request: Request) -> Measured:
  """The gate of every layer and KV head."""
  tokens, steps, _, seed = request
  gates, losses = passkeys.train(loaded, text, tokens=tokens, steps=steps, seed=seed)
  half = retrieval_heads(gates, 0.5)
  layers = [sum(layer == one for one, _ in half) for layer in range(len(gates))]
  report = (
    f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last; {(gates > 0.5).sum()} of "
    f"{gates.size} gates over 0.5, mean {gates.mean():.2f}\n"
    f"the higher half of them, layer by layer: {' '.join(map(str, layers))}"
  )
  return {"gates": gates}, report


METHODS: dict[str, Method] = {
  skewing.METHOD: Method(measure_skew, "{prompt_tokens:,} tokens", 2048),
  filter_layers.METHOD: Method(
    measure_filters, "{prompt_tokens:,} tokens and {steps} more", 2048, 64
  ),
  duo_gates.METHOD: Method(
    measure_gates, "{steps} pieces with passkeys, {prompt_tokens:,} tokens each", 768, 30
  ),
}


def _defaults(field: str) -> str:
  """Of all methods: "2048 for filter_layers, ..."."""
  values = {name: getattr(method, field) for name, method in METHODS.items()}
  return ", ".join(f"{value} for {name}" for name, value in values.items() if value)


def _run(loaded: Loaded, policy: Policy, text: str, request: Request) -> KVCache:
  """The cache after a passage of the text, its last tokens one by one."""
  steps = request.steps
  count = request.prompt_tokens + steps
  tokens = passage(loaded, text, count, request.seed)
  cache_config = CacheConfig(1, count, base_tokens=count)
  runner = prepare(loaded.model, policy, "resident", cache_config)
  with tqdm(total=count, unit="tok", leave=False) as bar:

    def progress(phase: str, done: int, total: int) -> None:
      del phase, total
      bar.update(done - bar.n)

    _, cache = prefill(runner, loaded.params, [tokens[: count - steps]], progress)
    for token in tokens[count - steps :]:
      _, cache = decode_step(runner, loaded.params, cache, jnp.array([token], jnp.int32))
      bar.update(1)
  return cache


if __name__ == "__main__":
  cli.run(main, define_flags)
