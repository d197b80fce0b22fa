"""Pages between host and device on a CPU: what arrives, what is refused, and what XLA copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recall_pages import (
  HOST,
  offload_pages,
  recall_pages,
  recall_pages_reference,
)
from tests import aot

MOVES = 6
SOURCE = jnp.asarray([3, 1, 8, 1, 0, 5], jnp.int32)
TARGET = jnp.asarray([2, 0, 6, 5, 3, 1], jnp.int32)


def pools(seed: int, pages: int, c: int, d: int, dtype: str) -> tuple[jax.Array, ...]:
  """Keys and values."""
  numbers = np.random.default_rng(seed).standard_normal((2, pages, c, d))
  return tuple(jnp.asarray(x, dtype) for x in numbers)


@jax.jit
def to_host(arrays):
  return jax.device_put(arrays, HOST)


def same(found, expected):
  for one, other in zip(found, expected, strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, other)))


@pytest.mark.parametrize("page", [(16, 64, "float32"), (1, 80, "bfloat16"), (8, 96, "float16")])
def test_recall_and_offload(page):
  there, here = pools(0, 9, *page), pools(1, 7, *page)
  recall, offload = jax.jit(recall_pages), jax.jit(offload_pages)
  on_host = to_host(there), to_host(here)
  for count in (-3, 0, 1, 4, MOVES, MOVES + 9):
    n = jnp.int32(count)
    expected = recall_pages_reference(there, here, SOURCE, TARGET, n)
    same(recall(on_host[0], here, SOURCE, TARGET, n), expected)
    back = offload(there, on_host[1], SOURCE, TARGET, n)
    assert all(jax.typeof(x).memory_space == HOST for x in back)
    same(back, expected)


def test_ids_that_do_not_count_may_be_anything():
  there, here = pools(0, 9, 8, 64, "float32"), pools(1, 7, 8, 64, "float32")
  wild = jnp.asarray([10**9, -5], jnp.int32)
  source, target = jnp.concatenate([SOURCE, wild]), jnp.concatenate([TARGET, wild])
  expected = recall_pages_reference(there, here, SOURCE, TARGET, jnp.int32(MOVES))
  same(jax.jit(recall_pages)(to_host(there), here, source, target, jnp.int32(MOVES)), expected)
  back = jax.jit(offload_pages)(there, to_host(here), source, target, jnp.int32(MOVES))
  same(back, expected)


def test_what_is_refused():
  there, here = pools(0, 9, 8, 64, "float32"), pools(1, 7, 8, 64, "float32")
  n = jnp.int32(1)

  def refused(text, *args, **kw):
    with pytest.raises(ValueError, match=text):
      recall_pages(*args, **kw)

  refused("2 pools to read and 1 to write", there, here[:1], SOURCE, TARGET, n)
  refused(
    r"\[8, 64\] and of float32\[8, 32\]", there, pools(1, 7, 8, 32, "float32"), SOURCE, TARGET, n
  )
  refused("float32.* and of bfloat16", there, pools(1, 7, 8, 64, "bfloat16"), SOURCE, TARGET, n)
  refused(r"source \(6,\) and target \(5,\)", there, here, SOURCE, TARGET[:5], n)
  three = jnp.int32(3)
  refused("source: 9 is out of range, expected 0 to 8", there, here, SOURCE + 1, TARGET, three)
  refused("target: -1 is out of range, expected 0 to 6", there, here, SOURCE, TARGET - 1, three)
  refused("ids are int16", there, here, SOURCE.astype("int16"), TARGET, n)
  refused("has 2 axes", [x[0] for x in there], [x[0] for x in here], SOURCE, TARGET, n)
  refused("no NVIDIA GPU", there, here, SOURCE, TARGET, n, implementation="mosaic")
  tokens = [x[:, :1, :12] for x in (*there, *here)]
  args = (tokens[:2], tokens[2:], SOURCE, TARGET, n)
  refused("1 x 12 numbers", *args, implementation="mosaic", interpret=True)


PAGES, PAGE = 4096, (16, 64)
POOL_BYTES = PAGES * 16 * 64 * 4


LAYERS, NEW_PAGES = 2, 16


def attend(new, device):
  """What the next layer appends depends on what this one attends to."""
  keys, values = (pool.at[jnp.arange(NEW_PAGES)].get(mode="clip") for pool in device)
  out = jnp.tanh(keys @ values.swapaxes(1, 2)).mean()
  return tuple(x + out for x in new)


def append_first(host, device, new, ids, count):
  for _ in range(LAYERS):
    host = offload_pages(new, host, ids, ids, count)
    device = recall_pages(host, device, ids, ids, count)
    new = attend(new, device)
  return host, device, new


def barrier(host, device, new, ids, count):
  for _ in range(LAYERS):
    device = recall_pages(host, device, ids, ids, count)
    device, host = jax.lax.optimization_barrier((device, host))
    host = offload_pages(new, host, ids, ids, count)
    new, device = jax.lax.optimization_barrier((attend(new, device), device))
  return host, device, new


def no_barrier(host, device, new, ids, count):
  for _ in range(LAYERS):
    device = recall_pages(host, device, ids, ids, count)
    host = offload_pages(new, host, ids, ids, count)
    new = attend(new, device)
  return host, device, new


def shapes():
  """Arguments of the three orders."""
  struct = jax.ShapeDtypeStruct
  host, device = aot.on_host((PAGES, *PAGE), "float32"), struct((PAGES, *PAGE), "float32")
  new, ids = struct((NEW_PAGES, *PAGE), "float32"), struct((NEW_PAGES,), "int32")
  return (host, host), (device, device), (new, new), ids, struct((), "int32")


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("order", [append_first, barrier, no_barrier])
def test_order_decides_whether_a_cpu_copies_a_pool(order):
  compiled = jax.jit(order, donate_argnums=(0, 1)).lower(*shapes()).compile()
  memory, copies = compiled.memory_analysis(), aot.big_copies(compiled.as_text(), POOL_BYTES)
  print(order.__name__, copies, memory)
  if order is no_barrier:
    assert copies
  else:
    assert not copies
    assert memory.temp_size_in_bytes + memory.host_temp_size_in_bytes < POOL_BYTES // 16
    assert memory.alias_size_in_bytes + memory.host_alias_size_in_bytes >= 4 * POOL_BYTES
