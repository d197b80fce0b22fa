"""Partial keys: a few channels of every key, kept beside the cache to score all tokens cheaply.

Channels are those of k A, A an orthogonal skew f32[K, D, D]: (q A) . (k A) = q . k, and where A has
gathered the energy of the queries, few channels tell most of it. Each row and head has its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.segments import Segments, segment_sizes, write_at, write_chunk
from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies._tokens import token_scores
from kvjax.types import Inputs

FIRST_SEGMENT_TOKENS = 8192
CHANNEL_TOKENS = 64  # the shortest prefill chunk, so that they always come in one call


class PartialKeys(NamedTuple):
  """Of one layer.

  Attributes:
    channels: i32[B, K, Z], which of the D skewed channels are kept.
    keys: f[B, K, Z, Ti] each, by position.
  """

  channels: jax.Array
  keys: Segments


def empty(model: ModelConfig, cache: CacheConfig, ratio: float) -> PartialKeys:
  """Room for the keys of all rows; Z is ratio * D, rounded down, at least 1."""
  shape = (cache.batch_size, model.num_kv_heads, max(1, int(ratio * model.head_dim)))
  sizes = segment_sizes(cache.capacity_tokens, FIRST_SEGMENT_TOKENS)
  keys = tuple(jnp.zeros((*shape, size), cache.dtype) for size in sizes)
  return PartialKeys(jnp.zeros(shape, jnp.int32), keys)


def skew_of(skew: np.ndarray | None, layer: int, inputs: Inputs) -> jax.Array:
  """f32[K, D, D]: that of a layer out of f[L, K, D, D], or the identity."""
  heads, d = inputs.k.shape[2:]
  one = np.broadcast_to(np.eye(d), (heads, d, d)) if skew is None else skew[layer]
  return jnp.asarray(one, jnp.float32)


def extend(partial: PartialKeys, inputs: Inputs, skew: jax.Array) -> PartialKeys:
  """With the keys of this call; its first tokens of all, if they are in it, choose the channels."""
  k, start = inputs.k.astype(jnp.float32), inputs.positions[0, 0]
  if k.shape[1] == 1:
    new = jnp.einsum("bkd,bkdz->bkz", k[:, 0], _basis(partial, skew))
    return partial._replace(keys=write_at(partial.keys, inputs.positions[:, 0], new, axis=3))
  channels = jnp.where(start == 0, _strongest(inputs, skew, partial), partial.channels)
  partial = partial._replace(channels=channels)
  new = jnp.einsum("bskd,bkdz->bkzs", k, _basis(partial, skew))
  return partial._replace(keys=write_chunk(partial.keys, new, start, inputs.valid, axis=3))


def scores(partial: PartialKeys, q: jax.Array, skew: jax.Array, longest: jax.Array) -> jax.Array:
  """What q f[B, 1, H, D] gives every token: f32[B, K, G, T], with the factor 1/sqrt(D).

  The longest row has longest i32[] tokens; places without a token must be masked.
  """
  b, heads, _ = partial.channels.shape
  q = q.reshape(b, heads, -1, q.shape[-1]).astype(jnp.float32) * q.shape[-1] ** -0.5
  return token_scores(
    jnp.einsum("bkgd,bkdz->bkgz", q, _basis(partial, skew)), partial.keys, longest
  )


def _basis(partial: PartialKeys, skew: jax.Array) -> jax.Array:
  """f32[B, K, D, Z]: the columns of the skew that make the channels."""
  return jnp.take_along_axis(skew[None], partial.channels[:, :, None], axis=3)


def _strongest(inputs: Inputs, skew: jax.Array, partial: PartialKeys) -> jax.Array:
  """i32[B, K, Z]: channels with the largest |q| + |k|, q the mean of the group, over the first
  tokens of the call."""
  valid = inputs.valid[:, :CHANNEL_TOKENS, None, None]
  heads, d = skew.shape[:2]

  def strength(x):  # f[B, S, heads, D] -> f32[B, K, D]
    x = jnp.where(valid, x[:, :CHANNEL_TOKENS].astype(jnp.float32), 0.0)
    x = x.reshape(*x.shape[:2], heads, -1, d)
    return jnp.abs(jnp.einsum("bskgd,kde->bskge", x, skew)).mean(axis=3).sum(axis=1)

  total = strength(inputs.q) + strength(inputs.k)
  return jax.lax.top_k(total, partial.channels.shape[-1])[1]
