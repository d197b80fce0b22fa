"""Measures this machine for the cost model of `kvjax.sim`, and prints its entry.

    python -m scripts.calibrate
    python -m scripts.calibrate --check

Products and reading are timed on matrices of the size that a small model has, not on one huge one:
beside the rates of the hardware it is what XLA makes of them that counts. --check also times a
prefill and decode steps of --model, dense, beside what the cost model says of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from eval import cli
from eval.results import device_kind
from eval.tables import human_seconds
from kvjax import CacheConfig, decode_step, make_policy, prepare
from kvjax.engine.generate import prefill
from kvjax.sim import Machine, decode_step_s, prefill_s
from models import load
from pallas_kernels.contiguous_decode_attention import contiguous_decode_attention
from pallas_kernels.prefill_attention import prefill_attention

WIDTH, WIDER, MATRICES, ROWS = 576, 1536, 80, 512  # 3.5 MB each, 283 MB in f32
CHECKS = ((1024, 1), (1024, 4), (4096, 1))  # tokens, rows
STEPS = 12


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_bool("check", False, "Time --model too, beside what the cost model says.")
  cli.define_model_flag()


def main(args: flags.FlagValues) -> None:
  """Measures and prints."""
  found = measured()
  for name, value in found._asdict().items():
    print(f"    {name}={value:.4g}," if isinstance(value, float) else f"    {name}={value!r},")
  if args.check:
    check(found, args.model)


def measured() -> Machine:
  """This machine, in f32; a CPU's device memory is that of its host."""
  one, few, many = (_product_s(rows) for rows in (1, 4, ROWS))
  matrices = MATRICES * WIDTH * WIDER
  copied = _copy_bytes_per_s()
  return Machine(
    name=device_kind(),
    source="scripts.calibrate",
    product_flops_per_s=2 * matrices * ROWS / many,
    attention_flops_per_s=_attention_flops_per_s(),
    read_bytes_per_s=4 * matrices / one,
    few_rows_bytes_per_s=min(4 * matrices / few, _attention_bytes_per_s()),
    link_bytes_per_s=copied,
    host_bytes_per_s=copied,
    disk_bytes_per_s=1.5e9,
    device_bytes=24e9,
    host_bytes=24e9,
    item_bytes=4,
    layer_s=1e-4,
    transfer_s=1e-6,
  )


def median_s(call: Callable[[], jax.Array], repeats: int = 7) -> float:
  """Median seconds, after one that compiles."""
  seconds = []
  for _ in range(repeats + 1):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return float(np.median(seconds[1:]))


def _product_s(rows: int) -> float:
  """Products of rows with matrices up and down, one after the other."""
  up = [jnp.full((WIDTH, WIDER), 1e-3) for _ in range(MATRICES // 2)]
  down = [jnp.full((WIDER, WIDTH), 1e-3) for _ in range(MATRICES // 2)]

  @jax.jit
  def run(x, up, down):
    for widen, narrow in zip(up, down, strict=True):
      x = (x @ widen) @ narrow
    return x

  return median_s(lambda: run(jnp.ones((rows, WIDTH)), up, down))


def _attention_flops_per_s(heads: int = 9, kv_heads: int = 3, d: int = 64) -> float:
  """A chunk of 512 queries over itself: as many scores as any other block of a long prompt."""
  q = jnp.ones((1, ROWS, heads, d))
  k = jnp.ones((1, ROWS, kv_heads, d))
  run = jax.jit(partial(prefill_attention, past=[]))
  return 4 * heads * d * ROWS * ROWS / median_s(lambda: run(q, k, k))


def _attention_bytes_per_s(heads: int = 9, kv_heads: int = 3, d: int = 64, t: int = 65536) -> float:
  """Decode attention over keys and values that no cache holds."""
  keys, values = jnp.ones((1, kv_heads, d, t)), jnp.ones((1, kv_heads, t, d))
  q, lengths = jnp.ones((1, kv_heads, heads // kv_heads, d)), jnp.full(1, t, jnp.int32)
  run = jax.jit(contiguous_decode_attention)
  return 4 * (keys.size + values.size) / median_s(lambda: run(q, [keys], [values], lengths))


def _copy_bytes_per_s(num_bytes: int = 1 << 28) -> float:
  source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    np.copyto(target, source)
    seconds.append(time.perf_counter() - start)
  return num_bytes / min(seconds)


def check(found: Machine, source: str) -> None:
  """Prints dense prefills and decode steps of a model beside what the cost model says of them."""
  loaded = load(source)
  config = loaded.model.config
  print(f"\n{loaded.name}, dense: measured, and simulated over measured")
  for tokens, rows in CHECKS:
    total = tokens + STEPS
    runner = prepare(
      loaded.model, make_policy("dense"), "resident", CacheConfig(rows, total, base_tokens=total)
    )
    prompts = [[1] * tokens] * rows
    prefill(runner, loaded.params, prompts)  # which compiles
    start = time.perf_counter()
    _, cache = prefill(runner, loaded.params, prompts)
    jax.block_until_ready(cache.lengths)
    read_s = time.perf_counter() - start
    seconds = []
    for _ in range(STEPS):
      start = time.perf_counter()
      logits, cache = decode_step(runner, loaded.params, cache, jnp.ones(rows, jnp.int32))
      jax.block_until_ready(logits)
      seconds.append(time.perf_counter() - start)
    step_s = float(np.median(seconds[1:]))
    said = (
      prefill_s(config, found, tokens, batch_size=rows),
      decode_step_s(config, found, [tokens] * rows),
    )
    print(
      f"  {rows} x {tokens:,} tokens: prefill {human_seconds(read_s)}, {said[0] / read_s:.2f}; "
      f"step {human_seconds(step_s)}, {said[1] / step_s:.2f}",
      flush=True,
    )


if __name__ == "__main__":
  cli.run(main, define_flags)
