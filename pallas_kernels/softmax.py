"""Softmax in parts: attention over pieces of the keys, and how pieces become one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEG = -1e30  # finite, so that the difference of two masked scores is 0 and not NaN


class Parts(NamedTuple):
  """Attention over some of the keys, before normalisation; all f32.

  Attributes:
    m: f32[..., R], largest score.
    l: f32[..., R], sum of exp(score - m).
    o: f32[..., R, D], sum of exp(score - m) * value.
  """

  m: jax.Array
  l: jax.Array
  o: jax.Array


def empty_parts(shape: tuple[int, ...]) -> Parts:
  """Parts over no keys, for queries of this shape [..., R, D]."""
  row = shape[:-1]
  return Parts(
    jnp.full(row, NEG, jnp.float32), jnp.zeros(row, jnp.float32), jnp.zeros(shape, jnp.float32)
  )


def merge_parts(a: Parts, b: Parts) -> Parts:
  """Attention over the keys of both."""
  m = jnp.maximum(a.m, b.m)
  wa, wb = jnp.exp(a.m - m), jnp.exp(b.m - m)
  return Parts(m, a.l * wa + b.l * wb, a.o * wa[..., None] + b.o * wb[..., None])


def parts_of(scores: jax.Array, values: jax.Array, scales: jax.Array | None = None) -> Parts:
  """Attention of f32[B, K, R, T] scores over f[B, K, T, D] values, times scales f32[B, K, T]."""
  m = scores.max(axis=-1)
  weights = jnp.exp(scores - m[..., None])
  scaled = weights if scales is None else weights * scales[:, :, None]
  o = jnp.einsum(
    "bkrt,bktd->bkrd", scaled.astype(values.dtype), values, preferred_element_type=jnp.float32
  )
  return Parts(m, weights.sum(axis=-1), o)


def none_where_empty(parts: Parts, nonempty: jax.Array) -> Parts:
  """parts, and parts over no keys where nonempty bool[...] (broadcast to m) is False."""
  wide = nonempty[..., None]
  return Parts(
    jnp.where(nonempty, parts.m, NEG),
    jnp.where(nonempty, parts.l, 0.0),
    jnp.where(wide, parts.o, 0.0),
  )


def output(parts: Parts) -> jax.Array:
  """f32[..., R, D]: the attention itself; zeros where there were no keys.

  A sum that is NaN is not the sum over no keys: what went wrong before stays visible.
  """
  return normalise(parts, parts.l[..., None] != 0)


def normalise(parts: Parts, nonempty: jax.Array) -> jax.Array:
  """f32[..., R, D]; zeros where nonempty (broadcast to [..., R, D]) is False."""
  return jnp.where(nonempty, parts.o / parts.l[..., None], 0.0)
