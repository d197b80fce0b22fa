"""Whole pages come back from the host: each one that holds a selected token, at every step.

This is the prototype that OPKV compares itself with (a sparse method on a paged cache that moves
pages): nothing of what was recalled is used again. `PREFETCH_ALL` is its ablation: all pages of a
row come back, whatever is selected.

Every page lies in host memory. The device has two staging areas with a place for each page of a
row, which layers use in turn, so that the pages of one come while another attends.
"""

from __future__ import annotations

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.cache.counting import places
from kvjax.cache.kv_cache import KVCache
from kvjax.cache.paged import Pools, append_token
from kvjax.config import CacheConfig
from kvjax.stores import resident
from kvjax.stores.traffic import Traffic, add, no_traffic
from kvjax.types import LayerPlan, Policy, Recalled, Selection, Store
from pallas_kernels.recall_pages import recall_pages

AREAS = 2


class StagedState(flax.struct.PyTreeNode):
  """Two areas of B*K*P pages, of which page p of list x is x*P + p, and what was moved."""

  areas: tuple[Pools, ...]
  traffic: Traffic


def append(cache: KVCache, row: int, k, v, positions, slots) -> KVCache:
  """Writes one token a row to the host, and to its page in the staging area, which may have come
  before the token was there."""
  del positions
  cache = cache.replace(host=append_token(cache.host, cache.table[row], slots, k, v))
  state = cache.store_state
  area = append_token(state.areas[row % AREAS], _places(cache), slots, k, v)
  return cache.replace(store_state=_with_area(state, row, area))


def fetch(
  cache: KVCache, row: int, selection: Selection, lengths: jax.Array, *, everything: bool
) -> tuple[Selection, KVCache]:
  """Brings back the pages of a selection; the ticket is the selection."""
  b, heads, p = cache.table.shape[1:]
  c = host_page_size(cache)
  there = jnp.arange(p)[None, None] * c < lengths[:, None, None]
  wanted = there if everything else there & wanted_pages(selection, heads, p, c)
  wanted = jnp.broadcast_to(wanted, (b, heads, p))
  order, count = places(wanted.reshape(-1), wanted.size), wanted.sum(dtype=jnp.int32)
  state = cache.store_state
  source = cache.table[row].reshape(-1).at[order].get(mode="clip")
  area = tuple(state.areas[row % AREAS])
  area = Pools(*recall_pages(tuple(cache.host), area, source, order, count))
  # What is written to the host later must wait for this, or XLA copies the pool for it.
  area, on_host = jax.lax.optimization_barrier((area, cache.host))
  cache = cache.replace(host=on_host)
  pages = wanted.sum(axis=2)
  selected = selected_tokens(selection, heads, c)
  traffic = add(state.traffic, selected=selected, moved=pages * c, pages_used=pages)
  return selection, cache.replace(store_state=_with_area(state, row, area).replace(traffic=traffic))


def recall(
  cache: KVCache, row: int, ticket: Selection, lengths: jax.Array
) -> tuple[Recalled, KVCache]:
  """The selected tokens in the staging area."""
  positions = resident.slots_of(ticket, host_page_size(cache))
  mask = ticket.mask & (positions < lengths[:, None, None, None])
  pages = resident.page_ids(_places(cache), ticket.pages)
  return Recalled(cache.store_state.areas[row % AREAS], pages, mask, positions, ticket.slots), cache


def release(cache: KVCache, row: int, out: jax.Array) -> tuple[jax.Array, KVCache]:
  """The area is free for the layer after the next once this one has attended."""
  state = cache.store_state
  out, area = jax.lax.optimization_barrier((out, state.areas[row % AREAS]))
  return out, cache.replace(store_state=_with_area(state, row, area))


def seal(
  cache: KVCache, policy: Policy, cache_config: CacheConfig, layer_plan: LayerPlan
) -> KVCache:
  """The cache with its pages on the host only, where prefill has written them too."""
  cache = resident.seal(cache, policy, cache_config, layer_plan)
  b, heads, p = cache.table.shape[1:]
  shape = b * heads * p, *cache.pools.keys.shape[1:]
  areas = tuple(
    Pools(*(jnp.zeros(shape, cache.pools.keys.dtype) for _ in range(2))) for _ in range(AREAS)
  )
  return cache.replace(pools=None, store_state=StagedState(areas, no_traffic(b, heads)))


def host_page_size(cache: KVCache) -> int:
  """C."""
  return cache.host.page_size


def wanted_pages(selection: Selection, heads: int, pages: int, page_size: int) -> jax.Array:
  """bool[B, K, P]: pages of which a slot counts, for KV heads also where query heads select."""
  b = selection.pages.shape[0]
  if selection.tokens is not None:
    tokens = selection.tokens.reshape(b, heads, -1, selection.tokens.shape[-1]).any(axis=2)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, pages * page_size - tokens.shape[-1])))
    return tokens.reshape(b, heads, pages, page_size).any(axis=-1)
  used = selection.mask.any(axis=-1).reshape(b, heads, -1)
  places = jnp.where(used, selection.pages.reshape(b, heads, -1), pages)
  wanted = jnp.zeros((b, heads, pages), bool)
  at = jnp.arange(b)[:, None, None], jnp.arange(heads)[None, :, None], places
  return wanted.at[at].set(True, mode="drop")


def selected_tokens(selection: Selection, heads: int, page_size: int) -> jax.Array:
  """i32[B, K]: slots that count; a page of which no slot is named counts with all of them."""
  whole = selection.slots is None and selection.mask.shape[-1] == 1
  counts = selection.mask.reshape(selection.mask.shape[0], heads, -1).sum(axis=2)
  return counts * (page_size if whole else 1)


def _places(cache: KVCache) -> jax.Array:
  """i32[B, K, P]: where a list's pages are in an area."""
  b, heads, p = cache.table.shape[1:]
  return jnp.arange(b * heads * p, dtype=jnp.int32).reshape(b, heads, p)


def _with_area(state: StagedState, row: int, area: Pools) -> StagedState:
  areas = list(state.areas)
  areas[row % AREAS] = area
  return state.replace(areas=tuple(areas))


WHOLE_PAGE = Store(
  name="whole_page",
  drops=False,
  on_host=True,
  decode_config=lambda cache_config, policy: cache_config,
  slot_positions=lambda cache, row, lengths: resident.positions_of(
    cache.table.shape[1:], host_page_size(cache), lengths
  ),
  place=resident.place,
  append=append,
  fetch=partial(fetch, everything=False),
  recall=recall,
  release=release,
  seal=seal,
  insert=lambda state, one, slot: state,  # areas hold nothing between two steps
)
PREFETCH_ALL = WHOLE_PAGE._replace(name="prefetch_all", fetch=partial(fetch, everything=True))
