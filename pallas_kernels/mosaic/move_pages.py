"""Mosaic GPU kernel that moves pages from pools to pools, in place and by plain loads.

It is the one kernel under recall, gather, scatter and append, since all of them copy pages named by
two lists of ids. Plain loads and stores, not the tensor memory accelerator: that one refuses pinned
host memory, and a page is large enough for every thread of a program to have loads of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a program
# More do not run at a time (132 processors of 16 programs); each takes every 2,048th piece.
PROGRAMS = 2048
PIECE_BYTES = 8192  # of a page, what a program has in registers at a time: 16 of each thread


def why_not(pool: jax.Array) -> str | None:
  """Why pages of pool f[N, C, D] cannot be moved; None if they can."""
  _, c, d = pool.shape
  if c * d % THREADS == 0 or (c == 1 and d % 8 == 0 and d * pool.dtype.itemsize % 16 == 0):
    return None
  return (
    f"a page of {c} x {d} numbers is no multiple of {THREADS} numbers, nor a token of a multiple "
    "of 8 numbers and 16 bytes"
  )


def move_pages(
  origin: Sequence[jax.Array],
  into: Sequence[jax.Array | jax.ShapeDtypeStruct],
  source: jax.Array,
  target: jax.Array,
  count: jax.Array,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, ...]:
  """into with page target[i] replaced by page source[i] of origin, for i < count.

  One launch moves the pages of all pools. What it costs follows count: programs without a pair
  return at once.

  Args:
    origin: f[No, C, D] each, all of one shape and dtype; on the device or in pinned host memory.
    into: f[Ni, C, D] each, written in place where the caller gives them up; or shapes, for new
      arrays whose pages hold anything until they are written.
    source: i32[R]; out of range means the nearest page that there is.
    target: i32[R], distinct; pairs with a target out of range are left out.
    count: i32[], all R if it is more.
    interpret: run on a CPU; jax's interpreter knows one memory, so origin must be on the device.
  """
  new = [pool for pool in into if isinstance(pool, jax.ShapeDtypeStruct)]
  refs = [] if new else [jax.new_ref(pool) for pool in into]
  pieces = _pieces(origin[0])
  programs = min(PROGRAMS, source.shape[0] * pieces)
  written = plgpu.kernel(
    _body(len(into), pieces, programs),
    out_type=new,
    grid=(programs,),
    grid_names=("program",),
    scratch_types=[_staging(pool) for pool in origin],
    interpret=plgpu.InterpretGPUParams() if interpret else None,
  )(source, target, count.reshape(1), *origin, *refs)
  return tuple(written) if new else tuple(ref[...] for ref in refs)


def _pieces(pool) -> int:
  """Pieces of equal size that a page is cut into along C: a power of two, 1 if it is small."""
  _, c, d = pool.shape
  page_bytes, pieces = c * d * pool.dtype.itemsize, 1
  while page_bytes > pieces * PIECE_BYTES and c * d % (2 * pieces * THREADS) == 0:
    pieces *= 2
  return pieces


def _body(num_pools: int, pieces: int, programs: int):
  def move_pages(source, target, count, *refs):
    origin, into, staging = (refs[i * num_pools : (i + 1) * num_pools] for i in range(3))
    first = lax.axis_index("program")
    items = jnp.minimum(count[0], source.shape[0]) * pieces

    def move(step, carry):
      item = first + step * programs
      pair, piece = lax.div(item, jnp.int32(pieces)), lax.rem(item, jnp.int32(pieces))
      page = target[pair]

      @pl.when((page >= 0) & (page < into[0].shape[0]))
      def _():
        at = jnp.clip(source[pair], 0, origin[0].shape[0] - 1)
        # All loads are under way before the first is stored.
        held = [_load(pool, at, piece, pieces) for pool in origin]
        for pool, numbers, stage in zip(into, held, staging, strict=True):
          _store(pool, page, piece, pieces, numbers, stage)

      return carry

    lax.fori_loop(0, pl.cdiv(items - first, programs), move, None)

  return move_pages


def _in_registers(pool) -> bool:
  return pool.shape[1] * pool.shape[2] % THREADS == 0


def _slots(pool, piece, pieces: int):
  slots = pool.shape[1] // pieces
  return pl.ds(piece * slots, slots)


def _load(pool, page, piece, pieces: int):
  if _in_registers(pool):
    return pool[page, _slots(pool, piece, pieces)]
  # A token of fewer numbers than there are threads: several threads hold each number.
  return plgpu.load(pool.at[page, 0], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def _staging(pool):
  """Shared memory through which a short token goes: registers are stored by whole sectors."""
  return plgpu.SMEM((8 if _in_registers(pool) else pool.shape[2],), pool.dtype)


def _store(pool, page, piece, pieces: int, numbers, stage):
  if _in_registers(pool):
    pool[page, _slots(pool, piece, pieces)] = numbers
    return
  stage[...] = numbers
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(stage, pool.at[page, 0])
  plgpu.wait_smem_to_gmem(0)
