"""Pages of a pool on the device, copied to where they lie side by side."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.mosaic import move_pages as mosaic
from pallas_kernels.page_ids import check_ids, check_pool


def gather_pages(
  pool: jax.Array,
  ids: jax.Array,
  *,
  implementation: str | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Copies of pages.

  What attends to pages should read them where they are (`selected_decode_attention`): a copy costs
  two passes over them more.

  Args:
    pool: f[N, C, D].
    ids: i32[...], out of range means the nearest page that there is.
    implementation: "xla" or "mosaic". None is XLA everywhere: on a GPU its gather is one kernel
      that reads and writes every byte once, and what follows is fused with it, which a kernel
      of our own would prevent.
    interpret: run Mosaic's kernel on a CPU.

  Returns:
    f[..., C, D].

  Raises:
    ValueError: a pool, ids or an implementation that do not fit.
  """
  check_pool("gather_pages", pool)
  check_ids("gather_pages", ids, pool.shape[0])
  refusals = {"xla": None, "mosaic": mosaic.why_not(pool)}
  if choose("gather_pages", implementation or "xla", refusals, interpret=interpret) == "xla":
    return pool.at[ids].get(mode="clip", wrap_negative_indices=False)
  return _by_mosaic(pool, ids, interpret)


def _by_mosaic(pool, ids, interpret):
  n, page = ids.size, pool.shape[1:]
  if n == 0:
    return jnp.zeros((*ids.shape, *page), pool.dtype)
  new, place = jax.ShapeDtypeStruct((n, *page), pool.dtype), jnp.arange(n, dtype=jnp.int32)
  count = jnp.int32(n)
  (pages,) = mosaic.move_pages([pool], [new], ids.reshape(n), place, count, interpret=interpret)
  return pages.reshape(*ids.shape, *page)


def gather_pages_reference(pool, ids):
  """One page at a time."""
  pages = [pool[min(max(int(i), 0), pool.shape[0] - 1)] for i in ids.reshape(-1)]
  return jnp.stack(pages).reshape(*ids.shape, *pool.shape[1:])
