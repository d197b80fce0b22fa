"""Which blocks are given up first: jitted twins of `kvjax.eviction`, on arrays over n blocks.

A step of decode is one batch of events, in this order: all hits, all evictions, all insertions;
within each of them the block id decides. The plain Python twins give the same victims when they are
told the same events one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.counting import running, smallest
from kvjax.eviction.s3fifo import MOST_USES, small_size
from kvjax.types import State


class Eviction(NamedTuple):
  """An order over the n blocks of a pool: pure functions on its state.

  What a block holds is named by `keys` i32[n, C], numbers below num_keys (num_keys in an empty
  slot), for orders that remember what they gave up.

  Attributes:
    start: `start(num_blocks, num_keys) -> state` of a pool without blocks.
    touch: `touch(state, hit bool[n]) -> state`.
    evict: `evict(state, keys, held bool[n], allowed bool[n], count i32[]) -> victims bool[n],
      state`: gives up `count` blocks of those allowed, all of which are held; all of them if there
      are fewer.
    insert: `insert(state, keys, new bool[n]) -> state`; once a step, also where nothing is new.
  """

  start: Callable[[int, int], State]
  touch: Callable[[State, jax.Array], State]
  evict: Callable[..., tuple[jax.Array, State]]
  insert: Callable[[State, jax.Array, jax.Array], State]


class Stamped(NamedTuple):
  """State of FIFO and LRU.

  Attributes:
    stamp: i32[n], when a block was inserted or, for LRU, last used: twice the step, plus one for an
      insertion, which comes after the hits of its step.
    step: i32[], steps so far.
  """

  stamp: jax.Array
  step: jax.Array


def _unstamped(num_blocks: int, num_keys: int) -> Stamped:
  del num_keys
  return Stamped(jnp.zeros(num_blocks, jnp.int32), jnp.int32(0))


def _stamp_hits(state: Stamped, hit: jax.Array) -> Stamped:
  return state._replace(stamp=jnp.where(hit, 2 * state.step, state.stamp))


def _evict_oldest(state: Stamped, keys, held, allowed, count) -> tuple[jax.Array, Stamped]:
  del keys, held
  return smallest(state.stamp, allowed, count), state


def _stamp_new(state: Stamped, keys, new: jax.Array) -> Stamped:
  del keys
  return Stamped(jnp.where(new, 2 * state.step + 1, state.stamp), state.step + 1)


class Queues(NamedTuple):
  """State of S3-FIFO (`kvjax.eviction.s3fifo` has the algorithm).

  Attributes:
    line: i32[n], block ids in the order in which they joined their queue, the oldest first; blocks
      that are not held stand anywhere.
    main: bool[n], blocks of the main queue; the others are in the small one.
    uses: i32[n], uses of a block since it joined its queue, at most three.
    ghosts: i32[num_keys], number of the eviction from small with which a key went.
    evictions: i32[n], evictions from small so far, the same number for all blocks: a number of the
      pool alone would look as if all devices of a mesh shared it.
  """

  line: jax.Array
  main: jax.Array
  uses: jax.Array
  ghosts: jax.Array
  evictions: jax.Array


_NEVER = jnp.iinfo(jnp.int32).min


def _no_queues(num_blocks: int, num_keys: int) -> Queues:
  return Queues(
    jnp.arange(num_blocks, dtype=jnp.int32),
    jnp.zeros(num_blocks, bool),
    jnp.zeros(num_blocks, jnp.int32),
    jnp.full(num_keys, _NEVER, jnp.int32),
    jnp.zeros(num_blocks, jnp.int32),
  )


def _count_uses(state: Queues, hit: jax.Array) -> Queues:
  return state._replace(uses=jnp.minimum(state.uses + hit.astype(jnp.int32), MOST_USES))


def _evict_s3fifo(
  state: Queues, keys: jax.Array, held: jax.Array, allowed: jax.Array, count: jax.Array
) -> tuple[jax.Array, Queues]:
  """`count` calls of `S3Fifo.victim` at once.

  No use is counted between the evictions of a step, so that where they end can be computed: what
  is called bool[n] or i32[n] here is in the order of the line.
  """
  n, line = held.shape[0], state.line
  place = jnp.arange(n, dtype=jnp.int32)
  main, uses, held, allowed = state.main[line], state.uses[line], held[line], allowed[line]

  # 1. Heads of small, while it is full: what was used more than once moves to the end of main.
  heads = allowed & ~main
  surplus = (held & ~main).sum(dtype=jnp.int32) - small_size(n) + 1
  leave = heads & (running(heads) <= surplus)
  unused = leave & (uses <= 1)
  leave = leave & (running(unused) - unused.astype(jnp.int32) < count)  # up to the last victim
  from_small = unused & leave
  move = leave & ~unused
  left = count - from_small.sum(dtype=jnp.int32)

  # 2. Main goes round, 2n ticks a turn; a block comes up at tick `at` of each turn, and one with u
  # uses is given up in turn u. What just moved has none and stands at the end.
  at = place + n * move.astype(jnp.int32)
  circling = (allowed & main) | move
  tick = 2 * n * jnp.where(move, 0, uses) + at
  from_main = smallest(tick, circling, left, bits=(8 * n).bit_length())
  last = jnp.where(from_main, tick, -1).max()
  turns = jnp.where(circling, (last - at + 2 * n) // (2 * n), 0)  # that a block has survived

  # 3. Where main has nothing more to give, small again.
  left = left - from_main.sum(dtype=jnp.int32)
  rest = heads & ~leave
  rest = rest & (running(rest) <= left)

  forgotten = from_small | (rest & (uses <= 1))
  number = jnp.where(forgotten, state.evictions + running(forgotten) - 1, _NEVER)
  number = jnp.zeros(n, jnp.int32).at[line].set(number, unique_indices=True)  # by block id
  state = Queues(
    line[jnp.argsort(2 * n * turns + at)],
    state.main.at[line].set(main | move, unique_indices=True),
    state.uses.at[line].set(jnp.where(move, 0, uses - turns), unique_indices=True),
    state.ghosts.at[keys].max(jnp.broadcast_to(number[:, None], keys.shape), mode="drop"),
    state.evictions + forgotten.sum(dtype=jnp.int32),
  )
  victims = from_small | from_main | rest
  return jnp.zeros(n, bool).at[line].set(victims, unique_indices=True), state


def _join_queues(state: Queues, keys: jax.Array, new: jax.Array) -> Queues:
  """`S3Fifo.insert` of new blocks by id."""
  n, num_keys = new.shape[0], state.ghosts.shape[0]
  oldest_kept = (state.evictions - (n - small_size(n)))[:, None]
  ghost = state.ghosts.at[keys].get(mode="fill", fill_value=_NEVER) >= oldest_kept
  size = (keys < num_keys).sum(axis=-1, dtype=jnp.int32)
  remembered = 2 * ghost.sum(axis=-1, dtype=jnp.int32) >= size
  return Queues(
    _to_the_end(state.line, new),
    jnp.where(new, remembered, state.main),
    jnp.where(new, 0, state.uses),
    state.ghosts.at[jnp.where(new[:, None], keys, num_keys)].set(_NEVER, mode="drop"),
    state.evictions,
  )


def _to_the_end(line: jax.Array, new: jax.Array) -> jax.Array:
  """The line i32[n] with new blocks, bool[n] by id, behind all others and by id."""
  n = line.shape[0]
  ids = jnp.arange(n, dtype=jnp.int32)
  old = ~new[line]
  end = old.sum(dtype=jnp.int32)
  moved = line.at[jnp.where(old, running(old) - 1, n)].set(line, mode="drop", unique_indices=True)
  to = jnp.where(new, end + running(new) - 1, n)
  return moved.at[to].set(ids, mode="drop", unique_indices=True)


FIFO = Eviction(_unstamped, lambda state, hit: state, _evict_oldest, _stamp_new)
LRU = Eviction(_unstamped, _stamp_hits, _evict_oldest, _stamp_new)
S3FIFO = Eviction(_no_queues, _count_uses, _evict_s3fifo, _join_queues)
EVICTIONS = {"fifo": FIFO, "lru": LRU, "s3fifo": S3FIFO}
