"""Decode speed of every model family at one shape, that of SmolLM2, beside Llama's.

    python -m scripts.bench_families
    python -m scripts.bench_families --prompt_tokens=4096 --policy=quest --budget_tokens=1024

The families share their blocks, so none should be slower than its bytes say. Random weights; all
families stay in memory and decode in turn, a few steps each round, so that other work on the
machine falls on all of them alike. OPT has as many KV heads as query heads, three times SmolLM2's,
so its attention reads three times as much; a short prompt keeps that out of the comparison.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from tqdm import tqdm

from eval import cli
from eval.results import device_kind
from eval.tables import table
from kvjax import CacheConfig, KVCache, ModelConfig, Runner, Sampling, make_policy, prepare
from kvjax.engine.generate import check_request, prefill
from kvjax.engine.steps import next_token
from models import FAMILIES, PRESETS, build
from models.memory import params_bytes

SHAPE = "smollm2-135m"
WARM_UP_STEPS, ROUND_STEPS = 3, 4
COLUMNS = ("family", "weight_bytes", "device_kv_bytes", "tpot_s_p50", "llama_ratio")


class Case(NamedTuple):
  """One family that decodes; `cache` and `tokens` are those of its next step."""

  family: str
  runner: Runner
  params: Any
  cache: KVCache
  tokens: jax.Array
  step_s: list[float]


def define_flags() -> None:
  """The flags of this command."""
  cli.define_policy_flags(policy="dense")
  flags.DEFINE_integer("prompt_tokens", 256, "Tokens of the prompt.", lower_bound=1)
  flags.DEFINE_integer("rounds", 16, f"Rounds of {ROUND_STEPS} steps a family.", lower_bound=1)
  flags.DEFINE_integer("batch_size", 1, "Rows.", lower_bound=1)


def main(args: flags.FlagValues) -> None:
  """Prefills all families, lets them decode in turn, prints the table."""
  runners = {family: _runner(args, family_config(family)) for family in FAMILIES}
  prompts = [[1] * args.prompt_tokens] * args.batch_size
  for runner in runners.values():
    check_request(runner, prompts, _new_tokens(args))
  print(f"{SHAPE}'s shape, {args.policy}, {args.prompt_tokens:,} tokens, batch {args.batch_size}")
  print(
    f"f32 on {device_kind()}, {args.rounds * ROUND_STEPS} steps a family, in turn\n", flush=True
  )
  cases = [_start(family, runner, prompts) for family, runner in tqdm(runners.items(), "compiling")]
  for _ in tqdm(range(args.rounds), "rounds"):
    cases = [_steps(case, ROUND_STEPS) for case in cases]
  print(table(rows(cases), COLUMNS))


def family_config(family: str) -> ModelConfig:
  """SmolLM2's shape in another family; OPT has as many KV heads as query heads."""
  config = dataclasses.replace(PRESETS[SHAPE], family=family)
  if family == "opt":
    return dataclasses.replace(config, num_kv_heads=config.num_heads)
  return config


def rows(cases: list[Case]) -> list[dict[str, Any]]:
  """A row of the table for each family."""
  median = {case.family: statistics.median(case.step_s) for case in cases}
  return [
    {
      "family": case.family,
      "weight_bytes": params_bytes(case.params),
      "device_kv_bytes": case.runner.decode_bytes.total,
      "tpot_s_p50": median[case.family],
      "llama_ratio": median[case.family] / median["llama"],
    }
    for case in cases
  ]


def _runner(args: flags.FlagValues, config: ModelConfig) -> Runner:
  policy = make_policy(args.policy, budget_tokens=args.budget_tokens, page_size=args.page_size)
  capacity = args.prompt_tokens + _new_tokens(args)
  cache = CacheConfig(args.batch_size, capacity, args.page_size, base_tokens=capacity)
  return prepare(build(config), policy, args.store or policy.stores[0], cache)


def _new_tokens(args: flags.FlagValues) -> int:
  return 1 + WARM_UP_STEPS + args.rounds * ROUND_STEPS


def _start(family: str, runner: Runner, prompts: list[list[int]]) -> Case:
  params = runner.model.init(jax.random.key(0), "float32")
  cache = prefill(runner, params, prompts)[1]
  case = Case(family, runner, params, cache, jnp.zeros(len(prompts), jnp.int32), [])
  return _steps(case, WARM_UP_STEPS)._replace(step_s=[])


def _steps(case: Case, count: int) -> Case:
  """Some more decode steps, each of them timed."""
  key = jax.random.split(jax.random.key(0), len(case.tokens))
  for _ in range(count):
    begin = time.perf_counter()
    tokens, cache = next_token(case.runner, Sampling(), case.params, case.cache, case.tokens, key)
    jax.block_until_ready(tokens)
    case.step_s.append(time.perf_counter() - begin)
    case = case._replace(cache=cache, tokens=tokens)
  return case


if __name__ == "__main__":
  cli.run(main, define_flags)
