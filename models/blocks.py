"""Building blocks that the model families share: pure functions on arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.types import Rotate


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
  scale32 = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))
  return (x32 * inverse * scale32).astype(x.dtype)


def rotary(theta: float, head_dim: int) -> Rotate:
  """Rotary position embedding in the half-split layout: i is paired with i + D/2.

  Angles, cosines, sines and the rotation itself are f32; bf16 angles would be wrong by whole turns
  at long positions.

  Args:
    theta: base of the frequencies, which are theta^(-2i/D).
    head_dim: D, even.

  Returns:
    `rotate(x f[B, S, heads, D], positions i32[B, S]) -> f[B, S, heads, D]` in the dtype of x.
  """
  half = head_dim // 2
  frequencies = (theta ** (-np.arange(half, dtype=np.float64) / half)).astype(np.float32)

  def rotate(x: jax.Array, positions: jax.Array, /) -> jax.Array:
    if x.shape[-1] != head_dim:
      raise ValueError(f"rotary of head_dim {head_dim} got x of shape {x.shape}")
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # f32[B, S, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)

  return rotate


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
  """Gated feed-forward: (silu(x gate) * (x up)) down.

  Args:
    x: f[..., E].
    gate: f[E, F].
    up: f[E, F].
    down: f[F, E].

  Returns:
    f[..., E].
  """
  return (jax.nn.silu(x @ gate) * (x @ up)) @ down
