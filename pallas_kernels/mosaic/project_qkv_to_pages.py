"""Mosaic GPU kernel that projects few tokens to keys and values and writes these into pages.

A program makes some columns of one head: as many from its first half as from its second, so that
the rotation finds both coordinates of a pair in the same place of two accumulators. It reads its
columns of the weight once, in tiles through a ring of shared memory; the tokens, which all programs
read, are few and come from the L2 cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch

ROWS = 64  # tokens: what a tensor core multiplies at once
TILE = 64  # of the activations' width
STAGES = 8  # tiles of weights on their way: 128 processors x 8 x 8 kB hide the memory's latency


def why_not(x, weights, keys, values) -> str | None:
  """Why this call cannot be made by the kernel; None if it can."""
  tokens, e = x.size // x.shape[-1], x.shape[-1]
  d = keys.shape[-1]
  dtypes = {x.dtype, *(w.dtype for w in weights[1:])}
  if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
    return f"x and weights are {', '.join(sorted(map(str, dtypes)))}, not bfloat16 or float16 alone"
  if any(pool.dtype.itemsize not in (2, 4) for pool in (keys, values)):
    return f"pools are {keys.dtype} and {values.dtype}, not of 2 or 4 bytes a number"
  if not 0 < tokens <= ROWS:
    return f"there are {tokens} tokens, expected 1 to {ROWS}"
  if d % 32 or e % TILE:
    return f"head size {d} and width {e} are not multiples of 32 and {TILE}"
  capability = dispatch.target_capability()
  if capability is not None and capability[0] != 9:
    return f"wgmma is of compute capability 9, and the target has {capability[0]}.{capability[1]}"
  return None


def project_to_pages(
  x, weights, biases, rotation, keys, values, pages, slots, *, columns=None, interpret=False
):
  """The pools keys and values f[N, C, D] with the projections of x written into them.

  Args:
    x: f[..., E].
    weights: f[E, K*D] twice.
    biases: f[K*D] or None, twice.
    rotation: f32[..., D/2] twice, or None.
    keys: f[N, C, D].
    values: f[N, C, D].
    pages: i32[..., K].
    slots: i32[..., K].
    columns: 16, 32 or 64 that divides D/2: columns of each half that a program makes. Fewer give
      more programs, more give longer pieces of a weight's row. None for 32 where it divides.
    interpret: run on a CPU.
  """
  e, (_, _, d), heads = x.shape[-1], keys.shape, pages.shape[-1]
  columns = columns or (32 if d % 64 == 0 else 16)
  x, pages, slots = x.reshape(-1, e), pages.reshape(-1, heads), slots.reshape(-1, heads)
  tokens = x.shape[0]
  x = jnp.pad(x, ((0, -tokens % 8), (0, 0)))
  cos, sin = _tables(rotation, tokens, d // 2)
  zeros = jnp.zeros(heads * d, jnp.float32)
  bk, bv = (zeros if bias is None else bias.astype(jnp.float32) for bias in biases)
  pools = [jax.new_ref(pool) for pool in (keys, values)]
  stages = min(STAGES, e // TILE)
  plgpu.kernel(
    _body(tokens, columns, stages, e // TILE),
    out_type=(),
    grid=(d // 2 // columns, heads, 2),
    grid_names=("piece", "head", "which"),
    scratch_types=[
      _tiles(stages, (ROWS, TILE), columns, x.dtype),
      *(_tiles(stages, (TILE, columns), columns, x.dtype) for _ in range(2)),
      *(plgpu.SMEM((ROWS, columns), pool.dtype) for pool in (keys, keys, values, values)),
      plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    ],
    interpret=plgpu.InterpretGPUParams() if interpret else None,
  )(x, *weights, bk, bv, cos, sin, pages, slots, *pools)
  return tuple(pool[...] for pool in pools)


def _tables(rotation, tokens, half):
  """f32[ROWS, D/2] twice; no rotation turns by no angle."""
  if rotation is None:
    return jnp.ones((ROWS, half), jnp.float32), jnp.zeros((ROWS, half), jnp.float32)
  flat = (table.reshape(tokens, half).astype(jnp.float32) for table in rotation)
  return tuple(jnp.pad(table, ((0, ROWS - tokens), (0, 0))) for table in flat)


def _tiles(stages, shape, swizzled, dtype):
  """A ring of tiles as tensor cores read them; both operands must be swizzled alike."""
  bits = jnp.dtype(dtype).itemsize * 8
  swizzle = plgpu.SwizzleTransform(swizzled * bits // 8)
  return plgpu.SMEM(
    (stages, *shape), dtype, transforms=(plgpu.TilingTransform((8, swizzled)), swizzle)
  )


def _body(tokens, columns, stages, tiles):
  def project_to_pages(x, wk, wv, bk, bv, cos, sin, pages, slots, keys, values, x_ring, *scratch):
    *rings, k_first, k_second, v_first, v_second, arrived = scratch
    head = lax.axis_index("head")
    num_pages, _, d = keys.shape
    place = lax.axis_index("piece") * columns  # within each half of the head
    halves = (place, d // 2 + place)

    def project(weight, bias, pool, staged, turns):
      starts = [head * d + half for half in halves]
      multiply = _product(x, weight, starts, x_ring, rings, arrived, stages, tiles)
      accumulators = [plgpu.ACC((ROWS, columns), jnp.float32)] * 2
      parts = [
        part + lax.broadcast_in_dim(_along_columns(bias, start, columns), part.shape, [1])
        for part, start in zip(pl.run_scoped(multiply, *accumulators), starts, strict=True)
      ]
      if turns:
        c, s = (_table(table, place, columns) for table in (cos, sin))
        parts = [parts[0] * c - parts[1] * s, parts[1] * c + parts[0] * s]
      for part, stage in zip(parts, staged, strict=True):
        stage[...] = part.astype(pool.dtype)
      plgpu.commit_smem()

      @pl.loop(0, tokens)
      def _(token):
        page, slot = pages[token, head], slots[token, head]

        @pl.when((page >= 0) & (page < num_pages))
        def _():
          for stage, half in zip(staged, halves, strict=True):
            target = pool.at[page, pl.ds(slot, 1), pl.ds(half, columns)]
            plgpu.copy_smem_to_gmem(stage.at[pl.ds(token, 1)], target)

      plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("which") == 0)
    def _():
      project(wk, bk, keys, (k_first, k_second), turns=True)

    @pl.when(lax.axis_index("which") == 1)
    def _():
      project(wv, bv, values, (v_first, v_second), turns=False)

  return project_to_pages


def _product(x, weight, starts, x_ring, rings, arrived, stages, tiles):
  """A function of two accumulators: x times the columns of weight from each of the starts on."""
  rows, columns = x.shape[0], rings[0].shape[-1]

  def issue(tile, slot):
    at = pl.ds(tile * TILE, TILE)
    here = x_ring.at[slot, pl.ds(0, rows)]  # the rows below are anything, and so are their products
    plgpu.copy_gmem_to_smem(x.at[:, at], here, arrived.at[slot])
    for ring, start in zip(rings, starts, strict=True):
      source = weight.at[at, pl.ds(start, columns)]
      plgpu.copy_gmem_to_smem(source, ring.at[slot], arrived.at[slot])

  def multiply(*accumulators):
    for tile in range(stages):
      issue(tile, tile)

    @pl.loop(0, tiles)
    def _(tile):
      slot = lax.rem(tile, stages)
      plgpu.barrier_wait(arrived.at[slot])
      for accumulator, ring in zip(accumulators, rings, strict=True):
        plgpu.wgmma(accumulator, x_ring.at[slot], ring.at[slot])
      plgpu.wgmma_wait(2)  # these two may go on; those before them have read their tiles

      @pl.when((tile >= 1) & (tile - 1 + stages < tiles))
      def _():
        issue(tile - 1 + stages, lax.rem(tile - 1, stages))

    return [accumulator[...] for accumulator in accumulators]

  return multiply


def _along_columns(vector, start, columns):
  layout = plgpu.Layout.WGMMA.reduce(0)
  return plgpu.load(vector.at[pl.ds(start, columns)], layout=layout, optimized=False)


def _table(table, start, columns):
  source = table.at[:, pl.ds(start, columns)]
  return plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
