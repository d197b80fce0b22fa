"""Measures what a policy needs to know of a model before it runs, and keeps it in one file.

    python -m scripts.profile_policy --method=skewing --out=skew.npz
    python -m scripts.profile_policy --method=filter_layers --num_filters=3 --out=filters.npz

The file names the model by the hash of its weights; `kvjax.profiling.load_profile` refuses it for
any other:

    profile = load_profile(Path("skew.npz"), "skewing", loaded.content_hash)
    policy = make_policy("infinigen", skew=profile.arrays["skew"])

    profile = load_profile(Path("filters.npz"), "filter_layers", loaded.content_hash)
    policy = make_policy("omnikv", filter_layers=tuple(profile.arrays["filters"].tolist()))

profiles/smollm2-135m-filter_layers.npz is what the second command makes. The first takes 20 s and
makes 1.4 MB, which is not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli, texts
from kvjax import CacheConfig, KVCache, decode_step, prepare
from kvjax.engine.generate import prefill
from kvjax.profiling import Profile, filter_layers, save_profile, skewing
from kvjax.types import Policy
from models import Loaded, load

Measured = tuple[Mapping[str, np.ndarray], str]


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.DEFINE_enum("method", None, sorted(METHODS), "What to measure.", required=True)
  flags.DEFINE_string("text_file", None, "Plain text to measure with; default: King James.")
  flags.DEFINE_integer("prompt_tokens", 2048, "Tokens that are read at once.", lower_bound=1)
  flags.DEFINE_integer(
    "steps", 64, "filter_layers: tokens of the text that follow one by one.", lower_bound=1
  )
  flags.DEFINE_integer("num_filters", 3, "filter_layers: most of them.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Seed of the passage that is read.", lower_bound=0)
  flags.DEFINE_string("out", None, "New .npz file of the profile.", required=True)


def main(args: flags.FlagValues) -> None:
  """Says what it will do, measures, writes one file."""
  out = Path(args.out).expanduser()
  if out.exists():
    raise ValueError(f"{out} exists; give --out the name of a new file")
  text = texts.king_james() if args.text_file is None else texts.read_text(Path(args.text_file))
  loaded = load(args.model)
  steps = args.steps if args.method == filter_layers.METHOD else 0
  tokens = passage(loaded, text, args.prompt_tokens + steps, args.seed)
  print(
    f"model   {loaded.name}, sha256 {loaded.content_hash[:16]}\n"
    f"method  {args.method}\n"
    f"text    {args.text_file or 'King James Bible'}, {args.prompt_tokens:,} tokens and {steps} "
    f"more, seed {args.seed}",
    flush=True,
  )
  arrays, report = METHODS[args.method](loaded, tokens, args)
  settings = {
    "text": args.text_file or "King James Bible",
    "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    "prompt_tokens": args.prompt_tokens,
    "steps": steps,
    "seed": args.seed,
  }
  save_profile(out, Profile(args.method, loaded.name, loaded.content_hash, settings, arrays))
  print(f"{report}\n{out}: {out.stat().st_size:,} bytes")


def passage(loaded: Loaded, text: str, count: int, seed: int) -> list[int]:
  """Count tokens of the text from a place that the seed draws.

  Raises:
    ValueError: the model has no tokenizer, or its context or the text is too short.
  """
  if loaded.tokenizer is None:
    raise ValueError(f"{loaded.name} has no tokenizer to read a text with; use another --model")
  longest = loaded.model.config.max_tokens
  if count > longest:
    raise ValueError(
      f"{count} tokens exceed the context of {longest} of {loaded.name}; lower --prompt_tokens"
    )
  start = int(np.random.default_rng(seed).integers(max(1, len(text) - 8 * count)))
  tokens = loaded.tokenizer.encode(text[start : start + 8 * count])[:count]
  if len(tokens) < count:
    raise ValueError(
      f"the text gives {len(tokens)} tokens and {count} are needed; give a longer one"
    )
  return tokens


def measure_skew(loaded: Loaded, tokens: list[int], args: flags.FlagValues) -> Measured:
  """A of every layer and KV head."""
  del args
  cache = _run(loaded, skewing.watch_queries(), tokens, 0)
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


def measure_filters(loaded: Loaded, tokens: list[int], args: flags.FlagValues) -> Measured:
  """The captured mass and the layers that it chooses."""
  cache = _run(loaded, filter_layers.watch_attention(), tokens, args.steps)
  mass = filter_layers.captured(cache.policy_state)
  filters = filter_layers.choose_filters(mass, args.num_filters)
  above = {f: mass[f, f + 1 :].mean() for f in filters if f + 1 < len(mass)}
  report = "filter layers " + ", ".join(
    f"{f} ({above[f]:.1%} of the attention above it)" if f in above else str(f) for f in filters
  )
  return {"mass": mass, "filters": np.array(filters, np.int32)}, report


METHODS: dict[str, Callable[[Loaded, list[int], flags.FlagValues], Measured]] = {
  skewing.METHOD: measure_skew,
  filter_layers.METHOD: measure_filters,
}


def _run(loaded: Loaded, policy: Policy, tokens: list[int], steps: int) -> KVCache:
  """The cache after all tokens, the last steps of them one by one."""
  count = len(tokens)
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
