"""The decode step of Llama-3.1-8B, compiled for an H100 without a GPU: dense and FlexiCache.

    python -m tests.h100_report > docs/h100_flexicache.md

Weights and caches are shapes alone. All numbers are what XLA's compiler says of its program, but
for the closed form of the device's pages, which stands beside them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import jax

from kvjax import CacheConfig, ModelConfig, Runner, make_policy, prepare
from kvjax.cache import host
from kvjax.engine import steps
from models import build, param_shapes
from tests import aot

LLAMA_8B = ModelConfig(
  family="llama",
  num_layers=32,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  embed_dim=4096,
  ffn_dim=14336,
  vocab_size=128_256,
  max_tokens=131_072,
  rope_theta=500_000.0,
)
BATCH, TOKENS, PAGE = 8, 32_768, 16
BUDGETS = (1024, 2048)
BIG = 64 << 20
RECALL, RECALLED, ATTENTION = "recall", "recalled", "attention"
STREAM = '_xla_stream_annotation="1"'
# Instructions that launch nothing.
FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
CALL = re.compile(r'custom-call\(.*custom_call_target="mosaic_gpu')

INTRODUCTION = f"""# FlexiCache's decode step at its real size

What XLA compiles for an H100 SXM (80 GB) of one decode step of Llama-3.1-8B's shape, in bf16, for
{BATCH} rows of {TOKENS:,} tokens. No GPU was there: these are a compiler's numbers, and no times.

    python -m tests.h100_report > docs/h100_flexicache.md

