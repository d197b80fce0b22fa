"""What is remembered of the keys of a page, and how a query scores it by one product.

A digest is a few vectors a page; every form of it is five pure functions in one table, `DIGESTS`.
Pages are scored by products of queries with digests, so that a step reads the digests once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.page_bounds import extend_bounds, page_bounds
from pallas_kernels.page_scores import signed

# Standard deviations of q . k that the best key of a page is expected above the mean: of all keys,
# and of those that are left beside an outlier.
SPREAD, OTHERS_SPREAD = 1.5, 1.5


class Digest(NamedTuple):
  """One form of digest: Z numbers a page, Z = vectors * D + numbers.

  Attributes:
    vectors: 0 where there is no digest and the keys themselves are read.
    of_pages: `of_pages(keys f[..., C, D], valid bool[..., C]) -> f[..., Z]`; slots that are not
      valid may hold anything.
    extend: `extend(digest f[..., Z], key f[..., D], count i32[...]) -> f[..., Z]`, the digest with
      one more key, count keys having come before; it ignores the digest where there were none. None
      where a digest needs all the keys of its page at once.
    queries: `queries(q f[B, K, G, D]) -> f[B, K, R, Z]`, to be multiplied with the digests.
    scores: `scores(products f32[B, K, R, P]) -> f32[B, K, G, P]`.
    numbers: numbers beside the vectors.
  """

  vectors: int
  of_pages: Callable[[jax.Array, jax.Array], jax.Array]
  extend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None
  queries: Callable[[jax.Array], jax.Array]
  scores: Callable[[jax.Array], jax.Array] = lambda products: products
  numbers: int = 0

  def size(self, d: int) -> int:
    """Z of keys of D numbers."""
    return self.vectors * d + self.numbers


def _in_f32(*arrays: jax.Array) -> list[jax.Array]:
  return [x.astype(jnp.float32) for x in arrays]


def _mean(keys: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
  """f32[..., 1, D], and the number of keys f32[..., 1, 1]: at least 1."""
  count = jnp.maximum(valid.sum(axis=-1), 1)[..., None, None].astype(jnp.float32)
  total = jnp.where(valid[..., None], keys, 0).sum(axis=-2, keepdims=True, dtype=jnp.float32)
  return total / count, count


def _mean_of_pages(keys: jax.Array, valid: jax.Array) -> jax.Array:
  return _mean(keys, valid)[0][..., 0, :]


def _extend_mean(mean: jax.Array, key: jax.Array, count: jax.Array) -> jax.Array:
  mean, key, count = _in_f32(mean, key, count[..., None])
  return jnp.where(count == 0, key, mean + (key - mean) / (count + 1))


def _moments_of_pages(keys: jax.Array, valid: jax.Array) -> jax.Array:
  """Means, then variances."""
  mean, count = _mean(keys, valid)
  squares = jnp.where(valid[..., None], jnp.square(keys.astype(jnp.float32) - mean), 0)
  return jnp.concatenate([mean, squares.sum(axis=-2, keepdims=True) / count], axis=-1)[..., 0, :]


def _extend_moments(moments: jax.Array, key: jax.Array, count: jax.Array) -> jax.Array:
  """Welford's update, which loses no digits."""
  moments, key, count = _in_f32(moments, key, count[..., None])
  mean, variance = jnp.split(moments, 2, axis=-1)
  grown = mean + (key - mean) / (count + 1)
  wider = variance + ((key - mean) * (key - grown) - variance) / (count + 1)
  fresh = jnp.concatenate([key, jnp.zeros_like(key)], axis=-1)
  return jnp.where(count == 0, fresh, jnp.concatenate([grown, wider], axis=-1))


def _moment_queries(q: jax.Array) -> jax.Array:
  """q for the means above q * q for the variances: R = 2 G."""
  zeros = jnp.zeros_like(q)
  of_means = jnp.concatenate([q, zeros], axis=-1)
  return jnp.concatenate([of_means, jnp.concatenate([zeros, q * q], axis=-1)], axis=2)


def _above_mean(products: jax.Array) -> jax.Array:
  mean, variance = jnp.split(products, 2, axis=2)
  return mean + SPREAD * jnp.sqrt(jnp.maximum(variance, 0))


def _cuboid_of_pages(keys: jax.Array, valid: jax.Array) -> jax.Array:
  """Middle of the bounds plus and minus the mean distance from it, per channel."""
  highest, lowest = jnp.split(page_bounds(keys, valid).astype(jnp.float32), 2, axis=-1)
  middle = (highest + lowest) / 2
  radius = _mean_of_pages(jnp.abs(keys.astype(jnp.float32) - middle[..., None, :]), valid)
  return jnp.concatenate([middle + radius, middle - radius], axis=-1)


def _outlier_of_pages(keys: jax.Array, valid: jax.Array) -> jax.Array:
  """The key farthest from the mean, the mean of the others, and their deviation from it: the root
  of the mean square of a channel's."""
  mean, _ = _mean(keys, valid)
  (keys,) = _in_f32(keys)
  far = jnp.where(valid, jnp.square(keys - mean).sum(axis=-1), -1).argmax(axis=-1)[..., None]
  outlier = jnp.take_along_axis(keys, far[..., None], axis=-2)
  others = valid & (jax.lax.broadcasted_iota(far.dtype, valid.shape, valid.ndim - 1) != far)
  rest, count = _mean(keys, others)
  rest = jnp.where(others.any(axis=-1)[..., None, None], rest, outlier)
  squares = jnp.where(others[..., None], jnp.square(keys - rest), 0).mean(axis=-1)
  deviation = jnp.sqrt(squares.sum(axis=-1, keepdims=True)[..., None] / count)
  return jnp.concatenate([outlier, rest, deviation], axis=-1)[..., 0, :]


def _outlier_queries(q: jax.Array) -> jax.Array:
  """q for the farthest keys above q and its length for the others: R = 2 G."""
  zeros, length = jnp.zeros_like(q), jnp.linalg.norm(q, axis=-1, keepdims=True)
  of_outliers = jnp.concatenate([q, zeros, 0 * length], axis=-1)
  of_others = jnp.concatenate([zeros, q, OTHERS_SPREAD * length], axis=-1)
  return jnp.concatenate([of_outliers, of_others], axis=2)


def _larger(products: jax.Array) -> jax.Array:
  return jnp.maximum(*jnp.split(products, 2, axis=2))


def _none(*args):
  raise AssertionError("there is no digest where keys are read")


DIGESTS: dict[str, Digest] = {
  # Quest: max and min of each channel, an upper bound of q . k.
  "minmax": Digest(
    2, page_bounds, lambda old, key, count: extend_bounds(old, key, count == 0), signed
  ),
  # ArkVale: a box about as large as the bulk of the keys, no bound any more.
  "cuboid": Digest(2, _cuboid_of_pages, None, signed),
  "mean": Digest(1, _mean_of_pages, _extend_mean, lambda q: q),
  # q . k of a page's keys has mean q . mean and, were channels independent, variance q^2 . var.
  "mean_std": Digest(2, _moments_of_pages, _extend_moments, _moment_queries, _above_mean),
  # Our own: the key of a page that is least like the others, whole, and the mean of the others.
  "outlier": Digest(2, _outlier_of_pages, None, _outlier_queries, _larger, numbers=1),
  # The largest q . k of the page: what the others guess. Reads all keys; for study.
  "exact": Digest(0, _none, None, _none),
}
