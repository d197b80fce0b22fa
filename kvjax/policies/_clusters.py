"""Clusters of keys: k-means under the cosine, all rows and heads at once, in blocks of tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import CacheConfig, ModelConfig
from kvjax.types import Inputs

_BLOCK_TOKENS = 512  # bounds what the products of tokens and centroids take


class Clusters(NamedTuple):
  """Of one layer, X clusters at most.

  Attributes:
    labels: i32[B, K, T], cluster of each token, by position; 0 for what is in none.
    centroids: f32[B, K, X, D], means of their keys.
    filled: bool[B, K, X], clusters that got a token.
  """

  labels: jax.Array
  centroids: jax.Array
  filled: jax.Array


def empty(model: ModelConfig, cache: CacheConfig, cluster_tokens: int) -> Clusters:
  """Room for a cluster every cluster_tokens of the capacity."""
  heads = (cache.batch_size, model.num_kv_heads)
  most = -(-cache.capacity_tokens // cluster_tokens)
  return Clusters(
    jnp.zeros((*heads, cache.pages_per_row * cache.page_size), jnp.int32),
    jnp.zeros((*heads, most, model.head_dim), jnp.float32),
    jnp.zeros((*heads, most), bool),
  )


def k_means(
  keys: jax.Array,
  start: jax.Array,
  end: jax.Array,
  *,
  most: int,
  cluster_tokens: int,
  iterations: int,
  seed: int,
) -> Clusters:
  """Clusters the keys at positions from start to before end.

  The first centroids are keys drawn one from each of as many equal stretches of the text as there
  are clusters; a cluster that loses all of its tokens keeps its centroid.

  Args:
    keys: f[B, K, T, D] by position; anything outside of start and end.
    start: i32[B].
    end: i32[B].
    most: X.
    cluster_tokens: a row gets a cluster for every so many tokens, at least one.
    iterations: of assignment and mean.
    seed: of the draw.
  """
  b, heads, t, _ = keys.shape
  tokens = jnp.maximum(end - start, 0)
  count = jnp.clip(-(-tokens // cluster_tokens), 1, most)  # i32[B]
  stretch = np.arange(most, dtype=np.float32) + np.random.default_rng(seed).random(most, np.float32)
  drawn = (stretch[None] * (tokens / count)[:, None]).astype(jnp.int32) + start[:, None]
  drawn = jnp.minimum(drawn, jnp.maximum(end - 1, 0)[:, None])[:, None, :, None]
  place = jnp.arange(t)[None]
  member = (place >= start[:, None]) & (place < end[:, None])  # bool[B, T]
  keys = jnp.where(member[:, None, :, None], keys.astype(jnp.float32), 0.0)
  there = jnp.broadcast_to((jnp.arange(most)[None] < count[:, None])[:, None], (b, heads, most))
  blocks = _in_blocks(keys), _in_blocks(jnp.broadcast_to(member[:, None, :, None], (b, 1, t, 1)))

  def step(_, centroids):
    def add(totals, block):
      keys, member = block
      labels = nearest(keys, centroids, there)
      shares = jax.nn.one_hot(labels, most, dtype=jnp.float32) * member.astype(jnp.float32)
      return (
        totals[0] + jnp.einsum("bktx,bktd->bkxd", shares, keys),
        totals[1] + shares.sum(axis=2)[..., None],
      ), None

    zeros = jnp.zeros_like(centroids)
    (sums, sizes), _ = jax.lax.scan(add, (zeros, zeros[..., :1]), blocks)
    return jnp.where(sizes > 0, sums / jnp.maximum(sizes, 1.0), centroids)

  first = jnp.take_along_axis(keys, drawn, axis=2)
  centroids = jax.lax.fori_loop(0, iterations, step, first)
  labels = jax.lax.map(lambda block: nearest(block, centroids, there), blocks[0])
  labels = jnp.moveaxis(labels, 0, 2).reshape(b, heads, -1)[..., :t]
  filled = jnp.zeros((b, heads, most), bool)
  rows, columns = jnp.arange(b)[:, None, None], jnp.arange(heads)[None, :, None]
  filled = filled.at[rows, columns, labels].max(member[:, None])
  return Clusters(jnp.where(member[:, None], labels, 0), centroids, filled)


def join(clusters: Clusters, inputs: Inputs) -> Clusters:
  """The new token of each row joins the cluster whose centroid is nearest."""
  k = inputs.k.swapaxes(1, 2).astype(jnp.float32)
  label = nearest(k, clusters.centroids, clusters.filled)[..., 0]
  b, heads = label.shape
  at = (jnp.arange(b)[:, None], jnp.arange(heads)[None], inputs.positions)
  return clusters._replace(labels=clusters.labels.at[at].set(label, mode="drop"))


def nearest(keys: jax.Array, centroids: jax.Array, there: jax.Array) -> jax.Array:
  """i32[B, K, T]: of keys f32[B, K, T, D], by the cosine, among centroids f32[B, K, X, D] that are
  there, bool[B, K, X]."""
  length = jnp.sqrt((centroids * centroids).sum(axis=-1, keepdims=True))
  unit = centroids / jnp.maximum(length, jnp.finfo(jnp.float32).tiny)
  cosines = jnp.einsum("bktd,bkxd->bktx", keys, unit)  # times the length of the key
  return jnp.argmax(jnp.where(there[:, :, None], cosines, -jnp.inf), axis=-1).astype(jnp.int32)


def _in_blocks(x: jax.Array) -> jax.Array:
  """[B, K, T, D] -> [n, B, K, block, D], zeros at the end."""
  b, k, t, d = x.shape
  block = min(_BLOCK_TOKENS, t)
  x = jnp.pad(x, ((0, 0), (0, 0), (0, -t % block), (0, 0)))
  return jnp.moveaxis(x.reshape(b, k, -1, block, d), 2, 0)
