"""Per-channel minimum and maximum of the keys of a page."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.mosaic import page_bounds as mosaic
from pallas_kernels.page_ids import check_ids, check_pool


def page_bounds(keys: jax.Array, valid: jax.Array) -> jax.Array:
  """Bounds of whole pages.

  Args:
    keys: f[..., C, D].
    valid: bool[..., C], slots that count; a page without any gets meaningless bounds.

  Returns:
    f[..., 2*D]: the maxima, then the minima.
  """
  top, bottom = _limits(keys.dtype)
  highest = jnp.where(valid[..., None], keys, bottom).max(axis=-2)
  lowest = jnp.where(valid[..., None], keys, top).min(axis=-2)
  return jnp.concatenate([highest, lowest], axis=-1)


def extend_bounds(bounds: jax.Array, key: jax.Array, first: jax.Array) -> jax.Array:
  """Bounds after one more key.

  Args:
    bounds: f[..., 2*D], of the page before; ignored where first holds.
    key: f[..., D].
    first: bool[...], the key is the first one of its page.

  Returns:
    f[..., 2*D].
  """
  highest, lowest = jnp.split(bounds, 2, axis=-1)
  grown = jnp.concatenate([jnp.maximum(highest, key), jnp.minimum(lowest, key)], axis=-1)
  return jnp.where(first[..., None], jnp.concatenate([key, key], axis=-1), grown)


def bounds_of_pages(
  pool: jax.Array,
  ids: jax.Array,
  used: jax.Array,
  *,
  implementation: str | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Bounds of pages where they lie in their pool.

  Args:
    pool: f[N, C, D], keys.
    ids: i32[...], out of range means the nearest page that there is.
    used: i32[...], slots that count, the first ones; without any, bounds mean nothing.
    implementation: "xla" or "mosaic". None is XLA everywhere: on a GPU its gather is part of the
      kernel that reduces, which reads every page once. (It writes maxima and minima apart and then
      joins them, 4/C of the bytes of the pages more; Mosaic's kernel does not.)
    interpret: run Mosaic's kernel on a CPU.

  Returns:
    f[..., 2*D]: the maxima, then the minima.

  Raises:
    ValueError: a pool, ids or an implementation that do not fit.
  """
  check_pool("bounds_of_pages", pool)
  check_ids("bounds_of_pages", ids, pool.shape[0])
  if ids.shape != used.shape:
    raise ValueError(f"bounds_of_pages: ids {ids.shape} and used {used.shape} must be of one shape")
  refusals = {"xla": None, "mosaic": mosaic.why_not_pages(pool)}
  chosen = choose("bounds_of_pages", implementation or "xla", refusals, interpret=interpret)
  if chosen == "xla" or ids.size == 0:  # a launch of no programs is an error
    slots = jnp.arange(pool.shape[1]).reshape((1,) * ids.ndim + (-1,))
    pages = pool.at[ids].get(mode="clip", wrap_negative_indices=False)
    return page_bounds(pages, slots < used[..., None])
  found = mosaic.bounds_of_pages(pool, ids.reshape(-1), used.reshape(-1), interpret=interpret)
  return found.reshape(*ids.shape, -1)


def append_bounds(
  bounds: jax.Array,
  key: jax.Array,
  place: jax.Array,
  first: jax.Array,
  *,
  implementation: str | None = None,
  interpret: bool = False,
) -> jax.Array:
  """The bounds of every row's pages after one more key in one of them. Donate the bounds.

  Args:
    bounds: f[B, K, 2*D, P], as a panel of P pages that `page_scores` reads.
    key: f[B, K, D].
    place: i32[B], page of the row that the key belongs to; out of range nothing is written.
    first: bool[B], the key is the first one of its page.
    implementation: "xla" or "mosaic". None is XLA everywhere: on a GPU it takes a gather and a
      scatter in place, into which the rest is fused, of no more bytes than the key's bounds.
    interpret: run Mosaic's kernel on a CPU.

  Returns:
    f[B, K, 2*D, P].

  Raises:
    ValueError: shapes or an implementation that do not fit.
  """
  if bounds.ndim != 4:
    raise ValueError(f"append_bounds: bounds {bounds.shape}, expected [B, K, 2*D, P]")
  b, k, z, pages = bounds.shape
  if key.shape != (b, k, z // 2) or place.shape != (b,) or first.shape != (b,):
    raise ValueError(
      f"append_bounds: key {key.shape}, place {place.shape} and first {first.shape} do not fit "
      f"bounds {bounds.shape}: expected [B, K, D], [B] and [B] for [B, K, 2*D, P]"
    )
  key = key.astype(bounds.dtype)
  refusals = {"xla": None, "mosaic": mosaic.why_not_extend(bounds)}
  if choose("append_bounds", implementation or "xla", refusals, interpret=interpret) == "mosaic":
    return mosaic.extend_bounds(bounds, key, place, first, interpret=interpret)
  here = jnp.clip(place, 0, pages - 1)[:, None, None, None]
  old = jnp.take_along_axis(bounds, here, axis=-1)[..., 0]
  grown = extend_bounds(old, key, jnp.broadcast_to(first[:, None], (b, k)))
  rows, heads = jnp.arange(b)[:, None], jnp.arange(k)[None]
  there = bounds.at[rows, heads, :, place[:, None]]
  return there.set(grown, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _limits(dtype):
  info = jnp.finfo(dtype)
  return jnp.asarray(info.max, dtype), jnp.asarray(info.min, dtype)


def page_bounds_reference(keys, valid):
  """One page at a time: keys f[C, D], valid bool[C]."""
  return jnp.concatenate([keys[valid].max(axis=0), keys[valid].min(axis=0)])
