"""Generates text with a chosen policy and store, and says what it cost.

    python -m scripts.generate --policy=quest --budget_tokens=1024 --prompt="Why is the sky blue?"
    python -m scripts.generate --prompt_file=- < document.txt

The prompt is put into the model's chat template unless `--nochat` is given. Models of random
weights have no tokenizer and cannot be used here; `eval.run_throughput` measures those.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import jax
from absl import flags
from tqdm import tqdm

from eval import cli, layers
from eval.results import percentiles
from eval.tables import human_bytes, human_seconds
from kvjax import (
  CacheConfig,
  Generation,
  Runner,
  Sampling,
  generate,
  make_mesh,
  make_policy,
  param_shardings,
  prepare,
)
from kvjax.engine.generate import check_request
from models import Loaded, Tokenizer, load
from models.memory import params_bytes


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  cli.define_policy_flags()
  flags.DEFINE_string("prompt", None, "The prompt.")
  flags.DEFINE_string("prompt_file", None, "A UTF-8 file with the prompt, - for standard input.")
  flags.DEFINE_boolean("chat", True, "Put the prompt into the model's chat template.")
  flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to generate.", lower_bound=1)
  flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token.", lower_bound=0.0)
  flags.DEFINE_float("top_p", 1.0, "Samples from the smallest set of tokens of this probability.")
  flags.DEFINE_integer("devices", 1, "Devices to split heads and weights over.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Seed of the sampling.", lower_bound=0, upper_bound=2**32 - 1)


def main(args: flags.FlagValues) -> None:
  """Plan, text, one line of statistics."""
  sampling = Sampling(temperature=args.temperature, top_p=args.top_p)
  policy = make_policy(args.policy, budget_tokens=args.budget_tokens, page_size=args.page_size)
  text = read_prompt(args.prompt, args.prompt_file)
  loaded = load(args.model)
  ids = encode(loaded, text, args.chat)
  capacity = len(ids) + args.max_new_tokens
  cache = CacheConfig(1, capacity, args.page_size, base_tokens=capacity)
  mesh = make_mesh(model=args.devices) if args.devices > 1 else None
  runner = prepare(loaded.model, policy, args.store or policy.stores[0], cache, mesh=mesh)
  check_request(runner, [ids], args.max_new_tokens)
  print(plan(loaded, runner, len(ids), args.max_new_tokens), flush=True)
  if mesh is not None:
    placed = jax.device_put(loaded.params, param_shardings(loaded.model, mesh))
    loaded = loaded._replace(params=placed)
  warm_up_s = _warm_up(runner, loaded, ids, sampling, args.max_new_tokens)
  with _progress_bar() as progress:
    result = generate(
      runner,
      loaded.params,
      [ids],
      max_new_tokens=args.max_new_tokens,
      stop_ids=_tokenizer(loaded).eos_ids,
      sampling=sampling,
      seed=args.seed,
      progress=progress,
    )
  print(f"\n{_tokenizer(loaded).decode(result.tokens[0])}\n")
  print(_statistics(result, runner, warm_up_s))


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
  """The text of exactly one of the two flags.

  Raises:
    ValueError: both or neither were given, the text is empty, or the file is not UTF-8.
  """
  if (prompt is None) == (prompt_file is None):
    raise ValueError("give exactly one of --prompt and --prompt_file (- reads standard input)")
  if prompt is not None:
    text, source = prompt, "--prompt"
  else:
    source = "standard input" if prompt_file == "-" else str(prompt_file)
    data = (
      _standard_input() if prompt_file == "-" else Path(prompt_file or "").expanduser().read_bytes()
    )
    try:
      text = data.decode("utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(f"{source} is not UTF-8 text ({error}); convert it") from error
  if not text.strip():
    raise ValueError(f"{source} is empty, expected the text of the prompt")
  return text


def _standard_input() -> bytes:
  if sys.stdin is None:
    raise ValueError("standard input is closed; pipe the prompt into it, or give --prompt")
  return sys.stdin.buffer.read()


def encode(loaded: Loaded, text: str, chat: bool) -> list[int]:
  """Ids of the prompt, in the model's chat template if asked.

  Raises:
    ValueError: the model has no tokenizer or no chat template.
  """
  tokenizer = _tokenizer(loaded)
  if not chat:
    return tokenizer.encode(text)
  if tokenizer.chat_template is None:
    raise ValueError(f"{loaded.name} has no chat template; give --nochat")
  return tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]))


def _tokenizer(loaded: Loaded) -> Tokenizer:
  if loaded.tokenizer is None:
    raise ValueError(
      f"{loaded.name} has no tokenizer and cannot read a prompt; use another --model, or measure "
      "it with eval.run_throughput"
    )
  return loaded.tokenizer


def plan(loaded: Loaded, runner: Runner, prompt_tokens: int, max_new_tokens: int) -> str:
  """What will run and what it takes, a line each, before it happens."""
  kept, prefill = runner.decode_bytes, runner.prefill_bytes
  policy = runner.policy
  budget = "" if policy.budget_tokens is None else f" with {policy.budget_tokens:,} tokens"
  chosen = "" if policy.name == "dense" else f"; {layers.selecting(runner)}"
  each = "" if runner.mesh is None else f"each of {runner.mesh.size} "
  stowed = f"{each}{human_bytes(kept.host)} of pages" if kept.host else "nothing"
  return (
    f"model   {loaded.name}, weights {human_bytes(params_bytes(loaded.params))}\n"
    f"tokens  {prompt_tokens:,} of prompt, up to {max_new_tokens:,} new\n"
    f"policy  {policy.name}{budget} on store {runner.store.name}{chosen}\n"
    f"device  {each}{human_bytes(kept.total)}: keys and values {human_bytes(kept.keys_values)}, "
    f"tables {human_bytes(kept.tables)}, metadata {human_bytes(kept.metadata)}; "
    f"{human_bytes(prefill.total)} while the prompt is read\n"
    f"host    {stowed}"
  )


def _warm_up(
  runner: Runner, loaded: Loaded, ids: list[int], sampling: Sampling, max_new_tokens: int
) -> float:
  """Seconds that compiling took, so that it does not count as time to the first token."""
  start = time.perf_counter()
  new_tokens = min(3, max_new_tokens)
  generate(runner, loaded.params, [ids[:16]], max_new_tokens=new_tokens, sampling=sampling)
  return time.perf_counter() - start


@contextlib.contextmanager
def _progress_bar() -> Generator[Callable[[str, int, int], None]]:
  """A bar on stderr that follows `generate`, first the prompt and then the new tokens."""
  with tqdm(unit="tok", leave=False) as bar:

    def progress(phase: str, done: int, total: int) -> None:
      if bar.desc != f"{phase}: ":
        bar.reset(total)
        bar.set_description(phase)
      bar.update(done - bar.n)

    yield progress


def _statistics(result: Generation, runner: Runner, warm_up_s: float) -> str:
  parts = [f"{len(result.tokens[0])} tokens", f"TTFT {human_seconds(result.ttft_s)}"]
  if result.step_s:
    tpot = percentiles("tpot_s", result.step_s, (50, 99))
    parts += [
      f"TPOT p50 {human_seconds(tpot['tpot_s_p50'])}, p99 {human_seconds(tpot['tpot_s_p99'])}",
      f"{len(result.step_s) / sum(result.step_s):.1f} tokens/s",
    ]
  parts += [
    f"KV {human_bytes(runner.decode_bytes.total)}",
    f"compiled in {human_seconds(warm_up_s)}",
  ]
  return ", ".join(parts)


if __name__ == "__main__":
  cli.run(main, define_flags)
