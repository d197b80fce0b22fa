"""Prefill and decode speed of policies at given lengths and batch sizes, beside the floor.

    python -m eval.run_throughput --policies=dense,quest --prompt_tokens=8160 --batch_sizes=1,4
    python -m eval.run_throughput --model=random:smollm2-135m@33000 --prompt_tokens=32768

For each length and batch size all policies prefill, stay in memory and then decode in alternating
short rounds, with a read of the memory bandwidth in every round, so that other work on the machine
falls on all of them alike. Speed depends on shapes and hardly on values, so seeded random tokens do
where no text is given, and models of random weights past the trained context.

On a CPU, steps of two to eight rows decode with weights in panels (`models.panels`), for which the
layers' weights are in memory twice.

Beside the fields of every result row: `bandwidth_bytes_per_s`, the best of the rounds; `floor_s`,
the least time that a step can take at that bandwidth (`eval.floor`); `floor_ratio`, the median step
over that floor.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli, layers, texts
from eval.floor import bandwidth_reader, floor_bytes
from eval.results import (
  Row,
  append_row,
  check_new_run,
  make_manifest,
  percentiles,
  recall_fields,
  run_folder,
  runner_row,
)
from eval.tables import human_bytes, table
from kvjax import CacheConfig, KVCache, Runner, Sampling, generate, make_policy, prepare
from kvjax.engine.generate import check_overflow, check_request
from kvjax.engine.steps import next_token
from kvjax.stores import traffic
from kvjax.types import Params, Policy
from models import Loaded, load
from models.memory import params_bytes
from models.panels import for_decode

ROUND_STEPS = 4
PLAN_COLUMNS = (
  "policy",
  "store",
  "budget_tokens",
  "prompt_tokens",
  "batch_size",
  "device_kv_bytes",
  "metadata_bytes",
  "host_kv_bytes",
  "peak_kv_bytes",
)
COLUMNS = (
  "policy",
  "store",
  "budget_tokens",
  "prompt_tokens",
  "batch_size",
  "ttft_s_p50",
  "tpot_s_p50",
  "tpot_s_p99",
  "decode_tokens_per_s",
  "speedup_vs_dense",
  "floor_s",
  "floor_ratio",
  "device_kv_bytes",
)
RECALL_COLUMNS = ("recall_bytes_per_step", "page_hit_ratio", "token_hit_ratio")


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  cli.define_policies_flags(["dense", "quest", "streaming"], [1024])
  flags.DEFINE_list("prompt_tokens", ["8160"], "Lengths of the prompt, separated by commas.")
  flags.DEFINE_list("batch_sizes", ["1", "4"], "Rows decoded together, separated by commas.")
  flags.DEFINE_integer("output_tokens", 32, "Decode steps to time.", lower_bound=1)
  flags.DEFINE_integer(
    "capacity_tokens",
    None,
    "Tokens that a row can hold; by default what the longest prompt needs.",
    lower_bound=1,
  )
  flags.DEFINE_integer("repeats", 1, "Times that everything is measured.", lower_bound=1)
  flags.DEFINE_string("text_file", None, "UTF-8 text of the prompts; random tokens by default.")
  cli.define_out_dir("throughput")


class Lane(NamedTuple):
  """One combination while it runs: its runner, what it is about to decode, and its samples.

  Attributes:
    runner: from `prepare`.
    params: weights, as for decoding (`models.panels`).
    cache: device state.
    tokens: i32[B], the newest token of each row.
    ttft_s: seconds from the prompt to the first token.
    step_s: seconds of each decode step.
    made: the tokens of row 0 so far.
  """

  runner: Runner
  params: Params
  cache: KVCache
  tokens: jax.Array
  ttft_s: float
  step_s: tuple[float, ...]
  made: tuple[int, ...]


class Weights(NamedTuple):
  """A model's weights, and the same as for decoding at a batch size (`models.panels`)."""

  whole: Params
  decoding: Params


def weights(loaded: Loaded, batch_size: int) -> Weights:
  """Both; make them once for all lanes of a batch size."""
  return Weights(loaded.params, for_decode(loaded.params, batch_size))


def compile_runner(runner: Runner, params: Weights) -> float:
  """Seconds that it takes to compile a runner and to run it once on a short prompt."""
  begin = time.perf_counter()
  prompts = [[1] * 8] * runner.prefill_config.batch_size
  advance(start_lane(runner, params, prompts), 2)
  return time.perf_counter() - begin


