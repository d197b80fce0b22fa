"""Bytes of a model, its cache and its compiled decode step, at real sizes on any machine.

    python -m scripts.inspect_model --model=random:llama-3.1-8b --policy=quest --batch_size=4 \\
      --capacity_tokens=32768 --dtype=bfloat16

Nothing is allocated: the decode step is compiled for this machine's backend from shapes alone, and
XLA says what it would take. Only for a policy with a profile the weights are read, to compare their
sha256 with the profile's.
"""

from __future__ import annotations

import time
from typing import Any

import jax
from absl import flags

from eval import cli, layers
from eval.tables import human_seconds, table
from kvjax import CacheConfig, Runner, make_policy, prepare
from kvjax.engine import steps
from kvjax.policies import split_spec
from kvjax.types import Params
from models import abstract
from models.loading import DTYPES
from models.memory import params_bytes


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  cli.define_policy_flags()
  flags.DEFINE_integer(
    "capacity_tokens", None, "Tokens of a row; by default the model's context.", lower_bound=1
  )
  flags.DEFINE_integer("batch_size", 1, "Rows.", lower_bound=1)
  flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "Of parameters, keys and values.")


def main(args: flags.FlagValues) -> None:
  """What is inspected, how long it took to compile, the table."""
  policy = make_policy(args.policy, budget_tokens=args.budget_tokens, page_size=args.page_size)
  hashed = "profile" in split_spec(args.policy)[1]  # which must be one of these very weights
  model, params = abstract(args.model, args.dtype, hashed=hashed)
  capacity = args.capacity_tokens or model.config.max_tokens
  cache = CacheConfig(args.batch_size, capacity, args.page_size, args.dtype, base_tokens=capacity)
  runner = prepare(model, policy, args.store or policy.stores[0], cache)
  print(_plan(args.model, runner, params), flush=True)
  start = time.perf_counter()
  memory = compile_decode_step(runner, params).memory_analysis()
  seconds = human_seconds(time.perf_counter() - start)
  print(f"step    compiled for {jax.default_backend()} in {seconds}\n")
  print(table(report(runner, params, memory), ("what", "device_bytes", "host_bytes")))


def compile_decode_step(runner: Runner, params: Params) -> jax.stages.Compiled:
  """The decode step of a runner, from shapes alone; params may be abstract."""
  cache = jax.eval_shape(lambda: steps.seal(runner, steps.empty_cache(runner)))
  tokens = jax.ShapeDtypeStruct((runner.decode_config.batch_size,), "int32")
  return steps.decode_step.lower(runner, params, cache, tokens).compile()


def report(runner: Runner, params: Params, memory: Any) -> list[dict[str, str | int]]:
  """Rows of the table: what takes memory, and how many bytes on the device and on the host."""
  kept, prefill = runner.decode_bytes, runner.prefill_bytes
  sizes = {
    "weights": (params_bytes(params), 0),
    "keys and values": (kept.keys_values, 0),
    "page tables": (kept.tables, 0),
    "metadata of policy and store": (kept.metadata, 0),
    "cache while the prompt is read": (prefill.total, 0),
    "decode step: arguments": (
      memory.argument_size_in_bytes,
      memory.host_argument_size_in_bytes,
    ),
    "decode step: results, but for updates in place": (
      memory.output_size_in_bytes - memory.alias_size_in_bytes,
      memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes,
    ),
    "decode step: temporaries": (memory.temp_size_in_bytes, memory.host_temp_size_in_bytes),
  }
  return [
    {"what": what, "device_bytes": device, "host_bytes": host}
    for what, (device, host) in sizes.items()
  ]


def _plan(source: str, runner: Runner, params: Params) -> str:
  config, cache, policy = runner.model.config, runner.prefill_config, runner.policy
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  budget = "" if policy.budget_tokens is None else f" with {policy.budget_tokens:,} tokens"
  chosen = "" if policy.name == "dense" else f"; {layers.selecting(runner)}"
  return (
    f"model   {source}, {config.family} of {config.num_layers} layers, {count:,} parameters\n"
    f"policy  {policy.name}{budget} on store {runner.store.name}{chosen}\n"
    f"cache   {cache.batch_size:,} rows of {cache.capacity_tokens:,} tokens in {cache.dtype}"
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
