"""New keys and values written into their pools in place: one token a row, or whole pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.mosaic import move_pages as mosaic
from pallas_kernels.page_ids import check_ids, check_pool

Pair = tuple[jax.Array, jax.Array]


def append_kv(
  pools: Pair,
  table: jax.Array,
  slots: jax.Array,
  new: Pair,
  *,
  implementation: str | None = None,
  interpret: bool = False,
) -> Pair:
  """Writes one token a row and KV head. Donate the pools, and write before reading.

  Args:
    pools: f[N, C, D] keys and values.
    table: i32[B, K, P], page ids; N where there is no page.
    slots: i32[B, K], slot within the row's P*C; out of range nothing is written.
    new: f[B, K, D] the token's key and value, of any dtype: they are stored in that of the pools.
    implementation: "xla" or "mosaic". None is XLA everywhere: on a GPU it writes in place, by one
      scatter a pool of no more bytes than the tokens have.
    interpret: run Mosaic's kernel on a CPU.

  Returns:
    The pools; a token without a page is not written.

  Raises:
    ValueError: shapes, ids or an implementation that do not fit.
  """
  n, c, d = _check_pools("append_kv", pools)
  rows = table.shape[:2]
  if table.ndim != 3 or slots.shape != rows or any(x.shape != (*rows, d) for x in new):
    raise ValueError(
      f"append_kv: table {table.shape}, slots {slots.shape}, key {new[0].shape} and value "
      f"{new[1].shape} do not fit pools {pools[0].shape}: expected [B, K, P], [B, K], [B, K, D]"
    )
  check_ids("append_kv", table, n, none=True)
  at, slot = jnp.where(slots < 0, table.shape[2], slots // c), slots % c  # -1 would be the last
  page = jnp.take_along_axis(table, at[..., None], axis=-1, mode="fill", fill_value=n)[..., 0]
  tokens = pools[0].reshape(n * c, 1, d)
  refusals = {"xla": None, "mosaic": mosaic.why_not(tokens)}
  if choose("append_kv", implementation or "xla", refusals, interpret=interpret) == "xla":
    return _set(pools, (page, slot), new)
  place = jnp.where((page >= 0) & (page < n), page * c + slot, n * c)
  by_token = (tokens, pools[1].reshape(n * c, 1, d))
  keys, values = _moved(by_token, place, new, interpret)
  return keys.reshape(n, c, d), values.reshape(n, c, d)


def scatter_pages(
  pools: Pair,
  ids: jax.Array,
  new: Pair,
  *,
  implementation: str | None = None,
  interpret: bool = False,
) -> Pair:
  """Writes whole pages. Donate the pools, and write before reading.

  Args:
    pools: f[N, C, D] keys and values.
    ids: i32[...], distinct; N for a page that is not written.
    new: f[..., C, D] keys and values, of any dtype: they are stored in that of the pools.
    implementation: "xla" or "mosaic". None is XLA everywhere: on a GPU it writes in place, by one
      scatter a pool, into which what makes the pages is fused.
    interpret: run Mosaic's kernel on a CPU.

  Returns:
    The pools.

  Raises:
    ValueError: shapes, ids or an implementation that do not fit.
  """
  n, c, d = _check_pools("scatter_pages", pools)
  if any(x.shape != (*ids.shape, c, d) for x in new):
    raise ValueError(
      f"scatter_pages: ids {ids.shape}, keys {new[0].shape} and values {new[1].shape} do not fit "
      f"pools {pools[0].shape}: expected [...] and [..., C, D]"
    )
  check_ids("scatter_pages", ids, n, none=True)
  refusals = {"xla": None, "mosaic": mosaic.why_not(pools[0])}
  if choose("scatter_pages", implementation or "xla", refusals, interpret=interpret) == "xla":
    return _set(pools, ids, new)
  return _moved(pools, ids, new, interpret)


def _set(pools: Pair, index, new: Pair) -> Pair:
  keys, values = (
    pool.at[index].set(
      x.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    for pool, x in zip(pools, new, strict=True)
  )
  return keys, values


def _moved(pools: Pair, ids, new: Pair, interpret: bool) -> Pair:
  if ids.size == 0:
    return pools
  place = ids.reshape(-1)
  pages = [
    x.astype(pool.dtype).reshape(-1, *pool.shape[1:]) for pool, x in zip(pools, new, strict=True)
  ]
  source, count = jnp.arange(place.size, dtype=jnp.int32), jnp.int32(place.size)
  keys, values = mosaic.move_pages(pages, pools, source, place, count, interpret=interpret)
  return keys, values


def _check_pools(operation: str, pools: Pair):
  if len(pools) != 2:
    raise ValueError(f"{operation}: {len(pools)} pools, expected keys and values")
  keys, values = pools
  check_pool(operation, keys)
  if keys.shape != values.shape or keys.dtype != values.dtype:
    raise ValueError(
      f"{operation}: keys {keys.dtype}{list(keys.shape)} and values "
      f"{values.dtype}{list(values.shape)} must be of one shape and dtype"
    )
  return keys.shape


def append_kv_reference(pools, table, slots, new):
  """One token at a time."""
  n, c, _ = pools[0].shape
  pools = list(pools)
  for b in range(table.shape[0]):
    for k in range(table.shape[1]):
      place, slot = divmod(int(slots[b, k]), c)
      page = int(table[b, k, place]) if 0 <= place < table.shape[2] else n
      if 0 <= page < n:
        pools = [
          p.at[page, slot].set(x[b, k].astype(p.dtype)) for p, x in zip(pools, new, strict=True)
        ]
  return tuple(pools)


def scatter_pages_reference(pools, ids, new):
  """One page at a time."""
  pools = list(pools)
  for place, page in enumerate(ids.reshape(-1).tolist()):
    if 0 <= page < pools[0].shape[0]:
      pages = [
        x.reshape(-1, *p.shape[1:])[place].astype(p.dtype) for p, x in zip(pools, new, strict=True)
      ]
      pools = [p.at[page].set(x) for p, x in zip(pools, pages, strict=True)]
  return tuple(pools)
