"""Per-channel minimum and maximum of the keys of a page."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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


def _limits(dtype):
  info = jnp.finfo(dtype)
  return jnp.asarray(info.max, dtype), jnp.asarray(info.min, dtype)


def page_bounds_reference(keys, valid):
  """One page at a time: keys f[C, D], valid bool[C]."""
  return jnp.concatenate([keys[valid].max(axis=0), keys[valid].min(axis=0)])
