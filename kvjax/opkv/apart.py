"""A pool of OP blocks for each list, instead of one that all lists of a layer share.

Algorithm 1, the fillings and the evictions are the same, run for every list on its own. What is
lost is that a row with little to remember leaves room to others. What is won is that the blocks of
a list lie together, so that attention reads them where they are and nothing is gathered.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.cache.counting import places
from kvjax.opkv.blocks import Blocks, no_blocks
from kvjax.opkv.eviction import Eviction
from kvjax.opkv.sub_block_manager import Plan, Settings, plan


def no_blocks_apart(
  num_blocks: int, page_size: int, eviction: Eviction, num_lists: int, capacity_tokens: int
) -> Blocks:
  """Free blocks, so many for each of X lists, list after list; an eviction order for each list."""
  start = jax.vmap(lambda _: eviction.start(num_blocks, capacity_tokens))
  blocks = no_blocks(num_lists * num_blocks, page_size, eviction, num_lists, capacity_tokens)
  return blocks._replace(order=start(jnp.arange(num_lists)))


def plan_apart(blocks: Blocks, selected: jax.Array, settings: Settings, newest: jax.Array) -> Plan:
  """`sub_block_manager.plan` for each list and its own blocks; arguments and result as there.

  Lists do not compete: if one selection does not fit its pool, nothing of that list is planned.
  """
  (lists, total), (n, c) = selected.shape, blocks.tokens.shape
  x, each = jnp.arange(lists, dtype=jnp.int32), n // lists
  alone = Blocks(
    blocks.tokens.reshape(lists, each, c),
    jnp.where(blocks.owner < 0, -1, 0).reshape(lists, each),
    blocks.order,
  )
  steps = jax.vmap(lambda b, s, first: plan(b, s[None], settings, first[None]))(
    alone, selected, newest
  )
  owner = jnp.where(steps.blocks.owner < 0, -1, x[:, None]).reshape(n)
  meant = jnp.arange(each * c)[None] < steps.count[:, None]
  order = places(meant.reshape(-1), n * c)
  source, target = (
    (ids + x[:, None] * size).reshape(-1).at[order].get(mode="clip")
    for ids, size in ((steps.source, total), (steps.target, each * c))
  )
  attended = steps.attended[:, 0]
  return Plan(
    Blocks(steps.blocks.tokens.reshape(n, c), owner, steps.blocks.order),
    *(source, target, steps.count.sum()),
    jnp.where(attended < each, attended + x[:, None] * each, n),
    *(steps.mask[:, 0], steps.visible.reshape(n, c), steps.too_small.any()),
    *(steps.hits[:, 0], steps.new[:, 0], steps.moved[:, 0], steps.evicted.sum()),
  )
