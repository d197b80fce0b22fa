"""A pool of OP blocks for each list, instead of one that all lists of a layer share.

Algorithm 1, the fillings and the evictions are the same. What is lost is that a row with little to
remember leaves room to others. What is won is that the blocks of a list lie together, so that
attention reads them where they are and nothing is gathered.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.cache.counting import running
from kvjax.opkv.blocks import Blocks, no_blocks
from kvjax.opkv.eviction import Eviction
from kvjax.types import State


def no_blocks_apart(
  num_blocks: int, page_size: int, eviction: Eviction, num_lists: int, capacity_tokens: int
) -> Blocks:
  """Free blocks, so many for each of X lists, list after list; an eviction order for each list."""
  start = jax.vmap(lambda _: eviction.start(num_blocks, capacity_tokens))
  blocks = no_blocks(num_lists * num_blocks, page_size, eviction, num_lists, capacity_tokens)
  return blocks._replace(order=start(jnp.arange(num_lists)))


def take_apart(
  blocks: Blocks, hit: jax.Array, new: jax.Array, capacity_tokens: int, eviction: Eviction
) -> tuple[jax.Array, jax.Array, State]:
  """Blocks for new ones, bool[n], each from the pool of its list: free ones first, then what the
  list's eviction gives up. Fairness has no say here.

  Args:
    blocks: the pools.
    hit: bool[n].
    new: i32[X], new blocks of each list.
    capacity_tokens: T.
    eviction: the order.

  Returns:
    The blocks; i32[], how many were given up; and the states of the eviction.
  """

  def take(state, tokens, free, hit, new):
    state = eviction.touch(state, hit)
    given_up = jnp.maximum(new - free.sum(dtype=jnp.int32), 0)
    keys = jnp.where(tokens < 0, capacity_tokens, tokens)
    victims, state = eviction.evict(state, keys, ~free, ~free & ~hit, given_up)
    return victims | (free & (running(free) <= new)), given_up, state

  tokens, free, hit = (by_list(x, new.shape[0]) for x in (blocks.tokens, blocks.owner < 0, hit))
  taken, given_up, order = jax.vmap(take)(blocks.order, tokens, free, hit, new)
  return taken.reshape(-1), given_up.sum(), order


def insert_apart(
  order: State,
  tokens: jax.Array,
  new: jax.Array,
  num_lists: int,
  capacity_tokens: int,
  eviction: Eviction,
) -> State:
  """The eviction orders of X lists with new blocks bool[n], which hold tokens i32[n, C]."""
  keys = jnp.where(tokens < 0, capacity_tokens, tokens)
  return jax.vmap(eviction.insert)(order, by_list(keys, num_lists), by_list(new, num_lists))


def owner_apart(owner: jax.Array, taken: jax.Array, num_lists: int) -> jax.Array:
  """i32[n]: owners after a step; a block that is taken belongs to the list whose pool has it."""
  n = owner.shape[0]
  return jnp.where(taken, jnp.arange(n, dtype=jnp.int32) // (n // num_lists), owner)


def by_list(values: jax.Array, num_lists: int) -> jax.Array:
  """[X, n/X, ...] of what the blocks have."""
  return values.reshape(num_lists, -1, *values.shape[1:])
