"""OPKV's store: single tokens come back from the host, in blocks of what was selected together.

Every page lies in host memory. The device holds a pool of OP blocks for each selecting layer, which
later steps use again since what is selected changes slowly, and for each list (row and KV head) one
ordered page with the newest tokens. What a step copies and reads is planned by
`sub_block_manager.plan`. Layers that select the same tokens (`LayerPlan.shared`) share the plan and
its metadata. With `shared=False` each list has a pool of its own (`kvjax.opkv.apart`). With
`host_blocks` the host keeps blocks that a pool gave up (`kvjax.opkv.demoted`).

Departures from the paper. Tokens are written through to the host when they are made, not when their
page is full: the bytes are the same. The pool of a layer is an array of its own, so that the copies
for the next layer need not wait for the attention of this one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.cache.kv_cache import TOO_SMALL, KVCache
from kvjax.cache.paged import Pools
from kvjax.config import CacheConfig
from kvjax.opkv import demoted
from kvjax.opkv.apart import no_blocks_apart
from kvjax.opkv.blocks import Blocks, no_blocks, release
from kvjax.opkv.recalling import (
  append_newest,
  copy_tokens,
  groups,
  is_last,
  newest_pages,
  ordered_page,
  replaced,
  selected_tokens,
)
from kvjax.opkv.sub_block_manager import Plan, Settings, checked, plan
from kvjax.stores import resident
from kvjax.stores.traffic import Traffic, add, no_traffic
from kvjax.stores.whole_page import WHOLE_PAGE
from kvjax.types import LayerPlan, Policy, Recalled, Selection, Store


class OpBlockState(flax.struct.PyTreeNode):
  """What the store keeps on the device.

  Attributes:
    blocks: metadata of the pools, one for layers that share it.
    pools: f[n + X, C, D] of each selecting layer: n OP blocks, then the ordered page of each list;
      where pools are not shared, for each list its n/X blocks and then its ordered page.
    traffic: what was moved.
    plan: within a step, of the layers that are being served; None between steps.
    group: of each selecting layer, which metadata it has.
    settings: of the plans, but for what follows from the shapes of a device's part (`_settings`).
    partition: blocks that the pools gave up, on the host; None without one.
  """

  blocks: tuple[Blocks, ...]
  pools: tuple[Pools, ...]
  traffic: Traffic
  plan: Plan | None
  group: tuple[int, ...] = flax.struct.field(pytree_node=False)
  settings: Settings = flax.struct.field(pytree_node=False)
  partition: demoted.Partition | None = None


class Ticket(NamedTuple):
  """What a layer will read.

  Attributes:
    pages: i32[X, M + 1], rows of the layer's pool; the last is the ordered page. None for all of
      them, list after list.
    mask: bool[X, M + 1, C].
    positions: i32[X, M + 1, C].
  """

  pages: jax.Array | None
  mask: jax.Array
  positions: jax.Array


def op_block(
  *,
  rho: float = 0.6,
  recheck: bool = True,
  strict: bool = False,
  filling: str = "aggregate",
  reuse: bool = True,
  eviction: str = "s3fifo",
  slack: float = 1.2,
  exclusive: bool = False,
  shared: bool = True,
  host_blocks: float = 0.0,
) -> Store:
  """OPKV's store.

  Args:
    rho: share of a block's slots that must be selected for it to serve again, in (0, 1].
    recheck: a token counts towards one block only.
    strict: nothing is visible but what the policy selected; else what else a block holds is too.
    filling: how missing tokens find a slot: "aggregate", the paper's; "by_page", its ablation;
      "refill", ours: they take the slots of tokens that are no longer selected.
    reuse: False for the ablation that uses no block twice.
    eviction: "fifo", "lru" or "s3fifo".
    slack: OP blocks of the pool over those that the policy's budget fills, at least 1.
    exclusive: ours: a token that is copied again leaves the block that still has it.
    shared: the lists of a layer share its pool, as in the paper; False, ours: each has its own
      part, which attention reads in place.
    host_blocks: OP blocks that the host keeps of those that a layer's pool gave up, over the blocks
      of that pool; 0 for none. Filling must be "aggregate", blocks reused and not exclusive.

  Raises:
    ValueError: an argument outside these ranges.
  """
  if slack < 1:
    raise ValueError(f"slack {slack} must be at least 1: a selection must fit the pool")
  settings = Settings(1, 1, rho, eviction, recheck, strict, filling, reuse, exclusive, shared)
  checked(settings)
  demoted.check_host_blocks(host_blocks, filling, reuse, exclusive)
  put = insert if shared else insert_lists if host_blocks else None
  return WHOLE_PAGE._replace(
    name="op_block",
    append=append,
    fetch=fetch,
    recall=recall,
    release=resident.release,
    seal=partial(seal, settings=settings, slack=slack, host_blocks=host_blocks),
    insert=put,
    free=free,
  )


def seal(
  cache: KVCache,
  policy: Policy,
  cache_config: CacheConfig,
  layer_plan: LayerPlan,
  *,
  settings: Settings,
  slack: float,
  host_blocks: float = 0.0,
) -> KVCache:
  """The cache with its pages on the host only; no OP blocks yet, the newest page of each list."""
  cache = resident.seal(cache, policy, cache_config, layer_plan)
  rows, b, heads, p = cache.table.shape
  _, c, d = cache.pools.keys.shape
  shared, lists, budget = settings.shared, b * heads, min(policy.budget_tokens or p * c, p * c)
  most = -(-budget // c)
  n = max(lists * most, int(slack * lists * most))
  # More of half empty blocks would take from other lists what they need.
  width = -(-n // lists) if shared else int(slack * most)
  if settings.filling == "by_page":  # each selected token may be in a page of its own
    width = min(budget, p)
    n = max(n, lists * width)
  n = n if shared else lists * width
  group, parts = groups(layer_plan, rows), 1 if shared else lists

  def before(newest):
    empty = jnp.zeros((parts, n // parts, c, d), newest.dtype)
    newest = newest.reshape(parts, lists // parts, c, d)
    return jnp.concatenate([empty, newest], axis=1).reshape(-1, c, d)

  pools = tuple(Pools(*map(before, newest_pages(cache, row))) for row in range(rows))
  make, size = (no_blocks, n) if shared else (no_blocks_apart, width)
  blocks = tuple(make(size, c, settings.order, lists, p * c) for _ in {*group})
  partition = None
  if host_blocks:
    places, dtype = demoted.num_places(host_blocks, n, lists), cache.pools.keys.dtype
    partition = demoted.no_partition(places, (c, d), dtype, group, b, heads)
  state = OpBlockState(blocks, pools, no_traffic(b, heads), None, group, settings, partition)
  return cache.replace(pools=None, store_state=state)


def insert(state: OpBlockState, one: OpBlockState, slot: jax.Array) -> OpBlockState:
  """The newest pages of a row that was sealed alone; it has no OP blocks yet."""
  first = state.blocks[0].owner.shape[0] + slot * _lists(one)
  alone = one.blocks[0].owner.shape[0]

  def put(pool, new):
    return jax.lax.dynamic_update_slice_in_dim(pool, new[alone:], first, axis=0)

  return state.replace(pools=jax.tree.map(put, state.pools, one.pools))


def insert_lists(state: OpBlockState, one: OpBlockState, slot: jax.Array) -> OpBlockState:
  """`insert` where all arrays of pools are list by list; the partition, which is not, has nothing
  of the row yet."""

  def put(array, new):
    return jax.lax.dynamic_update_slice_in_dim(array, new, slot * new.shape[0], axis=0)

  blocks, pools = jax.tree.map(put, (state.blocks, state.pools), (one.blocks, one.pools))
  return state.replace(blocks=blocks, pools=pools)


def free(state: OpBlockState, ended: jax.Array) -> OpBlockState:
  """Without the OP blocks of rows that ended."""
  lists = jnp.repeat(ended, _lists(state) // ended.shape[0])
  partition = state.partition and demoted.free(state.partition, lists)
  blocks = tuple(release(blocks, lists) for blocks in state.blocks)
  return state.replace(blocks=blocks, partition=partition)


def append(cache: KVCache, row: int, k, v, positions, slots) -> KVCache:
  """Writes one token a row to the host and to the ordered page of each list."""
  state = cache.store_state
  pages = ordered_pages(state).reshape(slots.shape)
  pools, cache = append_newest(cache, row, state.pools[row], pages, k, v, positions, slots)
  return cache.replace(store_state=state.replace(pools=replaced(state.pools, row, pools)))


def fetch(
  cache: KVCache, row: int, selection: Selection, lengths: jax.Array
) -> tuple[Ticket, KVCache]:
  """Copies what is missing of a selection into OP blocks."""
  state, group = cache.store_state, cache.store_state.group[row]
  b, heads = cache.table.shape[1:3]
  newest = ordered_page(cache, lengths)[0]
  selected = selected_tokens(cache, selection, lengths)
  if state.plan is None:
    held = state.partition and state.partition.blocks[group]
    step = plan(state.blocks[group], selected, _settings(state, heads), newest, held)
    small = jnp.where(step.too_small, TOO_SMALL, 0).astype(jnp.uint32)
    cache = cache.replace(overflow=cache.overflow | small)
    state = state.replace(blocks=replaced(state.blocks, group, step.blocks), plan=step)
  step, pools = state.plan, state.pools[row]
  if step.exchange is not None:
    pools, state = _exchanged(state, row, step.exchange)
  moves = step.source, in_pool(state, step.target), step.count
  pools, cache = copy_tokens(cache, row, pools, *moves)
  traffic = add(state.traffic, **_counts(step, selected, (b, heads)))
  state = state.replace(
    pools=replaced(state.pools, row, pools),
    traffic=traffic,
    plan=None if is_last(state.group, row) else step,
  )
  ticket = _ticket(state, step, selected, ordered_page(cache, lengths))
  return ticket, cache.replace(store_state=state)


def _exchanged(state: OpBlockState, row: int, step: demoted.Exchange) -> tuple[Pools, OpBlockState]:
  """The pools of a layer with the blocks that come back, and the state with those that went."""
  assert state.partition is not None
  c = state.pools[row].page_size
  down, up = (in_pool(state, blocks * c) // c for blocks in (step.down[0], step.up[1]))
  pools, on_host = demoted.moved(state.pools[row], state.partition.pools[row], step, down, up)
  partition = demoted.after(state.partition, row, state.group[row], on_host, step)
  return pools, state.replace(partition=partition)


def _counts(step: Plan, selected: jax.Array, shape: tuple[int, int]) -> dict[str, jax.Array]:
  """Fields of `Traffic`, i32[B, K]; a block that comes back counts with all its tokens."""
  wanted, missing, moved = selected.sum(axis=1), step.moved, step.moved
  if step.exchange is not None:
    missing, moved = missing + step.exchange.covered, moved + step.exchange.back
  counts = {
    "selected": wanted,
    "moved": moved,
    "resident": wanted - missing,
    "pages_used": step.hits + step.new,
    "pages_hit": step.hits,
  }
  return {name: count.reshape(shape) for name, count in counts.items()}


def recall(
  cache: KVCache, row: int, ticket: Ticket, lengths: jax.Array
) -> tuple[Recalled, KVCache]:
  """The blocks of each list and its ordered page."""
  b = lengths.shape[0]
  mask, positions = (x.reshape(b, -1, *x.shape[1:]) for x in ticket[1:])
  pages = None if ticket.pages is None else ticket.pages.reshape(b, -1, ticket.pages.shape[1])
  return Recalled(cache.store_state.pools[row], pages, mask, positions), cache


def ordered_pages(state: OpBlockState) -> jax.Array:
  """i32[X]: where the ordered pages are in a layer's pool."""
  n, lists = state.blocks[0].owner.shape[0], _lists(state)
  x = jnp.arange(lists, dtype=jnp.int32)
  return n + x if state.settings.shared else (x + 1) * (n // lists) + x


def in_pool(state: OpBlockState, slots: jax.Array) -> jax.Array:
  """Slots b*C + i of OP blocks, as slots of a layer's pool, where ordered pages may lie between."""
  n, c = state.blocks[0].tokens.shape
  return slots if state.settings.shared else slots + slots // (n // _lists(state) * c) * c


def _lists(state: OpBlockState) -> int:
  """X, each of which has one ordered page."""
  return state.pools[0].num_pages - state.blocks[0].owner.shape[0]


def _settings(state: OpBlockState, heads: int) -> Settings:
  """With the blocks that a list may read, its even share of the pool, and the K lists of a row."""
  width = -(-state.blocks[0].owner.shape[0] // _lists(state))
  return state.settings._replace(width=width, heads=heads)


def _ticket(state: OpBlockState, step: Plan, selected, ordered) -> Ticket:
  _, within, there = ordered
  if state.settings.strict:
    there &= jnp.take_along_axis(selected, within, axis=1, mode="clip")
  if state.settings.shared:
    pages = jnp.concatenate([step.attended, ordered_pages(state)[:, None]], axis=1)
    positions = step.blocks.tokens.at[step.attended].get(mode="clip")
    mask = step.mask
  else:
    pages, shape = None, (selected.shape[0], -1, within.shape[1])
    mask, positions = step.visible.reshape(shape), step.blocks.tokens.reshape(shape)
  mask = jnp.concatenate([mask, there[:, None]], axis=1)
  return Ticket(pages, mask, jnp.concatenate([positions, within[:, None]], axis=1))
