"""OPKV's partition of the host for OP blocks that the device gave up, of one layer.

A block that the eviction takes from a list is *demoted*: written whole to one of m places in host
memory. A later step whose missing tokens reach theta in it brings it back whole, by Algorithm 1 on
the partition's own metadata, as one of its list's new blocks. All tokens are in the host's ordered
pages as well, so that a block that is dropped here is lost to nobody.

The metadata are those of a pool, `Blocks`, with `Stamped` for their order: a block here cannot be
hit without leaving, so that the step in which it came is when it was hit last, as far as is known.
The partition gives up what the paper's max-heap on the count of OP blocks would: again and again
the block hit longest ago of the row (a request, with all its lists) that holds most, of equal rows
the first. What comes in a step counts for its row, and goes at once if it is the one to go.

A step is one batch of events. Blocks that come back leave their places behind, which others get in
later steps only; those that are demoted go where nothing was before the step, or to places of what
the partition gives up. So all copies to the host can come before all copies from it, and none reads
what another wrote.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import host
from kvjax.cache.counting import before, places, smallest
from kvjax.cache.paged import Pools
from kvjax.opkv.blocks import Blocks, per_list, release
from kvjax.opkv.eviction import Stamped
from kvjax.opkv.filling import AGGREGATE
from kvjax.opkv.recalling import replaced
from kvjax.opkv.retrieval import retrieve
from pallas_kernels.recall_pages import offload_pages, recall_pages


class Partition(NamedTuple):
  """What a store keeps of its partitions, as part of its state.

  Attributes:
    blocks: metadata, one for layers that share it.
    pools: f[m, C, D] of each selecting layer, in pinned host memory.
    demoted: u32[B, K], tokens written to it, summed over layers and steps.
    back: u32[B, K], tokens of blocks that came back.
  """

  blocks: tuple[Blocks, ...]
  pools: tuple[Pools, ...]
  demoted: jax.Array
  back: jax.Array


class Returning(NamedTuple):
  """What comes back in a step.

  Attributes:
    hit: bool[m], blocks of the partition.
    seen: bool[m, C], their slots with a missing token that no block before theirs has.
    missing: bool[X, T], tokens that none of them has.
    blocks: i32[X], how many of each list.
  """

  hit: jax.Array
  seen: jax.Array
  missing: jax.Array
  blocks: jax.Array


class Whole(NamedTuple):
  """Where that goes on the device.

  Attributes:
    block: bool[n], blocks of the device that are taken for it.
    tokens: i32[n, C], what they hold then; -1 in the others.
    seen: bool[n, C], `Returning.seen` of them.
    up: (i32[R] places of the partition, i32[R] blocks of the device, i32[] how many pairs count);
      R is the lesser of n and m.
  """

  block: jax.Array
  tokens: jax.Array
  seen: jax.Array
  up: tuple[jax.Array, jax.Array, jax.Array]


class Exchange(NamedTuple):
  """What a step moves between the pool of a layer and its partition.

  Attributes:
    blocks: metadata of the partition after the step.
    down: (i32[n] blocks of the device, i32[n] places of the partition, i32[] how many pairs count),
      what is demoted.
    up: `Whole.up`, what comes back, after that.
    covered: i32[X], missing tokens that came with a block.
    back: i32[X], all tokens of the blocks that came.
    demoted: i32[X], tokens of those that went.
  """

  blocks: Blocks
  down: tuple[jax.Array, jax.Array, jax.Array]
  up: tuple[jax.Array, jax.Array, jax.Array]
  covered: jax.Array
  back: jax.Array
  demoted: jax.Array


def check_host_blocks(host_blocks: float, filling: str, reuse: bool, exclusive: bool) -> None:
  """Raises ValueError for a size that is none, or where no block could be demoted."""
  if not 0 <= host_blocks < math.inf:
    raise ValueError(
      f"host_blocks {host_blocks} must be at least 0; it is over the OP blocks of the device"
    )
  if host_blocks and filling != AGGREGATE:
    raise ValueError(
      f"host_blocks {host_blocks} needs filling {AGGREGATE!r}: with {filling!r} a token's slot "
      "depends on what else is in the pool, so that no block comes back as it went"
    )
  if host_blocks and exclusive:
    raise ValueError(
      f"host_blocks {host_blocks} excludes exclusive: a block that comes back holds tokens that "
      "other blocks may have by then"
    )
  if host_blocks and not reuse:
    raise ValueError(
      f"host_blocks {host_blocks} needs reuse: without it blocks are forgotten, not given up"
    )


def num_places(host_blocks: float, num_blocks: int, lists: int) -> int:
  """m: so many pools of the device's n blocks, rounded up to the same number for each list, so that
  the partitions of several devices are parts of one."""
  return lists * math.ceil(host_blocks * num_blocks / lists)


def none_held(m: int, page_size: int) -> Blocks:
  """Metadata of a partition of m places that holds nothing yet."""
  stamped = Stamped(jnp.zeros(m, jnp.int32), jnp.int32(0))
  return Blocks(jnp.full((m, page_size), -1, jnp.int32), jnp.full(m, -1, jnp.int32), stamped)


def no_partition(
  m: int, shape: tuple[int, int], dtype: str, layers: tuple[int, ...], batch: int, heads: int
) -> Partition:
  """Partitions without a block, one for each layer. For use inside jit, as `host.empty` is.

  Args:
    m: places of a layer.
    shape: C and D.
    dtype: of keys and values.
    layers: of each selecting layer, which metadata it has.
    batch: B.
    heads: K.
  """
  pools = tuple(host.empty((m, *shape), dtype) for _ in layers)
  counts = (jnp.zeros((batch, heads), jnp.uint32) for _ in range(2))
  return Partition(tuple(none_held(m, shape[0]) for _ in {*layers}), pools, *counts)


def free(partition: Partition, ended: jax.Array) -> Partition:
  """Without the blocks of lists that ended, bool[X]."""
  return partition._replace(blocks=tuple(release(blocks, ended) for blocks in partition.blocks))


def returning(
  held: Blocks, missing: jax.Array, hits: jax.Array, *, num_blocks: int, theta: int, width, recheck
) -> Returning:
  """Algorithm 1 once more: of a selection what the device has not, on what the partition has.

  Args:
    held: metadata of the partition.
    missing: bool[X, T], selected tokens that no hit has.
    hits: i32[X], hits of each list.
    num_blocks: n, blocks of the device, which have to do for hits, returning and new ones.
    theta: least missing tokens of a block that comes back.
    width: most blocks that a list may read.
    recheck: a token counts towards one block only.
  """
  left = {"width": width - hits[:, None], "room": num_blocks - hits.sum()}
  found = retrieve(held, missing, theta=theta, recheck=recheck, **left)
  blocks = per_list(found.hit, held.owner, hits.shape[0])
  return Returning(found.hit, found.first & found.wanted, found.missing, blocks)


def placed(came: Returning, held: Blocks, taken: jax.Array, fresh: jax.Array) -> Whole:
  """Gives what comes back the first of each list's new blocks.

  Args:
    came: what comes back.
    held: metadata of the partition.
    taken: bool[n], blocks of the device that the step takes.
    fresh: i32[X], how many of them are each list's; those of the first list come first.
  """
  m, n, lists = came.hit.shape[0], taken.shape[0], fresh.shape[0]
  ids = jnp.arange(m, dtype=jnp.int32)
  source = jnp.sort(jnp.where(came.hit, held.owner, lists) * m + ids)[:n]  # by list, then by id
  x, source = source // m, source % m
  rank, count = jnp.arange(source.shape[0], dtype=jnp.int32), came.blocks.sum()
  place = rank + (before(fresh) - before(came.blocks)).at[x].get(mode="clip")
  target = places(taken, n).at[place].get(mode="clip")
  target = jnp.where(rank < count, target, n)
  origin = jnp.full(n, m, jnp.int32).at[target].set(source, mode="drop")
  return Whole(
    origin < m,
    held.tokens.at[origin].get(mode="fill", fill_value=-1),
    came.seen.at[origin].get(mode="fill", fill_value=False),
    (source, target, count),
  )


def exchange(
  held: Blocks,
  blocks: Blocks,
  taken: jax.Array,
  came: Returning,
  whole: Whole,
  heads: int,
) -> Exchange:
  """Demotes what was taken from a list.

  Args:
    held: metadata of the partition before the step.
    blocks: metadata of the device before the step.
    taken: bool[n], blocks of the device that the step takes, free ones and others.
    came: what comes back.
    whole: where that goes.
    heads: K, lists of a row.
  """
  (m, n), lists = (held.owner.shape[0], taken.shape[0]), came.blocks.shape[0]
  order: Stamped = held.order
  gone = taken & (blocks.owner >= 0)
  stays = (held.owner >= 0) & ~came.hit
  kept = ~_given_up(held, blocks.owner, stays, gone, m - came.hit.sum(dtype=jnp.int32), heads)
  kept, goes = stays & kept[:m], gone & kept[m:]
  source, count = places(goes, n), goes.sum(dtype=jnp.int32)
  target = places(~kept & ~came.hit, n)
  target = jnp.where(jnp.arange(n) < count, target, m)

  def with_new(values, old, empty):  # what each place has of its block
    old = jnp.where(kept.reshape(-1, *(1,) * (old.ndim - 1)), old, empty)
    return old.at[target].set(values.at[source].get(mode="clip"), mode="drop")

  return Exchange(
    Blocks(
      with_new(blocks.tokens, held.tokens, -1),
      with_new(blocks.owner, held.owner, -1),
      Stamped(with_new(jnp.full(n, order.step), order.stamp, 0), order.step + 1),
    ),
    (source, target, count),
    whole.up,
    per_list(came.seen.sum(axis=1), held.owner, lists),
    per_list(((held.tokens >= 0) & came.hit[:, None]).sum(axis=1), held.owner, lists),
    per_list(((blocks.tokens >= 0) & goes[:, None]).sum(axis=1), blocks.owner, lists),
  )


def _given_up(
  held: Blocks, owner: jax.Array, stays: jax.Array, gone: jax.Array, room: jax.Array, heads: int
) -> jax.Array:
  """bool[m + n]: what of the blocks that stay and of those that come there is no room for.

  A heap of rows would give up, again and again, the oldest block of the row with most. Counted from
  a row's youngest block, 0, that is always the block of the highest count, of equal ones that of
  the first row: all can be named at once. Blocks of the same step are in the order of their ids.
  """
  order: Stamped = held.order
  size, some = stays.shape[0] + gone.shape[0], jnp.concatenate([stays, gone])
  nobody = jnp.iinfo(jnp.int32).max
  row = jnp.where(some, jnp.concatenate([held.owner, owner]) // heads, nobody)
  stamp = jnp.concatenate([order.stamp, jnp.full(gone.shape[0], order.step)])
  ids = jnp.arange(size, dtype=jnp.int32)
  of_row, _, youngest_first = jax.lax.sort((row, -stamp, -ids), num_keys=3)
  starts = jnp.concatenate([jnp.ones(1, bool), of_row[1:] != of_row[:-1]])
  rank = ids - jax.lax.cummax(jnp.where(starts, ids, 0))
  rank = jnp.zeros(size, jnp.int32).at[-youngest_first].set(rank, unique_indices=True)
  return _highest(rank, row, some, jnp.maximum(some.sum(dtype=jnp.int32) - room, 0))


def _highest(rank: jax.Array, row: jax.Array, some: jax.Array, count: jax.Array) -> jax.Array:
  """bool[N]: the count of some that are of the highest rank, of the last of them the first rows."""
  size = rank.shape[0]
  by_rank = smallest(size - 1 - rank, some, count, bits=size.bit_length())
  last = jnp.where(by_rank, rank, size).min()
  above = some & (rank > last)
  return above | smallest(row, some & (rank == last), count - above.sum(dtype=jnp.int32))


def moved(
  pools: Pools, on_host: Pools, step: Exchange, down: jax.Array, up: jax.Array
) -> tuple[Pools, Pools]:
  """The pools of a layer and of its partition with what the step moves between them.

  Args:
    pools: f[N, C, D] of the device.
    on_host: f[m, C, D].
    step: what moves.
    down: i32[n], where `step.down` begins, as pages of the pools.
    up: i32[R], where `step.up` ends, as pages of the pools.
  """
  _, places_down, count_down = step.down
  places_up, _, count_up = step.up
  written = offload_pages(tuple(pools), tuple(on_host), down, places_down, count_down)
  # What comes back reads what was written, so that XLA sees that the pools were read by then.
  read = recall_pages(written, tuple(pools), places_up, up, count_up)
  read, written = jax.lax.optimization_barrier((read, written))
  return Pools(*read), Pools(*written)


def after(partition: Partition, row: int, group: int, on_host: Pools, step: Exchange) -> Partition:
  """The partitions after a step of a layer, whose pools are on_host."""
  shape = partition.back.shape
  return Partition(
    replaced(partition.blocks, group, step.blocks),
    replaced(partition.pools, row, on_host),
    partition.demoted + step.demoted.reshape(shape).astype(jnp.uint32),
    partition.back + step.back.reshape(shape).astype(jnp.uint32),
  )
