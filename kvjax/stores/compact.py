"""Only what the policy keeps exists; the rest is dropped for good, and its memory with it.

Prefill runs on a resident cache, since a dropping method sees the whole prompt before it drops.
`seal` then copies what the policy keeps into a small cache of the policy's budget, in order of
position, and the large one can go. In decode a new token takes a free slot, or the slot that the
policy gives up.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.kv_cache import KVCache
from kvjax.cache.paged import Pools, append_token
from kvjax.config import CacheConfig
from kvjax.stores import resident
from kvjax.types import Inputs, Policy, Recalled, Selection, Store


def decode_config(cache_config: CacheConfig, policy: Policy) -> CacheConfig:
  """The budget is the capacity, unless the rows are shorter still."""
  assert policy.budget_tokens is not None
  tokens = min(policy.budget_tokens, cache_config.capacity_tokens)
  return dataclasses.replace(cache_config, capacity_tokens=tokens)


def slot_positions(cache: KVCache, row: int, lengths: jax.Array) -> jax.Array:
  """i32[B, K, T], as remembered."""
  del lengths
  return cache.store_state[row]


def place(cache: KVCache, row: int, positions: jax.Array, victims) -> jax.Array:
  """i32[B, K]: the first free slot, else the one that the policy gives up."""
  del positions
  free = cache.store_state[row] < 0
  return jnp.where(free.any(axis=-1), jnp.argmax(free, axis=-1), victims())


def append(cache: KVCache, row: int, k, v, positions, slots) -> KVCache:
  """Writes one token a row and remembers where."""
  b, heads = slots.shape
  at = (jnp.arange(b)[:, None], jnp.arange(heads)[None], slots)
  remembered = cache.store_state[row].at[at].set(positions[:, None], unique_indices=True)
  state = (*cache.store_state[:row], remembered, *cache.store_state[row + 1 :])
  pools = append_token(cache.pools, cache.table[row], slots, k, v)
  return cache.replace(pools=pools, store_state=state)


def recall(
  cache: KVCache, row: int, ticket: Selection, lengths: jax.Array
) -> tuple[Recalled, KVCache]:
  """Page ids out of the table, and the mask cut to the slots that hold a token."""
  del lengths
  b, k, _ = ticket.pages.shape
  page_size = cache.pools.page_size
  remembered = cache.store_state[row].reshape(b, k, -1, page_size)
  positions = jnp.take_along_axis(remembered, ticket.pages[..., None], axis=2, mode="clip")
  pages = resident.page_ids(cache.table[row], ticket.pages)
  return Recalled(pages, ticket.mask & (positions >= 0), positions), cache


def seal(cache: KVCache, policy: Policy, cache_config: CacheConfig) -> KVCache:
  """The small cache of what policy.select names after prefill.

  Args:
    cache: what prefill left, resident.
    policy: decides what is kept: at most the capacity of cache_config.
    cache_config: of the small cache, from `decode_config`.
  """
  state, keys, values, remembered = cache.policy_state, [], [], []
  for row in range(cache.table.shape[0]):
    selection, state = policy.select(state, _after_prefill(cache, row, cache_config))
    kept, cache = resident.recall(cache, row, selection, cache.lengths)
    k, v, positions = _first_slots(cache, kept, cache_config)
    keys, values, remembered = [*keys, k], [*values, v], [*remembered, positions]
  pools = Pools(jnp.concatenate(keys), jnp.concatenate(values))
  shape = (*cache.table.shape[:3], cache_config.pages_per_row)
  table = jnp.arange(pools.num_pages, dtype=jnp.int32).reshape(shape)
  return cache.replace(pools=pools, table=table, policy_state=state, store_state=tuple(remembered))


def _after_prefill(cache: KVCache, row: int, cache_config: CacheConfig) -> Inputs:
  """What a policy sees when it decides what is kept: which slots there are, and its own state."""
  return Inputs(
    layer=-1,
    row=row,
    lengths=cache.lengths,
    first=cache_config.first_seen(cache.lengths),
    slot_positions=resident.slot_positions(cache, row, cache.lengths),
  )


def _first_slots(cache: KVCache, kept: Recalled, cache_config: CacheConfig):
  """Pages f[B*K*P, D, C] of keys, f[B*K*P, C, D] of values, and positions i32[B, K, P*C]."""
  b, k, _ = kept.pages.shape
  capacity = cache_config.pages_per_row * cache_config.page_size
  mask = kept.mask.reshape(b, k, -1)
  missing = max(0, capacity - mask.shape[-1])
  order = jnp.argsort(~mask, axis=-1, stable=True)[..., :capacity]  # kept first, in order

  def pick(x, fill):
    x = jnp.take_along_axis(x.reshape(b, k, -1, *x.shape[4:]), _like(order, x), axis=2)
    return jnp.pad(
      x, [(0, missing) if i == 2 else (0, 0) for i in range(x.ndim)], constant_values=fill
    )

  def pages(gathered):  # f[B, K, M, C, D]
    return pick(gathered, 0).reshape(-1, *gathered.shape[3:])

  keys = cache.pools.keys.at[kept.pages].get(mode="clip").swapaxes(3, 4)
  values = cache.pools.values.at[kept.pages].get(mode="clip")
  positions = jnp.where(kept.mask, kept.positions, -1)
  return pages(keys).swapaxes(1, 2), pages(values), pick(positions, -1)


def _like(order: jax.Array, x: jax.Array) -> jax.Array:
  """order with a unit axis for every axis of x beyond slots."""
  return order.reshape(*order.shape, *(1,) * (x.ndim - 4))


COMPACT = Store(
  name="compact",
  drops=True,
  decode_config=decode_config,
  slot_positions=slot_positions,
  place=place,
  append=append,
  fetch=resident.fetch,
  recall=recall,
  seal=seal,
)
