"""A store of ours beside OPKV's: each list has its own slots on the device, one token in each.

A missing token takes the slot of one that is not selected now. So nothing is moved that is not
wanted, and nothing twice while it stays wanted: what moves is the least that any cache of this size
can move, but for the choice of what to give up. There are no blocks to find, no threshold and no
order; a plan is a few passes over bits. And since the slots of a list lie together, attention reads
them where they are, without gathering pages. What OPKV has and this has not: requests that share a
pool, and copies of more than one token at a time.

Layers that select the same tokens share one plan.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.cache.counting import before, places
from kvjax.cache.kv_cache import TOO_SMALL, KVCache
from kvjax.cache.paged import Pools
from kvjax.config import CacheConfig
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
from kvjax.stores import resident
from kvjax.stores.traffic import Traffic, add, no_traffic
from kvjax.stores.whole_page import WHOLE_PAGE
from kvjax.types import LayerPlan, Policy, Recalled, Selection, Store


class Slots(NamedTuple):
  """Which tokens the slots of a layer hold.

  Attributes:
    tokens: i32[X, W], the position of each; -1 for none.
    hand: i32[X], the slot after the one that was filled last. What is given up is looked for from
      there on, so that it has not been filled for longest.
  """

  tokens: jax.Array
  hand: jax.Array


class Fill(NamedTuple):
  """One step of the slots of a layer; W slots a list, a multiple of C.

  Attributes:
    slots: after the step.
    source: i32[R], x*T + t of each token to copy; R = X*W, of which the first `count` are meant.
    target: i32[R], x*W + slot, where it goes.
    count: i32[], tokens to copy.
    moved: i32[X], by list.
    too_small: bool[X], lists that select over W tokens; nothing of theirs is copied or changed.
  """

  slots: Slots
  source: jax.Array
  target: jax.Array
  count: jax.Array
  moved: jax.Array
  too_small: jax.Array


class SlotState(flax.struct.PyTreeNode):
  """What the store keeps on the device.

  Attributes:
    slots: of each group of layers that select the same.
    pools: f[X * (W/C + 1), C, D] of each selecting layer: for each list its slots, then its ordered
      page.
    traffic: what was moved.
    fill: within a step, of the layers that are being served; None between steps.
    group: of each selecting layer.
    strict: only what is selected is visible.
  """

  slots: tuple[Slots, ...]
  pools: tuple[Pools, ...]
  traffic: Traffic
  fill: Fill | None
  group: tuple[int, ...] = flax.struct.field(pytree_node=False)
  strict: bool = flax.struct.field(pytree_node=False)


def token_slots(*, strict: bool = False, slack: float = 1.0) -> Store:
  """The store.

  Args:
    strict: nothing is visible but what the policy selected; else all that the slots hold.
    slack: slots over the policy's budget, at least 1: what was selected lately stays.

  Raises:
    ValueError: slack below 1.
  """
  if slack < 1:
    raise ValueError(f"slack {slack} must be at least 1: a selection must fit the slots")
  return WHOLE_PAGE._replace(
    name="token_slots",
    append=append,
    fetch=fetch,
    recall=recall,
    release=resident.release,
    seal=partial(seal, strict=strict, slack=slack),
    insert=None,
  )


def fill(slots: Slots, selected: jax.Array) -> Fill:
  """Gives each selected token a slot.

  Args:
    slots: what they hold.
    selected: bool[X, T], at most W of each list.
  """
  tokens, hand = slots
  (lists, width), total = tokens.shape, selected.shape[1]
  too_small = selected.sum(axis=1) > width
  selected = selected & ~too_small[:, None]
  size, x = lists * width, jnp.arange(lists)[:, None]
  place = jnp.where(tokens < 0, total, tokens)
  kept = selected.at[x, place].get(mode="fill", fill_value=False)  # bool[X, W]
  here = jnp.zeros_like(selected).at[x, jnp.where(kept, place, total)].set(True, mode="drop")
  missing = selected & ~here
  moved, openings = (m.sum(axis=1, dtype=jnp.int32) for m in (missing, ~kept))
  source, opened = places(missing.reshape(-1), size), places(~kept.reshape(-1), size)
  # The r-th missing token of a list takes the r-th slot, from the hand on and round to it, that
  # holds nothing selected.
  passed = (~kept & (jnp.arange(width)[None] < hand[:, None])).sum(axis=1, dtype=jnp.int32)
  rank = jnp.arange(size, dtype=jnp.int32)
  starts, begins, passed_, openings_ = (
    of_list.at[source // total].get(mode="clip")
    for of_list in (before(moved), before(openings), passed, openings)
  )
  turn = (passed_ + rank - starts) % jnp.maximum(openings_, 1)
  count = moved.sum()
  target = jnp.where(rank < count, opened.at[begins + turn].get(mode="clip"), size)
  after = tokens.reshape(-1).at[target].set(source % total, mode="drop").reshape(tokens.shape)
  last = opened.at[before(openings) + (passed + moved - 1) % jnp.maximum(openings, 1)]
  hand = jnp.where(moved > 0, (last.get(mode="clip") + 1) % width, hand)
  return Fill(Slots(after, hand), source, target, count, moved, too_small)


def seal(
  cache: KVCache,
  policy: Policy,
  cache_config: CacheConfig,
  layer_plan: LayerPlan,
  *,
  strict: bool,
  slack: float,
) -> KVCache:
  """The cache with its pages on the host only; empty slots, and the newest page of each list."""
  cache = resident.seal(cache, policy, cache_config, layer_plan)
  rows, b, heads, p = cache.table.shape
  _, c, d = cache.pools.keys.shape
  width = int(slack * min(policy.budget_tokens or p * c, p * c) + c - 1) // c * c
  group, lists = groups(layer_plan, rows), b * heads

  def beside(newest):
    slots = jnp.zeros((lists, width // c, c, d), newest.dtype)
    return jnp.concatenate([slots, newest[:, None]], axis=1).reshape(-1, c, d)

  pools = tuple(Pools(*map(beside, newest_pages(cache, row))) for row in range(rows))
  empty = Slots(jnp.full((lists, width), -1, jnp.int32), jnp.zeros(lists, jnp.int32))
  slots = tuple(jax.tree.map(jnp.copy, empty) for _ in {*group})
  state = SlotState(slots, pools, no_traffic(b, heads), None, group, strict)
  return cache.replace(pools=None, store_state=state)


def append(cache: KVCache, row: int, k, v, positions, slots) -> KVCache:
  """Writes one token a row to the host and to the ordered page of each list."""
  state = cache.store_state
  pages = _pages(state, cache)[..., -1]
  pools, cache = append_newest(cache, row, state.pools[row], pages, k, v, positions, slots)
  return cache.replace(store_state=state.replace(pools=replaced(state.pools, row, pools)))


def fetch(
  cache: KVCache, row: int, selection: Selection, lengths: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], KVCache]:
  """Copies what is missing; the ticket is mask and positions of a list's slots and ordered page,
  bool and i32[X, W + C]."""
  state, group = cache.store_state, cache.store_state.group[row]
  b, heads = cache.table.shape[1:3]
  first, within, there = ordered_page(cache, lengths)
  selected = selected_tokens(cache, selection, lengths)
  wanted = selected & (jnp.arange(selected.shape[1])[None] < first[:, None])
  step = state.fill or fill(state.slots[group], wanted)
  tokens, c = step.slots.tokens, cache.host.page_size
  width = tokens.shape[1]
  # A list's slots are followed by its ordered page, so that they lie C apart from the next one's.
  target = step.target + step.target // width * c
  pools, cache = copy_tokens(cache, row, state.pools[row], step.source, target, step.count)
  lacking = jnp.where(step.too_small.reshape(b, heads).any(axis=1), TOO_SMALL, 0)
  cache = cache.replace(overflow=cache.overflow | lacking.astype(jnp.uint32))
  counts = wanted.sum(axis=1, dtype=jnp.int32)
  counted = {"selected": selected.sum(axis=1), "moved": step.moved, "resident": counts - step.moved}
  traffic = add(state.traffic, **{name: x.reshape(b, heads) for name, x in counted.items()})
  state = state.replace(
    slots=replaced(state.slots, group, step.slots),
    pools=replaced(state.pools, row, pools),
    traffic=traffic,
    fill=None if is_last(state.group, row) else step,
  )
  positions = jnp.concatenate([tokens, within], axis=1)
  mask = jnp.concatenate([tokens >= 0, there], axis=1)
  if state.strict:
    mask &= jnp.take_along_axis(selected, positions.clip(0), axis=1, mode="clip")
  return (mask, positions), cache.replace(store_state=state)


def recall(
  cache: KVCache, row: int, ticket: tuple[jax.Array, jax.Array], lengths: jax.Array
) -> tuple[Recalled, KVCache]:
  """All slots of each list and its ordered page."""
  del lengths
  state, (b, heads), c = cache.store_state, cache.table.shape[1:3], cache.host.page_size
  mask, positions = (x.reshape(b, heads, -1, c) for x in ticket)
  return Recalled(state.pools[row], None, mask, positions), cache


def _pages(state: SlotState, cache: KVCache) -> jax.Array:
  """i32[B, K, W/C + 1]: pages of a pool, list by list."""
  b, heads = cache.table.shape[1:3]
  num_pages = state.pools[0].num_pages
  return jnp.arange(num_pages, dtype=jnp.int32).reshape(b, heads, -1)