def start_lane(
  runner: Runner,
  params: Weights,
  prompts: Sequence[Sequence[int]],
  progress: Callable[[str, int, int], None] | None = None,
) -> Lane:
  """Prefills; the runner must be compiled, or the time to the first token includes that."""
  result = generate(runner, params.whole, prompts, max_new_tokens=1, progress=progress)
  first = [row[0] for row in result.tokens]
  tokens = jnp.asarray(first, jnp.int32)
  if result.cache.host is not None:  # what such a step returns is bound to a device: so begins it
    tokens = jax.device_put(tokens, result.cache.lengths.sharding)
  return Lane(runner, params.decoding, result.cache, tokens, result.ttft_s, (), (first[0],))


def advance(lane: Lane, steps: int) -> Lane:
  """Decodes and times some steps, greedily; the lane that is passed in is used up."""
  key = jnp.broadcast_to(jax.random.key(0), lane.tokens.shape)
  tokens, cache = lane.tokens, lane.cache
  step_s, made = list(lane.step_s), list(lane.made)
  for _ in range(steps):
    begin = time.perf_counter()
    tokens, cache = next_token(lane.runner, Sampling(), lane.params, cache, tokens, key)
    made.append(int(np.asarray(tokens)[0]))
    step_s.append(time.perf_counter() - begin)
  return lane._replace(cache=cache, tokens=tokens, step_s=tuple(step_s), made=tuple(made))


class Group(NamedTuple):
  """All combinations of one length and one batch size, which are compared with each other."""

  prompts: list[list[int]]
  runners: list[Runner]


