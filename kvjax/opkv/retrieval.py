"""OPKV's Algorithm 1: which OP blocks serve a selection, and which of its tokens are missing.

A block b with tokens T_b is a hit for the selection S of its list where |S and T_b| >= theta,
theta = ceil(rho*C). The paper leaves open in which order blocks are looked at, and whether a token
counts for two of them. Ours: by |S and T_b|, largest first, then by id; and

* `recheck=False`, the literal rule: every block that reaches theta is a hit.
* `recheck=True`, greedy set cover: a block is a hit if those of its tokens that no hit before it
  has reach theta.

The paper does not say either what happens where hits and new blocks are more than the pool holds.
Ours: theta is raised to the least that fits. At C + 1 nothing is a hit, and ceil(|S|/C) new blocks
hold any selection.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.counting import before
from kvjax.opkv.blocks import Blocks, flat_tokens, of_owner
from kvjax.opkv.filling import AGGREGATE, BY_PAGE, new_blocks


class Retrieval(NamedTuple):
  """What the pool has of a selection.

  Attributes:
    hit: bool[n], blocks that serve it.
    wanted: bool[n, C], slots that hold a selected token of their list, in any block.
    first: bool[n, C], slots of hits whose token no hit before theirs has.
    missing: bool[X, T], selected tokens that no hit has.
  """

  hit: jax.Array
  wanted: jax.Array
  first: jax.Array
  missing: jax.Array


class _Order(NamedTuple):
  """All blocks in the order of Algorithm 1.

  Attributes:
    keys: i32[n, C], x*T + t of each slot.
    wanted: bool[n, C].
    rank: i32[n], higher is earlier: n times the level of a block plus less than n for its id.
  """

  keys: jax.Array
  wanted: jax.Array
  rank: jax.Array


def least_tokens(rho: float, page_size: int) -> int:
  """theta: tokens of a block that must be selected for it to be a hit.

  >>> least_tokens(0.6, 16)
  10
  """
  return math.ceil(rho * page_size - 1e-9)  # 0.3 * 10 is a little more than 3


def retrieve(
  blocks: Blocks,
  selected: jax.Array,
  *,
  theta: int,
  width: int | jax.Array,
  recheck: bool = True,
  filling: str = AGGREGATE,
  exclusive: bool = False,
  room: int | jax.Array | None = None,
) -> Retrieval:
  """Algorithm 1 for all lists at once.

  Args:
    blocks: the pool.
    selected: bool[X, T], S of each list; ceil(|S|/C) blocks of each must fit the width, and all
      together the pool (with BY_PAGE: as many blocks as there are pages with a selected token).
    theta: least selected tokens of a hit, 1 to C.
    width: most blocks that may serve a list; i32[X, 1] where lists differ.
    recheck: greedy set cover; False for the literal rule.
    filling: one of FILLINGS, by which new blocks are counted.
    exclusive: the caller sees to it that no token is in two blocks of a list; then both rules find
      the same, and no cover is looked for.
    room: i32[], most blocks that may serve all lists, if it is not the pool's number.
  """
  n, c = blocks.tokens.shape
  keys = flat_tokens(blocks, *selected.shape)
  wanted = selected.reshape(-1).at[keys].get(mode="fill", fill_value=False)
  level = _level(blocks, wanted, filling)
  room = n if room is None else room
  if exclusive:
    fit = theta, width, room
    return _of_exclusive(blocks, selected, keys, wanted, level, fit, filling)
  order = _Order(keys, wanted, level * n + (n - 1 - jnp.arange(n, dtype=jnp.int32)))
  held = blocks.owner >= 0
  claims, first = _claims(order, held, selected.size)
  need = _blocks_needed(blocks, selected, level, wanted & first, claims // n, filling)
  least = _least_that_fits(need, theta, width, room)  # i32[X]
  least_of_block = of_owner(least, blocks.owner, c + 1)
  hit = held & (level >= least_of_block)
  if recheck:
    gain = _level(blocks, wanted & first, filling)
    contested = hit & (gain < least_of_block)

    def cover(_):
      taken = _set_cover(blocks, order, hit, contested, least_of_block, selected.size, filling)
      return taken, *_claims(order, taken, selected.size)

    found = (hit, claims, first)
    hit, claims, first = jax.lax.cond(contested.any(), cover, lambda found: found, found)
  has = claims.reshape(selected.shape) >= least[:, None] * n
  return Retrieval(hit, wanted, first & hit[:, None], selected & ~has)


def _of_exclusive(blocks, selected, keys, wanted, level, fit, filling: str) -> Retrieval:
  """`retrieve` where each token has one holder: nothing is contested, and nobody comes first."""
  c = blocks.tokens.shape[1]
  claimed = jnp.full(selected.size, -1, jnp.int32)
  claimed = claimed.at[keys].set(jnp.broadcast_to(level[:, None], keys.shape), mode="drop")
  need = _blocks_needed(blocks, selected, level, wanted, claimed, filling)
  least = _least_that_fits(need, *fit)
  hit = (blocks.owner >= 0) & (level >= of_owner(least, blocks.owner, c + 1))
  served = jnp.where(wanted & hit[:, None], keys, selected.size)
  has = jnp.zeros(selected.size, bool).at[served].set(True, mode="drop").reshape(selected.shape)
  return Retrieval(hit, wanted, (blocks.tokens >= 0) & hit[:, None], selected & ~has)


def _level(blocks: Blocks, wanted: jax.Array, filling: str) -> jax.Array:
  """i32[n], what is compared with theta: tokens among wanted bool[n, C].

  The blocks of the ablation are seldom full and would hardly ever reach theta. There the level is
  the share of a block's tokens that are selected, in C-ths [ours].
  """
  count = wanted.sum(axis=-1, dtype=jnp.int32)
  if filling != BY_PAGE:
    return count
  size = (blocks.tokens >= 0).sum(axis=-1, dtype=jnp.int32)
  return count * blocks.tokens.shape[1] // jnp.maximum(size, 1)


def _claims(order: _Order, among: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
  """Who has each token first, among some blocks bool[n].

  Returns:
    i32[X*T], rank of the first block that has a token, -1 if none; and bool[n, C], slots of blocks
    that are the first to have their token.
  """
  rank = jnp.where(among, order.rank, -1)[:, None]
  nobody = jnp.full(num_tokens, -1, jnp.int32)
  claims = nobody.at[order.keys].max(jnp.broadcast_to(rank, order.keys.shape), mode="drop")
  return claims, _at(claims, order.keys) == order.rank[:, None]


def _at(claims: jax.Array, keys: jax.Array) -> jax.Array:
  return claims.at[keys].get(mode="fill", fill_value=-1)


def _blocks_needed(blocks, selected, level, first, claimed, filling) -> jax.Array:
  """i32[X, C + 2]: hits and new blocks of each list for every theta from 0 to C + 1.

  The first holder of a token in the order of Algorithm 1 has the highest level of its holders. So
  which tokens are covered at any theta can be read off the first holders' levels.

  Args:
    blocks: the pool.
    selected: bool[X, T].
    level: i32[n].
    first: bool[n, C], slots that are the first to have a selected token.
    claimed: i32[X*T], level of the first holder of each token, -1 without one.
    filling: one of FILLINGS.
  """
  lists, c = selected.shape[0], blocks.tokens.shape[1]
  x = jnp.where(blocks.owner < 0, lists, blocks.owner)
  table = jnp.zeros((lists, c + 2), jnp.int32)
  hits = _from_above(table.at[x, level].add(1, mode="drop"))
  fresh = first.sum(axis=-1, dtype=jnp.int32)
  covered = _from_above(table.at[x, level].add(fresh, mode="drop"))
  wanted = selected.sum(axis=-1, dtype=jnp.int32)[:, None]
  pages = None
  if filling == BY_PAGE:
    worst = jnp.where(selected, claimed.reshape(selected.shape).clip(0), c + 1)
    worst = worst.reshape(lists, -1, c).min(axis=-1)  # i32[X, P], level at which the page is whole
    of_list = jnp.broadcast_to(jnp.arange(lists)[:, None], worst.shape)
    counts = table.at[of_list, worst].add(1)
    pages = before(counts)
  return hits + new_blocks(filling, c, hits, wanted, wanted - covered, pages)


def _from_above(counts: jax.Array) -> jax.Array:
  """Sums of counts i32[X, C + 2] at or above each level."""
  return counts.sum(axis=-1, keepdims=True, dtype=counts.dtype) - before(counts)


def _least_that_fits(need: jax.Array, theta: int, width, num_blocks) -> jax.Array:
  """i32[X]: theta, raised for a list that would exceed its width, and then for all lists together
  until the pool is enough."""
  levels = jnp.arange(need.shape[1])
  own = jnp.argmax((need <= width) & (levels >= theta)[None], axis=-1).astype(jnp.int32)
  if isinstance(width, int) and need.shape[0] * width <= num_blocks:
    return own
  need_then = jnp.take_along_axis(need, jnp.maximum(own[:, None], levels[None]), axis=1)
  common = jnp.argmax((need_then.sum(axis=0) <= num_blocks) & (levels >= theta))
  return jnp.maximum(own, common.astype(jnp.int32))


def _set_cover(
  blocks, order: _Order, hit, contested, least_of_block, num_tokens: int, filling: str
) -> jax.Array:
  """bool[n]: those of hit that the greedy rule accepts, where some are contested.

  The rule is sequential; this takes many steps of it at once. A block is rejected if it does not
  reach theta even without the tokens of earlier blocks that are accepted, and accepted if it does
  without those of all earlier blocks that are not rejected. The earliest open block of each list is
  always one of the two, so that every round gets on; one or two are usually enough.
  """

  def settle(state):
    accepted, open_ = state
    taken, _ = _claims(order, accepted, num_tokens)
    left = _at(taken, order.keys) < order.rank[:, None]
    open_ = open_ & (_level(blocks, order.wanted & left, filling) >= least_of_block)
    _, unclaimed = _claims(order, accepted | open_, num_tokens)
    accept = open_ & (_level(blocks, order.wanted & unclaimed, filling) >= least_of_block)
    return accepted | accept, open_ & ~accept

  start = (hit & ~contested, contested)
  accepted, _ = jax.lax.while_loop(lambda state: state[1].any(), settle, start)
  return accepted
