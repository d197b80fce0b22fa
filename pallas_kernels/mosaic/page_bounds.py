"""Mosaic GPU kernels for bounds: those of whole pages of a pool, and one more key in one page."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a program
BATCH = 8  # keys that are on their way to a program at a time


def why_not_pages(pool: jax.Array) -> str | None:
  """Why pages of pool f[N, C, D] cannot be bounded; None if they can."""
  (_, c, d), item = pool.shape, pool.dtype.itemsize
  if c % BATCH:
    return f"pages of {c} slots, expected a multiple of {BATCH}"
  if d % 8 or d * item % 16:
    return f"keys of {d} numbers, expected a multiple of 8 numbers and 16 bytes"
  return None


def why_not_extend(bounds: jax.Array) -> str | None:
  """Why bounds f[B, K, 2*D, P] cannot be extended; None if they can."""
  z = bounds.shape[2]
  if 0 in bounds.shape:
    return f"bounds {bounds.shape} are empty, and no program would be launched"
  return f"{z} numbers of a page's bounds are no multiple of {THREADS}" if z % THREADS else None


def bounds_of_pages(
  pool: jax.Array, ids: jax.Array, used: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """f[n, 2, D], maxima and minima of pages ids i32[n] of pool f[N, C, D], a page a program.

  used i32[n] are the slots that count; without any, slot 0 does.
  """
  d = pool.shape[2]
  return plgpu.kernel(
    _page_bounds,
    out_type=jax.ShapeDtypeStruct((ids.shape[0], 2, d), pool.dtype),
    grid=(ids.shape[0],),
    grid_names=("page",),
    scratch_types=[plgpu.SMEM((2, d), pool.dtype)],
    interpret=plgpu.InterpretGPUParams() if interpret else None,
  )(pool, ids, used)


def _page_bounds(pool, ids, used, out, staging):
  place = lax.axis_index("page")
  n, c, d = pool.shape
  page = jnp.clip(ids[place], 0, n - 1)
  newest = jnp.clip(used[place] - 1, 0, c - 1)

  def read(batch):
    # A slot that does not count is not read: another look at the newest key changes nothing.
    slots = [jnp.minimum(batch * BATCH + i, newest) for i in range(BATCH)]
    rows = [_row(pool.at[page, slot], d) for slot in slots]
    return functools.reduce(jnp.maximum, rows), functools.reduce(jnp.minimum, rows)

  def grow(batch, bounds):
    highest, lowest = read(batch)
    return jnp.maximum(bounds[0], highest), jnp.minimum(bounds[1], lowest)

  highest, lowest = lax.fori_loop(1, newest // BATCH + 1, grow, read(0))
  staging[0], staging[1] = highest, lowest
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(staging, out.at[place])
  plgpu.wait_smem_to_gmem(0)


def _row(ref, d: int):
  """A key: numbers spread over the threads, or where they do not come out even held by several."""
  spread = plgpu.Layout.WG_STRIDED((d,), vec_size=1)
  layout = plgpu.Layout.WGMMA.reduce(0) if d % THREADS else spread
  return plgpu.load(ref, layout=layout, optimized=False)


def extend_bounds(
  bounds: jax.Array,
  key: jax.Array,
  place: jax.Array,
  first: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """bounds f[B, K, 2*D, P] with key f[B, K, D] counted in at page place i32[B], written in place.

  Where first bool[B] holds, the key is the only one of its page; out of range nothing is written.
  """
  b, k = key.shape[:2]
  ref = jax.new_ref(bounds)
  twice = jnp.concatenate([key, key], axis=-1)
  plgpu.kernel(
    _extend_bounds,
    out_type=(),
    grid=(b, k),
    grid_names=("row", "head"),
    interpret=plgpu.InterpretGPUParams() if interpret else None,
  )(twice, place, first.astype(jnp.int32), ref)
  return ref[...]


def _extend_bounds(keys, places, first, bounds):
  row, head = lax.axis_index("row"), lax.axis_index("head")
  page, (z, pages) = places[row], bounds.shape[2:]
  layout = plgpu.Layout.WG_STRIDED((z,), vec_size=1)

  @pl.when((page >= 0) & (page < pages))
  def _():
    key = plgpu.load(keys.at[row, head], layout=layout, optimized=False)

    @pl.when(first[row] > 0)
    def _():
      bounds[row, head, :, page] = key

    @pl.when(first[row] == 0)
    def _():
      old = plgpu.load(bounds.at[row, head, :, page], layout=layout, optimized=False)
      number = plgpu.broadcasted_iota(jnp.int32, (z,), 0, layout=layout)
      grown = jnp.where(number < z // 2, jnp.maximum(old, key), jnp.minimum(old, key))
      bounds[row, head, :, page] = grown
