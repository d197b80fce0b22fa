"""Everything stays on the device, in the pages where it was written."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvjax.cache.kv_cache import KVCache
from kvjax.cache.paged import append_token, keys_of
from kvjax.config import CacheConfig
from kvjax.types import Inputs, LayerPlan, Policy, Recalled, Selection, Store


def slot_positions(cache: KVCache, row: int, lengths: jax.Array) -> jax.Array:
  """A slot is the position of its token: i32[B, K, T]."""
  del row
  return positions_of(cache.table.shape[1:], cache.pools.page_size, lengths)


def positions_of(table_shape: tuple[int, int, int], page_size: int, lengths) -> jax.Array:
  """i32[B, K, T] of a table [B, K, P] in which a slot is the position of its token."""
  b, k, p = table_shape
  slots = jnp.arange(p * page_size)
  positions = jnp.where(slots[None] < lengths[:, None], slots[None], -1)
  return jnp.broadcast_to(positions[:, None], (b, k, slots.shape[0]))


def place(cache: KVCache, row: int, positions: jax.Array, victims) -> tuple[jax.Array, KVCache]:
  """i32[B, K]: a token's slot is its position."""
  del row, victims
  b, k = cache.table.shape[1:3]
  return jnp.broadcast_to(positions[:, None], (b, k)), cache


def append(cache: KVCache, row: int, k, v, positions, slots) -> KVCache:
  """Writes one token a row."""
  del positions
  return cache.replace(pools=append_token(cache.pools, cache.table[row], slots, k, v))


def fetch(
  cache: KVCache, row: int, selection: Selection, lengths: jax.Array
) -> tuple[Selection, KVCache]:
  """Nothing has to move; the ticket is the selection."""
  del row, lengths
  return selection, cache


def recall(
  cache: KVCache, row: int, ticket: Selection, lengths: jax.Array
) -> tuple[Recalled, KVCache]:
  """Page ids out of the table, and the mask cut to the slots that hold a token."""
  positions = slots_of(ticket, cache.pools.page_size)
  mask = ticket.mask & (positions < lengths[:, None, None, None])
  pages = page_ids(cache.table[row], ticket.pages)
  return Recalled(cache.pools, pages, mask, positions, ticket.slots), cache


def release(cache: KVCache, row: int, out: jax.Array) -> tuple[jax.Array, KVCache]:
  """Nothing to do."""
  del row
  return out, cache


def slots_of(selection: Selection, page_size: int) -> jax.Array:
  """Slots of a row that a selection names: i32[B, K, M, C], or [B, K, M, 1] of single ones."""
  within = selection.slots
  inside = jnp.arange(page_size)[None, None, None] if within is None else within[..., None]
  return selection.pages[..., None] * page_size + inside


def page_ids(table: jax.Array, pages: jax.Array) -> jax.Array:
  """Rows of the pool, i32[B, K or H, M], of pages of the rows of table i32[B, K, P]."""
  table = jnp.repeat(table, pages.shape[1] // table.shape[1], axis=1)
  return jnp.take_along_axis(table, pages, axis=-1, mode="clip")


def seal(
  cache: KVCache, policy: Policy, cache_config: CacheConfig, layer_plan: LayerPlan
) -> KVCache:
  """The same cache, after the policy has settled each of its selecting layers."""
  del layer_plan
  if policy.settle is None:
    return cache
  state = cache.policy_state
  for row in range(cache.table.shape[0]):
    state = policy.settle(state, after_prefill(cache, row, cache_config))
  return cache.replace(policy_state=state)


def after_prefill(cache: KVCache, row: int, cache_config: CacheConfig) -> Inputs:
  """What a policy sees of a layer between prefill and decode: the slots, and its own state."""
  return Inputs(
    layer=-1,
    row=row,
    lengths=cache.lengths,
    first=cache_config.first_seen(cache.lengths),
    slot_positions=slot_positions(cache, row, cache.lengths),
    keys=partial(keys_of, cache.pools, cache.table[row]),
  )


RESIDENT = Store(
  name="resident",
  drops=False,
  on_host=False,
  decode_config=lambda cache_config, policy: cache_config,
  slot_positions=slot_positions,
  place=place,
  append=append,
  fetch=fetch,
  recall=recall,
  release=release,
  seal=seal,
)
