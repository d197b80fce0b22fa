"""Decode attention over pages on Hopper: what it takes, how it is split, how parts are merged."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.page_pools import product_dtype, slot_scales
from pallas_kernels.softmax import NEG, Parts

ROWS = 64  # of a wgmma
TILE = 64  # slots multiplied at a time
LOG2E = math.log2(math.e)
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64)
_SMS = 132  # of an H100 or H200
_STARTING = 2  # tiles that could be read while a program starts and ends


class Work(NamedTuple):
  """What is static about a call.

  Attributes:
    shape: B, K, G, D.
    pool: N, C.
    pages: M, entries of the table for each (row, head).
    dtype: of the products: that of the pools, or of q where they are i8.
    dense: slots count up to the length of a row; else those that count are given.
    int8: the pools are i8, and each slot is given its two scales.
    splits: programs for each (row, head).
    stages: tiles of the ring.
    interpret: runs on a CPU.
  """

  shape: tuple[int, int, int, int]
  pool: tuple[int, int]
  pages: int
  dtype: Any
  dense: bool
  int8: bool
  splits: int
  stages: int
  interpret: bool

  @property
  def tile_pages(self) -> int:
    """Pages that fill a tile."""
    return TILE // self.pool[1]

  @property
  def tiles(self) -> int:
    """Tiles of each (row, head), at most."""
    return -(-self.pages // self.tile_pages)

  @property
  def written(self) -> int:
    """Rows that are read and written: G, up to the 8 that a swizzled copy takes at a time."""
    return -(-self.shape[2] // 8) * 8

  @property
  def given(self) -> tuple[str, ...]:
    """What is given of each slot, a row of `Refs.slots` each."""
    return ("valid",) * (not self.dense) + ("k_scale", "v_scale") * self.int8


def why_not(q: jax.Array, keys: jax.Array) -> str | None:
  """Why the kernel cannot attend with q f[B, K, G, D] to keys f[N, C, D]; None if it can."""
  (_, _, g, d), c = q.shape, keys.shape[1]
  dtype = product_dtype(q, keys)
  if d not in HEAD_DIMS:
    return f"head size {d} is none of {HEAD_DIMS}"
  if c not in PAGE_SIZES:
    return f"page size {c} is none of {PAGE_SIZES}"
  if g > ROWS:
    return f"{g} query heads a KV head are more than {ROWS}"
  if dtype == jnp.float32:
    return "wgmma multiplies f32 (as tf32) only with both operands along D, and values are not"
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"the products are in {dtype}, expected bfloat16 or float16"
  capability = dispatch.target_capability()
  if capability is not None and capability[0] != 9:
    return f"wgmma is of compute capability 9, and the target has {capability[0]}.{capability[1]}"
  return None


def selected_parts(q, keys, values, pages, mask, scales=None, **choices) -> Parts:
  """`selected_decode_parts` of whole pages; see `_parts` for the choices."""
  work = _work(q, keys, pages, False, **choices)
  return _parts(work, q, keys, values, pages, [mask], scales)


def paged_parts(q, keys, values, table, lengths, scales=None, **choices) -> Parts:
  """`paged_decode_parts`; see `_parts` for the choices."""
  work = _work(q, keys, table, True, **choices)
  return _parts(work, q, keys, values, table, [], scales, lengths)


def _work(q, keys, pages, dense, *, splits=None, stages=2, interpret=False) -> Work:
  n, c, _ = keys.shape
  work = Work(
    shape=q.shape,
    pool=(n, c),
    pages=pages.shape[2],
    dtype=product_dtype(q, keys),
    dense=dense,
    int8=keys.dtype == jnp.int8,
    splits=1,
    stages=stages,
    interpret=interpret,
  )
  splits = choose_splits(q.shape[0] * q.shape[1], work.tiles) if splits is None else splits
  return work._replace(splits=splits, stages=min(stages, -(-work.tiles // splits)))


def choose_splits(lists: int, tiles: int) -> int:
  """Programs for each of so many lists of pages, of so many tiles each.

  Two programs fit an SM side by side, one computing while the other waits, so 264 run at a time,
  and others wait for a whole program. A program costs its tiles, and about two more: it starts,
  fetches ids, waits for the first page and writes. So the time is
      waves of programs x (tiles of a program + 2),
  of which this is the least. Few lists are split until all SMs read; many are not split.
  """

  def time(splits):
    return -(-lists * splits // (2 * _SMS)) * (-(-tiles // splits) + _STARTING)

  return min(range(1, max(tiles, 1) + 1), key=time)


def _parts(work: Work, q, keys, values, pages, valid, scales, lengths=None) -> Parts:
  """Runs the kernel and merges its splits.

  Choices: splits i, programs of each (row, head), `choose_splits` by default; stages, tiles of the
  ring of a program; interpret, to run on a CPU.
  """
  from pallas_kernels.mosaic.decode_kernel import kernel  # Mosaic takes a third of a second to load

  g = q.shape[2]
  q = jnp.pad(q.astype(work.dtype), ((0, 0), (0, 0), (0, work.written - g), (0, 0)))
  given = [x.astype(jnp.float32) for x in valid]
  given += [slot_scales(scale, pages, work.pool[1]) for scale in scales or ()]
  operands = [q, keys, values, pages]
  operands += [] if lengths is None else [lengths]
  operands += [_by_tiles(work, given)] if given else []
  o, m, l = kernel(work)(*operands)
  return _merged(o[:, :, :, :g], m[..., :g], l[..., :g])


def _by_tiles(work: Work, given):
  """f32[B, K, M, C] each -> f32[B, K, tiles, R, TILE], zeros where there are no pages."""
  missing = work.tiles * work.tile_pages - work.pages
  rows = [jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) for x in given]
  b, k = work.shape[:2]
  return jnp.stack([x.reshape(b, k, work.tiles, TILE) for x in rows], axis=3)


def _merged(o, m, l) -> Parts:
  """Parts of all splits, axis 2; the kernel's m is in powers of 2, and l is 1 for masked slots."""
  top = m.max(axis=2)
  weights = jnp.where(m <= NEG, 0.0, jnp.exp2(m - top[:, :, None]))  # of NaN, NaN
  m = jnp.where(top <= NEG, NEG, top / LOG2E)
  return Parts(m, (l * weights).sum(axis=2), (o * weights[..., None]).sum(axis=2))
