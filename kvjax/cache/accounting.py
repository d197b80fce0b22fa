"""Exact bytes of a cache, before and after it is allocated."""

from __future__ import annotations

from typing import NamedTuple

import jax

from kvjax.cache.kv_cache import KVCache
from kvjax.cache.paged import Pools


class CacheBytes(NamedTuple):
  """Bytes of a cache by what they are for.

  Attributes:
    keys_values: pools and contiguous layers, and the pages that a store has recalled.
    tables: page tables, lengths and overflow bits.
    metadata: state of policy and store: page bounds, slot positions.
    host: pools in host memory.
  """

  keys_values: int
  tables: int
  metadata: int
  host: int = 0

  @property
  def total(self) -> int:
    """Bytes on the device."""
    return self.keys_values + self.tables + self.metadata


def cache_bytes(cache: KVCache) -> CacheBytes:
  """Bytes of every array of a cache, which may be abstract (from `jax.eval_shape`)."""
  recalled = _pools_in(cache.store_state)
  away = [leaf for leaf in jax.tree.leaves(recalled) if _on_host(leaf)]  # a store's own
  return CacheBytes(
    keys_values=_bytes((cache.contiguous, cache.pools, recalled)) - _bytes(away),
    tables=_bytes((cache.table, cache.lengths, cache.overflow)),
    metadata=_bytes((cache.policy_state, cache.store_state)) - _bytes(recalled),
    host=_bytes((cache.host, away)),
  )


def _on_host(leaf) -> bool:
  return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _pools_in(tree) -> list[Pools]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Pools))
  return [leaf for leaf in leaves if isinstance(leaf, Pools)]


def _bytes(tree) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
