"""Only what the policy keeps exists; the rest is dropped for good, and its memory with it.

Prefill runs on a resident cache, since a dropping method sees the whole prompt before it drops.
`seal` then copies what the policy keeps into a small cache, in order of position, and the large one
can go. Every layer and head has as many pages as the policy says that it needs. In decode a new
token takes a free slot, or the slot that the policy gives up.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.kv_cache import OVERFLOW, KVCache
from kvjax.cache.paged import Pools, append_token
from kvjax.config import CacheConfig
from kvjax.stores import resident
from kvjax.types import LayerPlan, Policy, Recalled, Selection, Store

FREE, NO_SLOT = -1, -2  # in the place of a position


def decode_config(cache_config: CacheConfig, policy: Policy) -> CacheConfig:
  """The budget is the capacity, unless rows are shorter still, or some head keeps everything."""
  capacity = cache_config.capacity_tokens
  tokens = min(policy.budget_tokens or capacity, capacity)
  return dataclasses.replace(cache_config, capacity_tokens=tokens)


def slot_positions(cache: KVCache, row: int, lengths: jax.Array) -> jax.Array:
  """i32[B, K, T], as remembered."""
  del lengths
  return cache.store_state[row]


def place(cache: KVCache, row: int, positions: jax.Array, victims) -> tuple[jax.Array, KVCache]:
  """i32[B, K]: the first free slot, else the one that the policy gives up.

  A row without either is marked: its token has no slot, and is lost.
  """
  del positions
  free = cache.store_state[row] == FREE
  given_up = victims()
  if given_up is None:
    given_up = jnp.full(free.shape[:2], free.shape[2], jnp.int32)
    lost = jnp.where(free.any(axis=-1).all(axis=-1), 0, OVERFLOW).astype(jnp.uint32)
    cache = cache.replace(overflow=cache.overflow | lost)
  return jnp.where(free.any(axis=-1), jnp.argmax(free, axis=-1), given_up), cache


def append(cache: KVCache, row: int, k, v, positions, slots) -> KVCache:
  """Writes one token a row and remembers where."""
  b, heads = slots.shape
  at = (jnp.arange(b)[:, None], jnp.arange(heads)[None], slots)
  remembered = (
    cache.store_state[row].at[at].set(positions[:, None], mode="drop", unique_indices=True)
  )
  state = (*cache.store_state[:row], remembered, *cache.store_state[row + 1 :])
  pools = append_token(cache.pools, cache.table[row], slots, k, v)
  return cache.replace(pools=pools, store_state=state)


def recall(
  cache: KVCache, row: int, ticket: Selection, lengths: jax.Array
) -> tuple[Recalled, KVCache]:
  """Page ids out of the table, and the mask cut to the slots that hold a token."""
  del lengths
  slots = resident.slots_of(ticket, cache.pools.page_size)
  remembered = cache.store_state[row]
  positions = jnp.take_along_axis(
    remembered, slots.reshape(*slots.shape[:2], -1), axis=2, mode="clip"
  ).reshape(slots.shape)
  pages = resident.page_ids(cache.table[row], ticket.pages)
  return Recalled(
    cache.pools, pages, ticket.mask & (positions >= 0), positions, ticket.slots
  ), cache


def seal(
  cache: KVCache, policy: Policy, cache_config: CacheConfig, layer_plan: LayerPlan
) -> KVCache:
  """The small cache of what policy.keep names after prefill.

  Args:
    cache: what prefill left, resident.
    policy: decides what is kept, and how much at most.
    cache_config: of the small cache, from `decode_config`.
  """
  del layer_plan
  assert policy.keep is not None
  rows, b, _, _ = cache.table.shape
  state, layers = cache.policy_state, []
  for row in range(rows):
    keep, state = policy.keep(state, resident.after_prefill(cache, row, cache_config))
    limits = _limits(policy, row, cache, cache_config)
    layers.append(_first_slots(cache, row, keep, limits))
  keys, values, remembered, owned = zip(*layers, strict=True)
  pools = Pools(jnp.concatenate(keys), jnp.concatenate(values))
  table = _table(owned, b, pools.num_pages)
  return cache.replace(pools=pools, table=table, policy_state=state, store_state=remembered)


def _limits(policy: Policy, row: int, cache: KVCache, cache_config: CacheConfig) -> np.ndarray:
  """int[K]: slots of each head of a layer."""
  rows, _, heads, _ = cache.table.shape
  if policy.keeps is None:
    return np.full(heads, cache_config.capacity_tokens)
  return np.asarray(policy.keeps(row, rows, heads, cache.table.shape[3] * cache.pools.page_size))


def _first_slots(cache: KVCache, row: int, keep: jax.Array, limits: np.ndarray):
  """What one layer keeps, in order of its slots, which is that of positions.

  Returns:
    keys and values f[n, C, D] of the pages that exist, positions i32[B, K, T], and which
    of the table's places bool[K, P] have a page.
  """
  b, heads, total = keep.shape
  c = cache.pools.page_size
  owned = np.arange(-(-limits.max() // c))[None] * c < limits[:, None]  # bool[K, P]
  slots = owned.shape[1] * c
  keep = keep & (resident.slot_positions(cache, row, cache.lengths) >= 0)
  order = jnp.argsort(~keep, axis=-1, stable=True)[..., :slots]  # kept first, in order
  order = jnp.pad(order, ((0, 0), (0, 0), (0, max(0, slots - total))))
  taken = jnp.arange(slots)[None, None] < keep.sum(axis=-1, keepdims=True)
  there = jnp.arange(slots)[None, None] < jnp.asarray(limits)[None, :, None]
  positions = jnp.where(taken, order, FREE)
  pages = jnp.take_along_axis(cache.table[row], order // c, axis=-1)

  def of_owned(x):  # f[B, K, T, D] -> f[n, C, D]
    return x.reshape(b, heads, -1, c, x.shape[-1])[:, owned].reshape(-1, c, x.shape[-1])

  keys = of_owned(cache.pools.keys.at[pages, order % c].get(mode="clip"))
  values = of_owned(cache.pools.values.at[pages, order % c].get(mode="clip"))
  return keys, values, jnp.where(there, positions, NO_SLOT), owned


def _table(owned: tuple[np.ndarray, ...], b: int, num_pages: int) -> jax.Array:
  """i32[rows, B, K, P] of pages that lie layer by layer, and there row by row."""
  widest = max(there.shape[1] for there in owned)
  table = np.full((len(owned), b, owned[0].shape[0], widest), num_pages, np.int32)
  first = 0
  for layer, there in zip(table, owned, strict=True):
    count = b * int(there.sum())
    layer[:, :, : there.shape[1]][:, there] = first + np.arange(count).reshape(b, -1)
    first += count
  return jnp.asarray(table)


COMPACT = Store(
  name="compact",
  drops=True,
  on_host=False,
  decode_config=decode_config,
  slot_positions=slot_positions,
  place=place,
  append=append,
  fetch=resident.fetch,
  recall=recall,
  release=resident.release,
  seal=seal,
)
