"""Rotary position embedding, and the ways in which it reaches beyond the context of the training.

Pair i of a head turns by position * frequency_i. The plain frequencies are theta^(-2i/D); every
kind of `RopeScaling` changes them:

* linear (Chen et al. 2023, position interpolation): all divided by `factor`.
* llama3 (Llama 3.1): waves longer than original / low_freq_factor are stretched by `factor`, those
  shorter than original / high_freq_factor are left alone, between them both are blended.
* yarn (Peng et al., ICLR 2024, section 3): the same idea with a ramp over the dimensions, from
  those that turn `beta_fast` times in the original context to those that turn `beta_slow` times;
  cosine and sine are `attention_factor` long.
* dynamic (NTK): theta itself grows with the length n of the text, once that exceeds the original
  context, to theta * (factor * n / original - (factor - 1))^(D / (D - 2)).

Departure for dynamic: n is the position of the token itself plus one, not the length of the whole
prompt, which is what a step-by-step decoder with cached keys computes. The result then does not
depend on how the text was cut into calls, nor on batch mates.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import ModelConfig, RopeScaling
from kvjax.types import Rotate


def rotary(config: ModelConfig) -> Rotate:
  """The position rule of a model, in the half-split layout: i is paired with i + D/2.

  Angles, cosines, sines and the rotation itself are f32; bf16 angles would be wrong by whole turns
  at long positions.

  Args:
    config: of its fields, head_dim, rope_theta and rope_scaling count.

  Returns:
    `rotate(x f[B, S, heads, D], positions i32[B, S]) -> f[B, S, heads, D]` in the dtype of x.
  """
  scaling, head_dim = config.rope_scaling, config.head_dim
  frequencies = pair_frequencies(config.rope_theta, head_dim, scaling).astype(np.float32)
  length = _length(scaling)

  def rotate(x: jax.Array, positions: jax.Array, /) -> jax.Array:
    if x.shape[-1] != head_dim:
      raise ValueError(f"rotary of head_dim {head_dim} got x of shape {x.shape}")
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    if scaling.kind == "dynamic":
      angles = angles * _dynamic(scaling, head_dim, positions)[:, :, None, :]
    cos, sin = jnp.cos(angles) * length, jnp.sin(angles) * length  # f32[B, S, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)

  return rotate


def pair_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> np.ndarray:
  """f64[D/2], radians a position; of dynamic, within the original context."""
  half = head_dim // 2
  plain = theta ** (-np.arange(half, dtype=np.float64) / half)
  if scaling.kind == "linear":
    return plain / scaling.factor
  if scaling.kind == "llama3":
    return _blend(plain, scaling.factor, _llama3_kept(plain, scaling))
  if scaling.kind == "yarn":
    return _blend(plain, scaling.factor, _yarn_kept(theta, head_dim, scaling))
  return plain


def _blend(plain: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
  """Frequencies of which the share `kept` is plain and the rest divided by factor."""
  return kept * plain + (1 - kept) * plain / factor


def _llama3_kept(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
  turns = scaling.original_tokens * plain / (2 * math.pi)  # in the original context
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  return np.clip((turns - low) / (high - low), 0, 1)


def _yarn_kept(theta: float, head_dim: int, scaling: RopeScaling) -> np.ndarray:
  def dimension(turns: float) -> float:
    """The pair that turns this often in the original context, as a real number."""
    wave = scaling.original_tokens / (turns * 2 * math.pi)
    return head_dim * math.log(wave) / (2 * math.log(theta))

  low = max(math.floor(dimension(scaling.beta_fast)), 0)
  high = min(math.ceil(dimension(scaling.beta_slow)), head_dim - 1)
  ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
  return 1 - np.clip(ramp, 0, 1)


def _length(scaling: RopeScaling) -> float:
  """Of cosine and sine: yarn's temperature, 1 for all others."""
  if scaling.kind != "yarn":
    return 1.0
  if scaling.attention_factor is not None:
    return scaling.attention_factor
  return 0.1 * math.log(scaling.factor) + 1.0


def _dynamic(scaling: RopeScaling, head_dim: int, positions: jax.Array) -> jax.Array:
  """f32[B, S, D/2]: what the plain frequencies are multiplied by at each position."""
  original, factor = scaling.original_tokens, scaling.factor
  length = jnp.maximum(positions + 1, original).astype(jnp.float32)
  growth = factor * length / original - (factor - 1)  # of theta, to the power (D - 2) / D
  exponents = -2 * np.arange(head_dim // 2, dtype=np.float32) / (head_dim - 2)
  return growth[:, :, None] ** exponents[None, None]