class Samples(NamedTuple):
  """What one combination took, over all repeats."""

  compile_s: float
  ttft_s: list[float]
  step_s: list[float]
  recalls: list[dict[str, int] | None]


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what it will do, measures and writes."""
  out_dir = Path(args.out_dir).expanduser()
  check_new_run(out_dir)
  prompt_tokens = cli.positive_ints("prompt_tokens", args.prompt_tokens)
  batch_sizes = cli.positive_ints("batch_sizes", args.batch_sizes)
  budgets = cli.positive_ints("budget_tokens", args.budget_tokens)
  policies = pick_policies(args.policies, args.stores, budgets, args.page_size)
  text = None if args.text_file is None else texts.read_text(Path(args.text_file))
  loaded = load(args.model)
  groups = []
  for tokens, batch_size in itertools.product(prompt_tokens, batch_sizes):
    prompts = make_prompts(loaded, text, tokens, batch_size)
    capacity = args.capacity_tokens or tokens + args.output_tokens
    cache = CacheConfig(
      batch_size, capacity, args.page_size, base_tokens=tokens + args.output_tokens
    )
    runners = [prepare(loaded.model, policy, store, cache) for policy, store in policies]
    for runner in runners:
      check_request(runner, prompts, args.output_tokens)
    groups.append(Group(prompts, runners))
  _print_plan(loaded, groups, args.output_tokens, args.repeats)
  data = {} if text is None else {str(args.text_file): hashlib.sha256(text.encode()).hexdigest()}
  manifest = make_manifest(cli.flag_values(), loaded, data)
  rows = []
  total = args.repeats * sum(len(group.runners) for group in groups)
  with run_folder(out_dir, manifest), tqdm(total=total, unit="measurement") as bar:
    for group in groups:
      for row in measure(loaded, group, args.output_tokens, args.repeats, bar):
        rows.append(row)
        append_row(out_dir, row)
  recalls = any(row["recall_bytes_per_step"] is not None for row in rows)
  print(f"\n{table(rows, COLUMNS + RECALL_COLUMNS * recalls)}\n\nwritten to {out_dir}")


def pick_policies(
  names: Sequence[str], stores: Sequence[str], budgets: Sequence[int], page_size: int
) -> list[tuple[Policy, str]]:
  """Every policy with its store, once for each budget if it has one.

  Raises:
    ValueError: an unknown policy, a budget out of range, or not one store a policy.
  """
  if stores and len(stores) != len(names):
    raise ValueError(
      f"--stores names {len(stores)} stores for {len(names)} policies; give one each, or none"
    )
  picked = []
  for index, name in enumerate(names):
    for budget in budgets:
      policy = make_policy(name, budget_tokens=budget, page_size=page_size)
      picked.append((policy, stores[index] if stores else policy.stores[0]))
      if policy.asked_tokens is None:
        break
  if not picked:
    raise ValueError("--policies is empty, expected names separated by commas")
  return picked


def make_prompts(loaded: Loaded, text: str | None, tokens: int, batch_size: int) -> list[list[int]]:
  """Prompts of exactly `tokens` ids: stretches of the text, or seeded random ids.

  Raises:
    ValueError: the model cannot read text, or the text is too short.
  """
  if text is None:
    rng = np.random.default_rng(0)
    return rng.integers(0, loaded.model.config.vocab_size, (batch_size, tokens)).tolist()
  if loaded.tokenizer is None:
    raise ValueError(f"{loaded.name} has no tokenizer; leave --text_file out for random tokens")
  ids = loaded.tokenizer.encode(text)
  if len(ids) < tokens:
    raise ValueError(f"--text_file has {len(ids)} tokens, expected at least {tokens}")
  starts = [row * tokens % (len(ids) - tokens + 1) for row in range(batch_size)]
  return [ids[start : start + tokens] for start in starts]


def measure(
  loaded: Loaded, group: Group, output_tokens: int, repeats: int, bar: tqdm | None = None
) -> list[Row]:
  """Result rows of one group.

  Args:
    loaded: the model.
    group: what is compared.
    output_tokens: decode steps to time, each time.
    repeats: times that prefill and decode are measured.
    bar: grows by one for each prefill.
  """
  params = weights(loaded, len(group.prompts))
  compile_s = [compile_runner(runner, params) for runner in group.runners]
  samples = [Samples(seconds, [], [], []) for seconds in compile_s]
  read = bandwidth_reader()
  bandwidth = read()
  for _ in range(repeats):
    lanes = []
    for runner in group.runners:
      if bar is not None:
        bar.set_description(f"{runner.policy.name} prefill")
      lanes.append(start_lane(runner, params, group.prompts))
      if bar is not None:
        bar.update()
    if bar is not None:
      bar.set_description("decode")
    for done in range(0, output_tokens, ROUND_STEPS):
      bandwidth = max(bandwidth, read())
      lanes = [advance(lane, min(ROUND_STEPS, output_tokens - done)) for lane in lanes]
    for lane, sample in zip(lanes, samples, strict=True):
      check_overflow(lane.runner, lane.cache)
      sample.ttft_s.append(lane.ttft_s)
      sample.step_s.extend(lane.step_s)
      sample.recalls.append(traffic.totals(lane.cache))
  rows = [
    _row(loaded, runner, sample, len(group.prompts[0]), output_tokens, bandwidth)
    for runner, sample in zip(group.runners, samples, strict=True)
  ]
  return add_speedups(rows)


def add_speedups(rows: list[Row]) -> list[Row]:
  """Rows that were measured together, each with its median step against that of dense."""
  dense_s = next((row["tpot_s_p50"] for row in rows if row["policy"] == "dense"), None)
  return [row | {"speedup_vs_dense": dense_s and dense_s / row["tpot_s_p50"]} for row in rows]


def _row(
  loaded: Loaded,
  runner: Runner,
  samples: Samples,
  prompt_tokens: int,
  output_tokens: int,
  bandwidth: float,
) -> Row:
  batch_size, page_size = runner.prefill_config.batch_size, runner.prefill_config.page_size
  # A step in the middle of those timed reads this many tokens a row, its own included.
  tokens = prompt_tokens + (output_tokens + 1) // 2
  read = floor_bytes(
    loaded.model.config,
    params_bytes(loaded.params),
    runner.policy.name,
    budget_tokens=runner.policy.budget_tokens,
    page_size=page_size,
    tokens=tokens,
    batch_size=batch_size,
  )
  floor_s = read / bandwidth
  return _plan_row(loaded, runner, prompt_tokens) | {
    "task": "throughput",
    "output_tokens": output_tokens,
    "compile_s": samples.compile_s,
    **percentiles("ttft_s", samples.ttft_s),
    **percentiles("tpot_s", samples.step_s),
    "prefill_tokens_per_s": batch_size * prompt_tokens / statistics.median(samples.ttft_s),
    "decode_tokens_per_s": batch_size * len(samples.step_s) / sum(samples.step_s),
    "bandwidth_bytes_per_s": bandwidth,
    "floor_s": floor_s,
    "floor_ratio": statistics.median(samples.step_s) / floor_s,
    **_recall_fields(samples),
  }


def _recall_fields(samples: Samples) -> Row:
  counts = [Counter(one) for one in samples.recalls if one]
  return recall_fields(sum(counts, Counter()), len(samples.step_s)) if counts else {}


def _plan_row(loaded: Loaded, runner: Runner, prompt_tokens: int) -> Row:
  """What is known of a row before anything is allocated."""
  return runner_row(runner, model=loaded.name, prompt_tokens=prompt_tokens)


def _print_plan(loaded: Loaded, groups: Sequence[Group], output_tokens: int, repeats: int) -> None:
  pairs = [(runner, len(group.prompts[0])) for group in groups for runner in group.runners]
  rows = [_plan_row(loaded, runner, tokens) for runner, tokens in pairs]
  print(
    f"model {loaded.name}, weights {human_bytes(params_bytes(loaded.params))}, "
    f"on {jax.devices()[0].device_kind}; {output_tokens} decode steps, measured {repeats} times\n"
    f"layers {layers.summary([runner for runner, _ in pairs]) or '-'}\n\n"
    f"{table(rows, PLAN_COLUMNS)}\n",
    flush=True,
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
