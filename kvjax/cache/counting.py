"""Ranks, compactions and the least of many, in time linear in what is counted.

A sort of a whole layer's tokens would cost more than the copies it plans. Scatters and gathers are
cheap on a CPU (24,576 places: 20 us), XLA's running sums are not (80 us; `running` takes 20).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_WORD = 32  # bits


def running(mask: jax.Array) -> jax.Array:
  """i32[..., T]: how many of mask bool[..., T] hold up to each place, itself included.

  Places are packed into words of 32 bits, whose bits a processor counts at once; running sums are
  left for the words of a group of 32, and for the groups.
  """
  *lists, t = mask.shape
  bits = _padded(mask, _WORD).reshape(*lists, -1, _WORD)
  lane = jnp.expand_dims(jnp.arange(_WORD, dtype=jnp.uint32), range(bits.ndim - 1))
  words = (bits.astype(jnp.uint32) << lane).sum(axis=-1, dtype=jnp.uint32)
  of_word = jax.lax.population_count(words).astype(jnp.int32)
  groups = _padded(of_word, _WORD).reshape(*lists, -1, _WORD)
  of_group = groups.sum(axis=-1, dtype=jnp.int32)
  earlier = before(groups) + before(of_group)[..., None]
  earlier = earlier.reshape(*lists, -1)[..., : words.shape[-1]]
  up_to_lane = ~jnp.uint32(0) >> (_WORD - 1 - lane)
  within = jax.lax.population_count(words[..., None] & up_to_lane).astype(jnp.int32)
  return (earlier[..., None] + within).reshape(*lists, -1)[..., :t]


def _padded(values: jax.Array, multiple: int) -> jax.Array:
  """[..., T] with zeros behind, T a multiple of this."""
  short = -values.shape[-1] % multiple
  return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, short)]) if short else values


def before(counts: jax.Array) -> jax.Array:
  """i32[..., X]: sum of counts i32[..., X] of the lists before each."""
  size = counts.shape[-1]
  if size > _FEW:
    return jnp.cumsum(counts, axis=-1) - counts
  # All pairs in one loop: XLA makes three of a running sum, each of which has to be started.
  place = jnp.arange(size)
  earlier = place[:, None] < place[None]
  pairs = jnp.where(jnp.expand_dims(earlier, range(counts.ndim - 1)), counts[..., None], 0)
  return pairs.sum(axis=-2, dtype=counts.dtype)


_FEW = 128


def places(mask: jax.Array, size: int) -> jax.Array:
  """i32[..., size]: where mask bool[..., T] holds, ascending; T beyond the last."""
  *lists, t = mask.shape
  x = jnp.arange(math.prod(lists), dtype=jnp.int32).reshape(*lists, 1)
  place = jnp.expand_dims(jnp.arange(t, dtype=jnp.int32), range(mask.ndim - 1))
  rank = running(mask) - 1
  target = jnp.where(mask & (rank < size), x * size + rank, x.size * size)
  # Where nothing is meant it does not matter what is written; but as it depends on the mask, XLA
  # does not make it before all layers at once, in memory of its own for each.
  value = jnp.where(mask, place, 0)
  empty = jnp.full(x.size * size, t, jnp.int32)
  found = empty.at[target.reshape(-1)].set(value.reshape(-1), mode="drop", unique_indices=True)
  return found.reshape(*lists, size)


def smallest(keys: jax.Array, allowed: jax.Array, count: jax.Array, bits: int = 31) -> jax.Array:
  """bool[n]: the count i32[] smallest of keys i32[n] that are allowed bool[n], of equal the first.

  Args:
    keys: not negative, below 2**bits.
    allowed: places that may be chosen.
    count: how many; all that are allowed if there are fewer.
    bits: passes over the keys, one for each bit of the count-th smallest.
  """

  def with_bit(i, least):
    higher = least | (1 << (bits - 1 - i))
    fewer = (allowed & (keys < higher)).sum(dtype=jnp.int32) < count
    return jnp.where(fewer, higher, least)

  last = jax.lax.fori_loop(0, bits, with_bit, jnp.int32(0))
  below, equal = allowed & (keys < last), allowed & (keys == last)
  left = count - below.sum(dtype=jnp.int32)
  return below | (equal & (running(equal) <= left))