made this page. Which heads are unstable was not measured for this page: every fourth of the 256 KV
heads counts as one, two of the eight in each layer. Their number is the original's, and it alone
decides the bytes. Period 16, bounds (MinMax) of every page.
"""


class Step(NamedTuple):
  """A compiled decode step.

  Attributes:
    runner: what it is of.
    memory: the compiler's analysis.
    hlo: its scheduled program.
  """

  runner: Runner
  memory: jax.stages.CompiledMemoryStats
  hlo: str


def every_fourth(config: ModelConfig) -> list[tuple[int, int]]:
  """Pairs of layer and KV head, evenly spread."""
  heads = [(layer, h) for layer in range(config.num_layers) for h in range(config.num_kv_heads)]
  return heads[::4]


def flexicache(budget: int, config: ModelConfig = LLAMA_8B, batch=BATCH, tokens=TOKENS) -> Runner:
  """A quarter of the heads unstable, on `head_tiered`."""
  options = {"budget_tokens": budget, "page_size": PAGE, "unstable_heads": every_fourth(config)}
  return runner_of(make_policy("flexicache", **options), "head_tiered", config, batch, tokens)


def runner_of(policy, store: str, config: ModelConfig = LLAMA_8B, batch=BATCH, tokens=TOKENS):
  """The runner, also where this machine could not pin its host pools: it only compiles."""
  cache = CacheConfig(batch, tokens, PAGE, dtype="bfloat16", base_tokens=tokens)
  with mock.patch.object(host, "limit_bytes", lambda backend: math.inf):
    return prepare(build(config), policy, store, cache)


def compile_step(runner: Runner) -> Step:
  """The decode step for an H100."""
  prefilled = jax.eval_shape(lambda: steps.empty_cache(runner))
  cache = prefilled
  if runner.store.on_host:  # host pools go round `seal`, as in `steps.sealed`
    rest = prefilled.replace(host=None, pools=None)
    cache = jax.eval_shape(lambda rest, p: steps.stow(runner, rest, p), rest, prefilled.pools)
    cache = cache.replace(host=prefilled.host)
  params = param_shapes(runner.model.config, "bfloat16")
  tokens = jax.ShapeDtypeStruct((runner.decode_config.batch_size,), "int32")
  compiled = aot.compile_for_h100(
    steps.decode_step.__wrapped__,
    *(runner, params, cache, tokens),
    static_argnums=(0,),
    donate_argnums=(2,),
  )
  return Step(runner, compiled.memory_analysis(), compiled.as_text())


def schedule(hlo: str) -> list[str]:
  """What the program launches, in order: begins and ends of recalls on a stream of their own,
  attentions by the kernel, and other opcodes."""
  entry = hlo[hlo.index("\nENTRY ") :]
  launched = []
  for line in entry.splitlines():
    found = aot.INSTRUCTION.match(line)
    if not found or found[3] in FREE:
      continue
    is_recall = STREAM in line and "move_pages" in line
    names = {"call-start": RECALL, "call-done": RECALLED} if is_recall else {}
    launched.append(ATTENTION if CALL.search(line) else names.get(found[3], found[3]))
  return launched


def beside(launched: Sequence[str]) -> list[int]:
  """For each recall, in order, the other launches between its begin and its end."""
  begins, ends = (
    [place for place, name in enumerate(launched) if name == which] for which in (RECALL, RECALLED)
  )
  return [
    sum(name not in (RECALL, RECALLED) for name in launched[begin:end])
    for begin, end in zip(begins, ends, strict=True)
  ]


def told_of_schedule(launched: Sequence[str]) -> str:
  """What runs beside the recalls, in a sentence."""
  attentions = launched.count(ATTENTION)
  return (
    f"{len(launched):,} launches, {attentions} attentions; {launched.count(RECALL)} recalls, of "
    f"keys and of values apart, on a stream of their own, and {_span(beside(launched))} other "
    "launches between begin and end of each"
  )


def _span(numbers: Sequence[int]) -> str:
  low, high = min(numbers), max(numbers)
  return f"{low}" if low == high else f"{low} to {high}"


def closed_form(runner: Runner) -> int:
  """Bytes of the pages on the device: all of u heads, budget and one of the others."""
  config, cache = runner.model.config, runner.decode_config
  pages, slots = cache.pages_per_row, runner.policy.budget_tokens // PAGE + 1
  stay = sum(map(len, runner.plan.on_device))
  lists = config.num_layers * config.num_kv_heads
  page = PAGE * config.head_dim * 2 * 2
  return cache.batch_size * (stay * pages + (lists - stay) * min(pages, slots)) * page


def table(steps_: Sequence[tuple[str, Step]]) -> str:
  """A column for each step."""
  dense = steps_[0][1].runner.decode_bytes

  def row(name: str, value) -> str:
    cells = (value(step) for _, step in steps_)
    return "| " + " | ".join([name, *(f"{x:,}" if isinstance(x, int) else x for x in cells)]) + " |"

  def saved(step: Step) -> str:
    kept = step.runner.decode_bytes
    without, whole = (1 - x / dense.total for x in (kept.keys_values, kept.total))
    return f"{without:.3f} and {whole:.3f}"

  def pages(step: Step) -> int:
    kept, tiered = step.runner.decode_bytes.keys_values, step.runner.store.on_host
    assert not tiered or kept == closed_form(step.runner)
    return kept

  names = [name for name, _ in steps_]
  lines = ["| bytes | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
  values = {
    "keys and values on the device (closed form)": pages,
    "bounds, lists, tables on the device": lambda s: (
      s.runner.decode_bytes.total - s.runner.decode_bytes.keys_values
    ),
    "saved of dense, without and with these": saved,
    "keys and values on the host": lambda s: s.runner.decode_bytes.host,
    "compiler: arguments, device": lambda s: s.memory.argument_size_in_bytes,
    "compiler: arguments, host": lambda s: s.memory.host_argument_size_in_bytes,
    "compiler: updated in place, device": lambda s: s.memory.alias_size_in_bytes,
    "compiler: updated in place, host": lambda s: s.memory.host_alias_size_in_bytes,
    "compiler: temporaries, device": lambda s: s.memory.temp_size_in_bytes,
    "compiler: temporaries, host": lambda s: s.memory.host_temp_size_in_bytes,
    "copies of 64 MB or more": lambda s: len(aot.big_copies(s.hlo, BIG)),
  }
  return "\n".join([*lines, *(row(name, value) for name, value in values.items())])


def report() -> str:
  """The page."""
  runners = [("dense", runner_of(make_policy("dense"), "resident"))]
  runners += [(f"FlexiCache, {budget:,} tokens", flexicache(budget)) for budget in BUDGETS]
  found = []
  for name, runner in runners:
    print(f"compiling {name}", file=sys.stderr, flush=True)
    found.append((name, compile_step(runner)))
  told = [f"* {name}: {told_of_schedule(schedule(step.hlo))}." for name, step in found[1:]]
  return "\n".join(
    [INTRODUCTION, f"jax {jax.__version__}.", "", table(found), "", "Schedule:", "", *told]
  )


if __name__ == "__main__":
  jax.config.update("jax_disable_most_optimizations", False)
  if aot.why_not():
    sys.exit(f"cannot compile for an H100 here: {aot.why_not()}")
  print(report())
