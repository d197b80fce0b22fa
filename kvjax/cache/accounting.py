"""Exact bytes of a cache, before and after it is allocated."""

from __future__ import annotations

from typing import NamedTuple

import jax

from kvjax.cache.kv_cache import KVCache


class CacheBytes(NamedTuple):
  """Bytes on the device.

  Attributes:
    keys_values: pools and contiguous layers.
    tables: page tables, lengths and overflow bits.
    metadata: state of policy and store: page bounds, slot positions.
  """

  keys_values: int
  tables: int
  metadata: int

  @property
  def total(self) -> int:
    return sum(self)


def cache_bytes(cache: KVCache) -> CacheBytes:
  """Bytes of every array of a cache, which may be abstract (from `jax.eval_shape`)."""
  return CacheBytes(
    keys_values=_bytes((cache.contiguous, cache.pools)),
    tables=_bytes((cache.table, cache.lengths, cache.overflow)),
    metadata=_bytes((cache.policy_state, cache.store_state)),
  )


def _bytes(tree) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
