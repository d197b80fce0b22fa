"""Mosaic GPU kernel that multiplies queries with digests of pages and combines a group's products.

A program has 64 pages of one row and KV head: it fetches their digests by one copy, multiplies them
on the tensor core with all queries of the group, which are the narrow side of the product, and
combines what came out while it is in registers. Several programs share a processor, so that the
copy of one overlaps the product of another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64  # pages of a program: the rows of a tensor core's tile
QUERIES = 8  # the group is padded to a multiple, the columns of a tile


def why_not(queries: jax.Array, digests: jax.Array) -> str | None:
  """Why queries f[B, K, G, Z] and digests f[B, K, C, Z, W] cannot be multiplied, or None."""
  z, pages = digests.shape[3:]
  if 0 in digests.shape:
    return f"digests {digests.shape} are empty, and no program would be launched"
  if digests.dtype not in (jnp.bfloat16, jnp.float16):
    return f"digests are {digests.dtype}, expected bfloat16 or float16"
  if z % 16:
    return f"{z} numbers of a digest are no multiple of 16"
  if pages != TILE:
    return f"panels of {pages} pages, expected {TILE}"
  if queries.shape[2] > TILE:
    return f"{queries.shape[2]} queries of a KV head are more than {TILE}"
  return None


def page_products(
  queries: jax.Array,
  digests: jax.Array,
  num_pages: jax.Array,
  group: str,
  *,
  interpret: bool = False,
) -> jax.Array:
  """`pallas_kernels.page_scores.page_products` of one segment.

  Args:
    queries: f[B, K, G, Z] in the dtype of the digests.
    digests: f[B, K, C, Z, 64].
    num_pages: i32[]; tiles of 64 pages from there on are not read, and get -inf.
    group: "none", "max", "mean" or "sum".
    interpret: run on a CPU.

  Returns:
    f32[B, K, G, C*64] with "none", else f32[B, K, C*64].
  """
  b, k, g, _ = queries.shape
  tiles = digests.shape[2]
  width = -(-g // QUERIES) * QUERIES
  # The largest of a group is not changed by a query that is there twice, and a sum not by none.
  how = "edge" if group == "max" else "constant"
  queries = jnp.pad(queries, ((0, 0), (0, 0), (0, width - g), (0, 0)), mode=how)
  shape = (tiles * TILE, width) if group == "none" else (tiles * TILE,)
  scores = plgpu.kernel(
    _body(group, g),
    out_type=jax.ShapeDtypeStruct((b, k, *shape), jnp.float32),
    grid=(tiles, k, b),
    grid_names=("tile", "head", "row"),
    scratch_types=_scratch(width, digests, shape[1:]),
    interpret=plgpu.InterpretGPUParams() if interpret else None,
  )(queries, digests, num_pages.reshape(1))
  return scores[..., :g].swapaxes(2, 3) if group == "none" else scores


def _scratch(width: int, digests, scores_shape):
  z, dtype = digests.shape[3], digests.dtype
  columns = next(n for n in (64, 32, 16) if z % n == 0)  # of a swizzled tile
  swizzle = plgpu.SwizzleTransform(columns * dtype.itemsize)
  tiled = (plgpu.TilingTransform((8, columns)), swizzle)
  return [
    plgpu.SMEM((width, z), dtype, transforms=tiled),
    plgpu.SMEM((z, TILE), dtype, transforms=tiled),
    plgpu.SMEM((TILE, *scores_shape), jnp.float32),
    plgpu.Barrier(num_arrivals=2),
  ]


def _body(group: str, g: int):
  def page_scores(queries, digests, num_pages, scores, q, tile, out, arrived):
    row, head, panel = (lax.axis_index(name) for name in ("row", "head", "tile"))
    start = panel * TILE
    pages = pl.ds(start, TILE)

    @pl.when(start < num_pages[0])
    def _():
      plgpu.copy_gmem_to_smem(queries.at[row, head], q, arrived)
      plgpu.copy_gmem_to_smem(digests.at[row, head, panel], tile, arrived)
      plgpu.barrier_wait(arrived)
      out[...] = _combined(_product(q, tile), group, g)

    @pl.when(start >= num_pages[0])
    def _():
      unread = jnp.full(out.shape, -jnp.inf, jnp.float32)
      whole = plgpu.Layout.WGMMA
      out[...] = plgpu.layout_cast(unread, whole if group == "none" else whole.reduce(1))

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out, scores.at[row, head, pages])
    plgpu.wait_smem_to_gmem(0)

  return page_scores


def _product(q, tile):
  """f32[pages, queries] of q f[queries, Z] and tile f[Z, pages]."""

  def multiply(total):
    plgpu.wgmma(total, tile.transpose((1, 0)), q.transpose((1, 0)))
    return total[...]

  return pl.run_scoped(multiply, plgpu.ACC((tile.shape[1], q.shape[0]), jnp.float32))


def _combined(products, group: str, g: int):
  if group == "none":
    return products
  if group == "max":
    return products.max(axis=1)
  total = products.sum(axis=1)
  return total / g if group == "mean" else total
