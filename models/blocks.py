"""Building blocks that the model families share: pure functions on arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Root-mean-square norm over the last axis, computed in f32 whatever the dtype of x.

  Args:
    x: f[..., E].
    scale: f[E].
    eps: added to the mean square.

  Returns:
    f[..., E] in the dtype of x.
  """
  x32 = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * inverse * _along_last(scale.astype(jnp.float32), x)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
  """Layer norm over the last axis, computed in f32 whatever the dtype of x.

  Args:
    x: f[..., E].
    scale: f[E].
    bias: f[E].
    eps: added to the variance.

  Returns:
    f[..., E] in the dtype of x.
  """
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
  scale, bias = (_along_last(y.astype(jnp.float32), x) for y in (scale, bias))
  return (centred * inverse * scale + bias).astype(x.dtype)


def linear(
  x: jax.Array, layer: Mapping[str, jax.Array], name: str, axis: str | None = None
) -> jax.Array:
  """x f[..., in] @ layer[name] f[in, out], plus layer[name + "_bias"] f[out] where there is one.

  The matrix may be in panels f[out/64, in, 64] (`models.panels`). Where `in` is split over a mesh
  axis, the products are summed over it, and the bias comes after.
  """
  w = layer[name]
  out = x @ w if w.ndim == 2 else _by_panel(x, w)
  out = out if axis is None else jax.lax.psum(out, axis)
  bias = layer.get(f"{name}_bias")
  return out if bias is None else out + _along_last(bias, out)


def swiglu(x: jax.Array, layer: Mapping[str, jax.Array], axis: str | None = None) -> jax.Array:
  """Gated feed-forward of x f[..., E]: (silu(x gate) * (x up)) down; axis, if any, splits F."""
  gated = jax.nn.silu(linear(x, layer, "gate")) * linear(x, layer, "up")
  return linear(gated, layer, "down", axis)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
  """f[B, S, heads*D] -> f[B, S, heads, D]."""
  return x.reshape(*x.shape[:2], heads, -1)


def merge_heads(x: jax.Array) -> jax.Array:
  """f[B, S, heads, D] -> f[B, S, heads*D]."""
  return x.reshape(*x.shape[:2], -1)


def lookup(table: jax.Array, tokens: jax.Array, axis: str | None = None) -> jax.Array:
  """f[B, S, E], the rows of table f[V, E] at tokens i32[B, S].

  Where V is split over a mesh axis, one device has the row and the others add zeros.
  """
  if axis is None:
    return table[tokens]
  own = tokens - jax.lax.axis_index(axis) * table.shape[0]
  own = jnp.where(own < 0, table.shape[0], own)  # a negative index would wrap around
  return jax.lax.psum(table.at[own].get(mode="fill", fill_value=0), axis)


def vocabulary_product(x: jax.Array, head: jax.Array, axis: str | None = None) -> jax.Array:
  """Logits f32[B, V] of x f[B, E] and head f[V, E], summed in f32.

  The head may be the panels f32[V/64, E, 64] of its transpose (`models.panels`). Where V is split
  over a mesh axis, every device gets the logits of all.
  """
  if head.ndim == 3:
    return _by_panel(x, head)
  logits = jnp.einsum("be,ve->bv", x, head, preferred_element_type=jnp.float32)
  return logits if axis is None else jax.lax.all_gather(logits, axis, axis=1, tiled=True)


def random_matrix(
  key: jax.Array, shape: tuple[int, ...], dtype: str, fan_in: int | None = None
) -> jax.Array:
  """Normal with standard deviation 1/sqrt(fan_in), by default the first of the shape."""
  fan_in = shape[0] if fan_in is None else fan_in
  return (jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)).astype(dtype)


def random_matrices(
  key: jax.Array, shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> dict[str, jax.Array]:
  """A `random_matrix` [in, out] for every name."""
  keys = jax.random.split(key, len(shapes))
  return {
    name: random_matrix(one, shape, dtype)
    for one, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def _by_panel(x: jax.Array, panels: jax.Array) -> jax.Array:
  """f[..., C*W] of x f[..., in] and panels f[C, in, W]."""
  rows = x.reshape(-1, x.shape[-1])
  out = jnp.matmul(jnp.broadcast_to(rows, (panels.shape[0], *rows.shape)), panels)
  # Without the barrier XLA wants the product in the order of the result, ten times as slow.
  out = jax.lax.optimization_barrier(out).swapaxes(0, 1)
  return out.reshape(*x.shape[:-1], -1)


def _along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
  return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))
