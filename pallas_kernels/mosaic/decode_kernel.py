"""The kernel of decode attention over pages on Hopper: what one program does.

A program attends to some of the pages of one (row, KV head), in tiles of 64 slots that several
pages fill. TMA copies pages into a ring of tiles in shared memory while `wgmma` multiplies a tile
that has come, with the G queries of the head in a block of 64 rows, the fewest that it takes. Rows
beyond G are whatever shared memory held: rows do not meet, and only the first are written.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.decode_attention import LOG2E, ROWS, TILE, Work
from pallas_kernels.softmax import NEG

_MATRIX = plgpu.Layout.WGMMA
_COLUMNS, _ROWS = _MATRIX.reduce(0), _MATRIX.reduce(1)


class Refs(NamedTuple):
  """Arrays in the GPU's memory.

  Attributes:
    q: f[B, K, rows, D].
    keys: f[N, C, D].
    values: f[N, C, D].
    pages: i32[B, K, M].
    lengths: i32[B], with `Work.dense`.
    slots: f32[B, K, tiles, R, TILE], the R rows of `Work.given`, where there are any.
    o: f32[B, K, splits, rows, D], written.
    m: f32[B, K, splits, ROWS], written, in powers of 2.
    l: f32[B, K, splits, ROWS], written.
  """

  q: Any
  keys: Any
  values: Any
  pages: Any
  lengths: Any
  slots: Any
  o: Any
  m: Any
  l: Any


class Ring(NamedTuple):
  """Tiles in shared memory, `Work.stages` of each; arrived is their barriers."""

  keys: Any
  values: Any
  slots: Any
  arrived: Any


class Softmax(NamedTuple):
  """The online softmax of a program, in registers: o f32[ROWS, D], m and l f32[ROWS]."""

  o: jax.Array
  m: jax.Array
  l: jax.Array


def kernel(work: Work):
  """`plgpu.kernel` of the program; takes the arrays of `Refs` that are read and are there."""
  b, k, _, d = work.shape

  def f32(*shape):
    return jax.ShapeDtypeStruct((b, k, work.splits, *shape), jnp.float32)

  absent = [name for name, there in (("lengths", work.dense), ("slots", work.given)) if not there]
  present = [name for name in Refs._fields if name not in absent]

  def body(*refs):
    refs, scratch = refs[: len(present)], refs[len(present) :]
    _program(work, Refs(**dict.fromkeys(absent), **dict(zip(present, refs, strict=True))), *scratch)

  return plgpu.kernel(
    body,
    out_type=(f32(work.written, d), f32(ROWS), f32(ROWS)),
    grid=(work.splits, k, b),
    grid_names=("split", "head", "row"),
    scratch_types=(
      plgpu.Barrier(),
      plgpu.Barrier(num_arrivals=2 * work.tile_pages + bool(work.given), num_barriers=work.stages),
    ),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=plgpu.InterpretGPUParams() if work.interpret else None,
  )


def _program(work: Work, refs: Refs, q_arrived, arrived):
  row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
  first, count, length = _share(work, refs, row, split)
  d, stages = work.shape[3], work.stages
  pool_dtype = jnp.int8 if work.int8 else work.dtype

  def attend(q, keys, values, *rest):
    slots, wide = (rest[0], rest[1:]) if work.given else (None, rest)
    ring = Ring(keys, values, slots, arrived)
    return _attend(work, refs, q, q_arrived, ring, wide, (row, head), first, count, length)

  tiles = [_tiled((stages, TILE, d), pool_dtype)] * 2
  given = [plgpu.SMEM((stages, len(work.given), TILE), jnp.float32)] if work.given else []
  wide = [_tiled((TILE, d), work.dtype)] * 2 if work.int8 else []
  # The ring is free when this returns, and the results go where it was.
  done = pl.run_scoped(attend, _tiled((ROWS, d), work.dtype), *tiles, *given, *wide)

  def write(o, m, l):
    o[...], m[...], l[...] = done
    plgpu.commit_smem()
    written = pl.ds(0, work.written)
    plgpu.copy_smem_to_gmem(o.at[written], refs.o.at[row, head, split])
    plgpu.copy_smem_to_gmem(m, refs.m.at[row, head, split])
    plgpu.copy_smem_to_gmem(l, refs.l.at[row, head, split])
    plgpu.wait_smem_to_gmem(0)

  vector = plgpu.SMEM((ROWS,), jnp.float32)
  pl.run_scoped(write, _tiled((ROWS, d), jnp.float32), vector, vector)


def _share(work: Work, refs: Refs, row, split):
  """First tile and number of tiles of a split, and the length of its row; all i32[]."""
  tiles, length = jnp.int32(work.tiles), jnp.int32(work.pages * work.pool[1])
  if work.dense:
    length = jnp.clip(refs.lengths[row], 0, length)
    tiles = lax.div(length + (TILE - 1), jnp.int32(TILE))
  share = lax.div(tiles + (work.splits - 1), jnp.int32(work.splits))
  first = split * share
  return first, jnp.clip(tiles - first, 0, share), length


def _attend(work, refs, q, q_arrived, ring, wide, place, first, count, length) -> Softmax:
  """Over the tiles [first, first + count)."""
  stages = work.stages

  def page_ids(t):
    """Of a tile; they are read a step before they are needed, and clamped where they are used."""
    last = work.pages - 1
    at = [jnp.minimum((first + t) * work.tile_pages + j, last) for j in range(work.tile_pages)]
    return tuple(refs.pages[*place, i] for i in at)

  def copy(t, stage, ids):
    _copy_tile(work, refs, ring, place, first + t, stage, ids)

  plgpu.copy_gmem_to_smem(refs.q.at[place], q.at[pl.ds(0, work.written)], q_arrived)
  for stage in range(stages):

    @pl.when(stage < count)
    def _(stage=stage):
      copy(stage, stage, page_ids(stage))

  plgpu.barrier_wait(q_arrived)

  def step(t, carry):
    softmax, ids = carry
    stage = lax.rem(t, jnp.int32(stages))
    next_ids = page_ids(t + stages + 1)
    plgpu.barrier_wait(ring.arrived.at[stage])
    softmax = _tile(work, q, ring, wide, stage, softmax, length - (first + t) * TILE)

    @pl.when(t + stages < count)
    def _():
      if work.given or work.interpret:
        # TMA may not overwrite what plain loads have read before a fence between the two. (wgmma
        # needs none, and where it is interpreted plain loads take its place.)
        plgpu.commit_smem()
      copy(t + stages, stage, ids)

    return softmax, next_ids

  return lax.fori_loop(0, count, step, (_nothing(work), page_ids(stages)))[0]


def _copy_tile(work: Work, refs: Refs, ring: Ring, place, t, stage, ids):
  """Starts the copies of one tile; pages out of range are masked, and read somewhere in range."""
  n, c = work.pool
  arrived = ring.arrived.at[stage]
  for j, page in enumerate(ids):
    page, slots = jnp.clip(page, 0, n - 1), pl.ds(j * c, c)
    plgpu.copy_gmem_to_smem(refs.keys.at[page], ring.keys.at[stage, slots], arrived)
    plgpu.copy_gmem_to_smem(refs.values.at[page], ring.values.at[stage, slots], arrived)
  if work.given:
    plgpu.copy_gmem_to_smem(refs.slots.at[*place, t], ring.slots.at[stage], arrived)


def _nothing(work: Work) -> Softmax:
  def filled(value, layout, *shape):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

  return Softmax(
    filled(0.0, _MATRIX, ROWS, work.shape[3]), filled(NEG, _ROWS, ROWS), filled(0.0, _ROWS, ROWS)
  )


def _tile(work: Work, q, ring: Ring, wide, stage, softmax: Softmax, length) -> Softmax:
  """One more tile; length is the number of its slots that count, with `Work.dense`."""
  keys, values = ring.keys.at[stage], ring.values.at[stage]

  def given(name, layout):
    place = work.given.index(name)
    return plgpu.load(ring.slots.at[stage, place], layout=layout, optimized=False)

  def valid(layout):
    if work.dense:
      return plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout) < length
    return given("valid", layout) > 0.0

  if work.int8:
    wide[0][...] = _widened(keys, work.dtype)
    wide[1][...] = _widened(values, work.dtype)
    plgpu.commit_smem()
    keys, values = wide
  else:
    all_count = length >= TILE if work.dense else jnp.min(given("valid", _COLUMNS)) > 0.0

    @pl.when(jnp.logical_not(all_count))
    def _():
      _zero(values, valid(_ROWS))

  scores = _scores(q, keys) * (LOG2E / math.sqrt(work.shape[3]))
  if work.int8:
    scores = scores * _down(given("k_scale", _COLUMNS))
  scores = jnp.where(_down(valid(_COLUMNS)), scores, NEG)
  m = jnp.maximum(softmax.m, scores.max(axis=1))
  weights = jnp.exp2(scores - _across(m, TILE))
  shrunk = jnp.exp2(softmax.m - m)
  l = softmax.l * shrunk + weights.sum(axis=1)
  if work.int8:
    # Of a page that nobody owns the scale may be NaN too.
    scales = given("v_scale", _COLUMNS)
    weights = weights * _down(jnp.where(valid(_COLUMNS), scales, jnp.zeros_like(scales)))
  o = softmax.o * _across(shrunk, work.shape[3])
  return Softmax(_accumulate(work, o, weights.astype(work.dtype), values), m, l)


def _scores(q, keys):
  """f32[ROWS, TILE]."""

  def product(acc):
    plgpu.wgmma(acc, q, keys.transpose((1, 0)))
    return acc[...]

  return pl.run_scoped(product, plgpu.ACC((ROWS, TILE), jnp.float32))


def _accumulate(work: Work, o, weights, values) -> Any:
  """o + weights @ values; interpreted, wgmma takes no operand in registers."""
  if work.interpret:
    return o + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
  return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(plgpu.ACC.init(o))


def _zero(values, valid):
  """Zeros in the slots that do not count: they may hold NaN, and 0 x NaN is NaN."""
  held = plgpu.load(values, layout=_MATRIX)
  values[...] = jnp.where(_across(valid, held.shape[1]), held, jnp.zeros_like(held))
  plgpu.commit_smem()


def _widened(tile, dtype):
  return plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA_UPCAST_2X).astype(dtype)


def _down(columns):
  """f[TILE] -> f[ROWS, TILE]."""
  return lax.broadcast_in_dim(columns, (ROWS, TILE), [1])


def _across(rows, width: int):
  """f[ROWS] -> f[ROWS, width]."""
  return lax.broadcast_in_dim(rows, (ROWS, width), [0])


def _tiled(shape, dtype):
  """Shared memory as wgmma and swizzled copies want it: the widest swizzle that divides a row.

  Rows of 80 int8 have none; these are only read, to be widened.
  """
  itemsize = jnp.dtype(dtype).itemsize
  for swizzle in (128, 64, 32):
    if shape[-1] * itemsize % swizzle == 0:
      tiling = plgpu.TilingTransform((8, swizzle // itemsize))
      return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))
  return plgpu.SMEM(shape, dtype)
