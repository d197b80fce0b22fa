"""FlexiCache's placement: each KV head has its pages where the way it chooses them asks for.

Heads that the policy names (`LayerPlan.on_device`: those that keep changing their minds) have all
their pages on the device, and none of what they do in decode is written to the host. The others,
tiered heads, have every page in host memory and on the device a fixed number of slots, of a page
each. A page stays where it is until another needs its slot: incoming pages, in ascending order,
take the slots of pages that are not selected now, in ascending order, and nothing is allocated or
freed. What is away has no page in the table. So what a step moves is what changed in the selection
since the last one: nothing, for a policy that keeps its lists for a while, in most steps.

The slots are the budget and one more, in which the page that the next token begins is given its
place before that token is written. Tokens go to their page on the device, and for tiered heads
through to the host at once, so that to give up a page is to forget where it was.

Where the original (a fork of vLLM) differs: it ranks before it drops, so that what its first step
selects has never left; here the newest pages are on the device after prefill, and the first step
brings back what it wants (it is counted as what any other step moves). It writes pages to the host
when they are full, not token by token. A row whose pages are on their way sits out a step there;
here the step waits.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.kv_cache import TOO_SMALL, KVCache
from kvjax.cache.paged import Pools, append_token
from kvjax.config import CacheConfig
from kvjax.stores import resident
from kvjax.stores.traffic import Traffic, add, no_traffic
from kvjax.stores.whole_page import WHOLE_PAGE, wanted_pages
from kvjax.types import LayerPlan, Policy, Recalled, Selection
from pallas_kernels.recall_pages import recall_pages


class TieredState(flax.struct.PyTreeNode):
  """What the store keeps on the device.

  Attributes:
    tables: i32[B, K, P] of each selecting layer: where each page of a row is in that layer's pools,
      and their number of pages, which is no page, for what is away.
    pools: f[n, C, D] of each selecting layer: all pages of each list that stays, then the slots of
      each list that does not.
    traffic: what was moved.
    tiered: of each selecting layer, the KV heads that do not stay.
    width: W, slots of a tiered list.
  """

  tables: tuple[jax.Array, ...]
  pools: tuple[Pools, ...]
  traffic: Traffic
  tiered: tuple[tuple[int, ...], ...] = flax.struct.field(pytree_node=False)
  width: int = flax.struct.field(pytree_node=False)


class Swap(NamedTuple):
  """What a step does to the slots of X lists.

  Attributes:
    table: i32[X, P], where their pages are after it.
    source: i32[X*W], x*P + p of each page to copy, of which the first `count` are meant.
    target: i32[X*W], where it goes.
    count: i32[].
    moved: bool[X, P], pages to copy.
    lacking: bool[X], lists with more wanted pages than slots.
  """

  table: jax.Array
  source: jax.Array
  target: jax.Array
  count: jax.Array
  moved: jax.Array
  lacking: jax.Array


def swap(table: jax.Array, wanted: jax.Array, written: jax.Array, null: int, width: int) -> Swap:
  """Gives each wanted page a slot.

  Args:
    table: i32[X, P], slots in the pools, `null` for pages that are away; W of each list are not.
    wanted: bool[X, P].
    written: bool[X, P], pages that hold a token; others come without being copied, and none of a
      list lies behind them.
    null: what says that a page is away; above every slot.
    width: W.
  """
  (lists, total), size = table.shape, table.shape[0] * width
  here = table < null
  incoming, outgoing = wanted & ~here, here & ~wanted
  come, go = (jnp.cumsum(pages, axis=1) - 1 for pages in (incoming, outgoing))
  x = jnp.arange(lists)[:, None]
  free = jnp.full((lists, width), null, jnp.int32)
  free = free.at[x, jnp.where(outgoing, go, width)].set(table, mode="drop")
  taken = jnp.take_along_axis(free, come, axis=1, mode="fill", fill_value=null)
  left = outgoing & (go < incoming.sum(axis=1, keepdims=True))
  after = jnp.where(incoming, taken, jnp.where(left, null, table))
  moved = incoming & written & (after < null)
  counts = moved.sum(axis=1)
  place = jnp.where(moved, (jnp.cumsum(counts) - counts)[:, None] + come, size)
  pages = jnp.arange(lists * total, dtype=jnp.int32).reshape(lists, total)
  source, target = (
    jnp.zeros(size, jnp.int32).at[place].set(ids, mode="drop") for ids in (pages, after)
  )
  lacking = (wanted & (after == null)).any(axis=1)
  return Swap(after, source, target, counts.sum(), moved, lacking)


def append(cache: KVCache, row: int, k, v, positions, slots) -> KVCache:
  """Writes one token a row to the device, and to the host where the head is tiered."""
  del positions
  state = cache.store_state
  if state.tiered[row]:
    heads = np.array(state.tiered[row])
    args = (x[:, heads] for x in (cache.table[row], slots, k, v))
    cache = cache.replace(host=append_token(cache.host, *args))
  pools = append_token(state.pools[row], state.tables[row], slots, k, v)
  return cache.replace(store_state=state.replace(pools=_replaced(state.pools, row, pools)))


def fetch(
  cache: KVCache, row: int, selection: Selection, lengths: jax.Array
) -> tuple[Selection, KVCache]:
  """Brings back the selected pages that are away; the ticket is the selection."""
  state, (b, heads, p) = cache.store_state, cache.table.shape[1:]
  table, null = state.tables[row], state.pools[row].num_pages
  wanted = wanted_pages(selection, heads, p, cache.host.page_size)
  away = wanted & (table == null)
  counts = _counts(selection, away, lengths, cache.host.page_size)
  counts |= {"pages_used": wanted, "pages_hit": wanted & ~away}
  if state.tiered[row]:
    moved, cache = _bring(cache, row, wanted, lengths)
    moved = jnp.zeros_like(wanted).at[:, np.array(state.tiered[row])].set(moved)
    counts |= {"moved": moved.astype(jnp.int32) * cache.host.page_size}
  counts = {name: x.reshape(b, heads, -1).sum(axis=2) for name, x in counts.items()}
  traffic = add(state.traffic, **counts)
  return selection, cache.replace(store_state=cache.store_state.replace(traffic=traffic))


def recall(
  cache: KVCache, row: int, ticket: Selection, lengths: jax.Array
) -> tuple[Recalled, KVCache]:
  """The selected pages, where they are on the device."""
  state = cache.store_state
  pools, positions = state.pools[row], resident.slots_of(ticket, cache.host.page_size)
  mask = ticket.mask & (positions < lengths[:, None, None, None])
  pages = resident.page_ids(state.tables[row], ticket.pages)
  if ticket.slots is not None or len(state.tiered[row]) < ticket.pages.shape[1]:
    return Recalled(pools, pages, mask, positions, ticket.slots), cache
  # Every list is tiered, so that the slots of all of them are the whole pool: attention reads them
  # where they lie, and masks those that are not selected now.
  place = jnp.where(mask.any(axis=3), pages, pools.num_pages)
  mask, positions = (_by_slot(values, place, pools.num_pages) for values in (mask, positions))
  return Recalled(pools, None, mask, positions), cache


def _by_slot(values: jax.Array, place: jax.Array, slots: int) -> jax.Array:
  """[B, K, W, C] of values [B, K, M, C] in places i32[B, K, M] of the B*K*W slots; 0 elsewhere."""
  by_slot = jnp.zeros((slots, values.shape[3]), values.dtype).at[place].set(values, mode="drop")
  return by_slot.reshape(*values.shape[:2], -1, values.shape[3])


def seal(
  cache: KVCache, policy: Policy, cache_config: CacheConfig, layer_plan: LayerPlan
) -> KVCache:
  """The cache with the newest pages of each tiered list on the device, and all of the others."""
  cache = resident.seal(cache, policy, cache_config, layer_plan)
  rows, b, heads, p = cache.table.shape
  width = min(p, (policy.budget_tokens or p * cache_config.page_size) // cache_config.page_size + 1)
  stay = layer_plan.on_device or ((),) * rows
  tiered = tuple(tuple(h for h in range(heads) if h not in of_layer) for of_layer in stay)
  layers = [_layer(cache, row, tiered[row], width) for row in range(rows)]
  tables, pools = zip(*layers, strict=True)
  state = TieredState(tables, pools, no_traffic(b, heads), tiered, width)
  return cache.replace(pools=None, store_state=state)


def _layer(
  cache: KVCache, row: int, tiered: tuple[int, ...], width: int
) -> tuple[jax.Array, Pools]:
  """Table and pools of a layer, whose pages are all in the pools of prefill."""
  rows, b, heads, p = cache.table.shape
  owned = cache.pools.num_pages // (rows * b * heads)  # pages of a list, fewer than P in a ring
  stay = [h for h in range(heads) if h not in tiered]
  num_pages = -(-cache.lengths // cache.pools.page_size)
  first = jnp.clip(num_pages + 1 - width, 0, p - width)[:, None, None]
  newest = first + jnp.arange(width)[None, None]
  table = cache.table[row]
  whole = table[:, np.array(stay, int), :owned]
  part = jnp.take_along_axis(table[:, np.array(tiered, int)], newest, axis=-1)
  source = jnp.concatenate([whole.reshape(-1), part.reshape(-1)])
  pools = Pools(*(pool.at[source].get(mode="clip") for pool in cache.pools))

  def firsts(start: int, lists: int, pages: int) -> jax.Array:  # i32[B, lists, 1]
    return start + jnp.arange(b * lists, dtype=jnp.int32).reshape(b, lists, 1) * pages

  pages = jnp.arange(p, dtype=jnp.int32)[None, None]
  whole = firsts(0, len(stay), owned) + pages % owned
  slots = firsts(b * len(stay) * owned, len(tiered), width) + pages - first
  part = jnp.where((pages >= first) & (pages < first + width), slots, pools.num_pages)
  order = np.argsort(np.array([*stay, *tiered]))
  return jnp.concatenate([whole, part], axis=1)[:, order], pools


def insert(state: TieredState, one: TieredState, slot: jax.Array) -> TieredState:
  """The state with a row that was sealed alone: its pages, and where they are now."""
  layers = [
    _inserted(table, pools, own, alone, slot, len(tiered) * state.width)
    for table, pools, own, alone, tiered in zip(
      state.tables, state.pools, one.tables, one.pools, state.tiered, strict=True
    )
  ]
  tables, pools = zip(*layers, strict=True)
  return state.replace(tables=tables, pools=pools)


def _inserted(table, pools: Pools, own, alone: Pools, slot, slots_of_row: int):
  """Table and pools of a layer; own i32[1, K, P] and alone are those of the row."""
  whole = alone.num_pages - slots_of_row  # pages of the row's lists that stay
  firsts = slot * whole, table.shape[0] * whole + slot * slots_of_row

  def put(pool, new):
    for part, first in zip((new[:whole], new[whole:]), firsts, strict=True):
      pool = jax.lax.dynamic_update_slice_in_dim(pool, part, first, axis=0)
    return pool

  here = jnp.where(own < whole, own + firsts[0], own - whole + firsts[1])
  here = jnp.where(own == alone.num_pages, pools.num_pages, here)
  table = jax.lax.dynamic_update_slice_in_dim(table, here, slot, axis=0)
  return table, Pools(*map(put, pools, alone))


def _bring(
  cache: KVCache, row: int, wanted: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, KVCache]:
  """bool[B, t, P]: pages that came back of t tiered heads, and the cache with them."""
  state, heads = cache.store_state, np.array(cache.store_state.tiered[row])
  pools, table = state.pools[row], state.tables[row][:, heads]
  b, _, p = table.shape
  starts = jnp.arange(p)[None] * cache.host.page_size
  # The page of the next token, where that is new; of a row that sits the step out nothing is.
  begins = ((starts == lengths[:, None]) & (starts > 0))[:, None]
  written = jnp.broadcast_to((starts < lengths[:, None])[:, None], table.shape)
  table, wanted = table.reshape(-1, p), (wanted[:, heads] | begins).reshape(-1, p)
  ids = cache.table[row][:, heads].reshape(-1)
  args = pools, cache.host, table, wanted, written.reshape(-1, p), ids
  move = partial(_moved, width=state.width)
  copied, table, moved, lacking = lax.platform_dependent(
    *args, cpu=partial(moved_if_any, move), default=move
  )
  # XLA copies a pool that is written after it was read, unless it must wait for the read.
  copied, host = lax.optimization_barrier((copied, cache.host))
  after = state.tables[row].at[:, heads].set(table.reshape(b, -1, p))
  state = state.replace(
    tables=_replaced(state.tables, row, after), pools=_replaced(state.pools, row, copied)
  )
  lacking = jnp.where(lacking.reshape(b, -1).any(axis=1), TOO_SMALL, 0).astype(jnp.uint32)
  cache = cache.replace(host=host, store_state=state, overflow=cache.overflow | lacking)
  return moved.reshape(b, -1, p), cache


def _moved(pools: Pools, host: Pools, table, wanted, written, ids, *, width: int):
  """The pools with what is wanted, the table after it, what was copied, and `Swap.lacking`.

  Args:
    pools: of a layer.
    host: all pages of tiered heads.
    table: i32[X, P], of the layer's tiered lists.
    wanted: bool[X, P].
    written: bool[X, P].
    ids: i32[X*P], where their pages are on the host.
    width: W.
  """
  step = swap(table, wanted, written, null=pools.num_pages, width=width)
  source = ids.at[step.source].get(mode="clip")
  copied = recall_pages(tuple(host), tuple(pools), source, step.target, step.count)
  return Pools(*copied), step.table, step.moved, step.lacking


def moved_if_any(move, pools: Pools, host: Pools, table, wanted, *rest):
  """`move` of these, without any work where all that is wanted is there. A GPU plans always, as it
  would have to ask the host which branch to take."""
  incoming = (wanted & (table == pools.num_pages)).any()
  nothing = jnp.zeros_like(wanted), jnp.zeros(len(wanted), bool)
  return lax.cond(
    incoming,
    lambda pools, host: move(pools, host, table, wanted, *rest),
    lambda pools, host: (pools, table, *nothing),
    pools,
    host,
  )


def _counts(
  selection: Selection, away: jax.Array, lengths: jax.Array, page_size: int
) -> dict[str, jax.Array]:
  """i32[B, K, M] of tokens that are selected, and of those that are here already."""
  slots = resident.slots_of(selection, page_size)
  tokens = (selection.mask & (slots < lengths[:, None, None, None])).sum(axis=-1)
  missing = jnp.take_along_axis(away, selection.pages, axis=-1, mode="clip")
  return {"selected": tokens, "resident": jnp.where(missing, 0, tokens)}


def _replaced[T](values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
  return (*values[:index], value, *values[index + 1 :])


HEAD_TIERED = WHOLE_PAGE._replace(
  name="head_tiered",
  append=append,
  fetch=fetch,
  recall=recall,
  release=resident.release,
  seal=seal,
  insert=insert,
  tiers_heads=True,
)
