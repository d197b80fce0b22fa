"""OPKV's Sub Block Manager as one pure function: what a step of one layer copies, drops and reads.

The paper's manager is a Python object of each worker, whose loop over requests ends at a batch of
10. Here all lists of a layer are planned at once, inside jit. Its three calls are, in our words:

* `transfer`: the prompt's pages go to the host; the pool starts with `no_blocks`.
* `realloc`: `plan` takes free blocks first, then those that the eviction gives up.
* `free`: `release`, when a row ends.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.counting import before, places, running
from kvjax.opkv.apart import insert_apart, owner_apart, take_apart
from kvjax.opkv.blocks import Blocks, flat_tokens, owned_by, per_list, release
from kvjax.opkv.demoted import Exchange, Returning, exchange, placed, returning
from kvjax.opkv.eviction import EVICTIONS, Eviction
from kvjax.opkv.filling import (
  AGGREGATE,
  BY_PAGE,
  FILLINGS,
  REFILL,
  in_block_of_page,
  in_new_blocks,
  in_open_slots,
  new_blocks,
)
from kvjax.opkv.retrieval import Retrieval, least_tokens, retrieve
from kvjax.types import State


class Settings(NamedTuple):
  """Static choices of a pool; `checked` says which are legal.

  Attributes:
    width: M, most blocks that a list may read, at least ceil(|S|/C) for every selection S. The
      default hit rule is never cut short by ceil(|S|/theta) + 1.
    heads: K, lists of a row.
    rho: share of a block's C slots that must be selected for it to be a hit, in (0, 1].
    eviction: a name of EVICTIONS.
    recheck: a token counts for one hit only (greedy set cover).
    strict: nothing is visible but what is selected, as with the bare policy. Otherwise the other
      tokens of a hit stay visible, which the paper takes for a gain.
    filling: AGGREGATE, OPKV's; BY_PAGE, its ablation "no aggregation"; REFILL, ours.
    reuse: False for the ablation "no hot reuse", which forgets every block after its step.
    exclusive: ours: a token that is copied again leaves the block that still has it, so that none
      is in two blocks of a list, and no cover has to be looked for. A block without tokens is free.
    shared: the lists share the pool; False where each has n/X blocks of its own
      (`kvjax.opkv.apart`), as many as its width.
  """

  width: int
  heads: int
  rho: float = 0.6
  eviction: str = "s3fifo"
  recheck: bool = True
  strict: bool = False
  filling: str = AGGREGATE
  reuse: bool = True
  exclusive: bool = False
  shared: bool = True

  @property
  def order(self) -> Eviction:
    """The functions of the eviction."""
    return EVICTIONS[self.eviction]


class Plan(NamedTuple):
  """One step of one layer. R = n*C, a bound for the tokens that may move.

  Attributes:
    blocks: the metadata after the step.
    source: i32[R], x*T + t of each token to copy; only the first `count` are meant.
    target: i32[R], b*C + slot where it goes, each at most once.
    count: i32[], tokens to copy.
    attended: i32[X, M], blocks to read: hits by id, then new ones by id; n for none.
    mask: bool[X, M, C], slots to read. A token is visible in one slot only.
    visible: bool[n, C], the same by block.
    too_small: bool[], the pool or the width cannot hold the selection. Then nothing is planned,
      nothing is visible, and no block has changed. Where pools are not shared that holds for the
      lists that do not fit.
    hits: i32[X], blocks that were reused.
    new: i32[X], blocks that are new.
    moved: i32[X], tokens to copy, by list.
    evicted: i32[], blocks that were given up.
    exchange: what moves to and from a partition of the host; None without one. Blocks that come
      back are new ones, of whose tokens none is among those to copy.
  """

  blocks: Blocks
  source: jax.Array
  target: jax.Array
  count: jax.Array
  attended: jax.Array
  mask: jax.Array
  visible: jax.Array
  too_small: jax.Array
  hits: jax.Array
  new: jax.Array
  moved: jax.Array
  evicted: jax.Array
  exchange: Exchange | None = None


def checked(settings: Settings) -> Settings:
  """The same settings; ValueError for one that is not legal."""
  if not 0 < settings.rho <= 1:
    raise ValueError(f"rho {settings.rho} is not in (0, 1]; it is a share of a block's slots")
  if settings.eviction not in EVICTIONS:
    known = ", ".join(sorted(EVICTIONS))
    raise ValueError(f"unknown eviction {settings.eviction!r}; expected one of {known}")
  if settings.filling not in FILLINGS:
    known = ", ".join(FILLINGS)
    raise ValueError(f"unknown filling {settings.filling!r}; expected one of {known}")
  for name in ("width", "heads"):
    if getattr(settings, name) < 1:
      raise ValueError(f"{name} {getattr(settings, name)} must be at least 1")
  return settings


def plan(
  blocks: Blocks,
  selected: jax.Array,
  settings: Settings,
  newest: jax.Array | None = None,
  demoted: Blocks | None = None,
) -> Plan:
  """What this step copies from the host, where to, and what attention reads.

  Args:
    blocks: the pool of this layer.
    selected: bool[X, T], the selection of each list; T a multiple of C.
    settings: static, from `checked`.
    newest: i32[X], position from which on a list's tokens lie in its ordered page of newest tokens,
      which attention reads besides; None if there is no such page. What is there is not looked for
      here, and not visible here.
    demoted: what the layer's partition of the host holds (`kvjax.opkv.demoted`); None without one.
  """
  lists, capacity = selected.shape
  n, c = blocks.tokens.shape
  _check_shapes(lists, capacity, c, settings.heads)
  if not settings.reuse:
    blocks = release(blocks, jnp.ones(lists, bool))
  if newest is not None:
    selected = selected & (jnp.arange(capacity)[None] < newest[:, None])
  fits = _fits(selected, settings, n, c)
  selected = selected & fits[:, None]  # what does not fit is planned as if nothing were selected

  found, hits, came = _served(blocks, selected, settings, demoted)
  moved = found.missing.sum(axis=-1, dtype=jnp.int32)
  wanted = selected.sum(axis=-1, dtype=jnp.int32)
  pages = _pages_with(found.missing, c).sum(axis=-1, dtype=jnp.int32)
  new = new_blocks(settings.filling, c, hits, wanted, moved, pages)
  fresh = new if came is None else new + came.blocks
  taken, evicted, order = _take(blocks, found.hit, selected, fresh, settings)
  attended = _attended(blocks.owner, found.hit, hits, taken, fresh, settings.width)
  source, count = places(found.missing.reshape(-1), n * c), moved.sum()
  whole, moves, packed = None, None, taken  # packed: blocks for single tokens
  if demoted is not None and came is not None:
    whole = placed(came, demoted, taken, fresh)
    moves = exchange(demoted, blocks, taken, came, whole, settings.heads)
    packed = taken & ~whole.block
  target = _targets(source, found, moved, new, packed, attended, settings.filling)
  target = jnp.where(jnp.arange(n * c) < count, target, n * c)
  arrived = jnp.full(n * c, -1, jnp.int32).at[target].set(source % capacity, mode="drop")
  arrived = arrived.reshape(n, c)
  seen = arrived >= 0
  if whole is not None:
    arrived, seen = jnp.maximum(arrived, whole.tokens), seen | whole.seen

  gone = taken[:, None]
  if settings.exclusive:  # what is wanted and in no hit is copied, so that it has a slot elsewhere
    gone |= found.wanted & ~found.hit[:, None]
  tokens = jnp.where(arrived >= 0, arrived, jnp.where(gone, -1, blocks.tokens))
  after = blocks._replace(tokens=tokens, order=order)
  after = _settled(after, taken, attended, hits, capacity, settings)

  shown = found.first & found.wanted if settings.strict else found.first
  visible = (shown | seen) & (found.hit | taken)[:, None]
  mask = visible.at[attended].get(mode="fill", fill_value=False)
  return Plan(
    after,
    *(source, target, count, attended, mask, visible, ~fits.all()),
    *(hits, fresh, moved, evicted, moves),
  )


def _served(
  blocks: Blocks, selected: jax.Array, settings: Settings, demoted: Blocks | None
) -> tuple[Retrieval, jax.Array, Returning | None]:
  """What serves a selection: hits, i32[X] how many of each list, and what comes back from the
  host's partition. What is missing then has to be copied token by token."""
  n, c = blocks.tokens.shape
  rule = {name: getattr(settings, name) for name in ("width", "recheck", "filling", "exclusive")}
  theta = 1 if settings.filling == REFILL else least_tokens(settings.rho, c)
  found = retrieve(blocks, selected, theta=theta, **rule)
  hits = per_list(found.hit, blocks.owner, selected.shape[0])
  if demoted is None:
    return found, hits, None
  left = {"num_blocks": n, "width": settings.width, "recheck": settings.recheck}
  came = returning(demoted, found.missing, hits, theta=theta, **left)
  return found._replace(missing=came.missing), hits, came


def _settled(
  blocks: Blocks,
  taken: jax.Array,
  attended: jax.Array,
  hits: jax.Array,
  capacity: int,
  settings: Settings,
) -> Blocks:
  """Blocks after a step, of which tokens are those of then and the order has no new blocks yet."""
  lists = hits.shape[0]
  if settings.shared:
    after = blocks._replace(owner=_new_owner(blocks.owner, attended, hits))
    order = settings.order.insert(blocks.order, flat_tokens(after, lists, capacity), taken)
  else:
    after = blocks._replace(owner=owner_apart(blocks.owner, taken, lists))
    new = blocks.tokens, taken, lists, capacity
    order = insert_apart(blocks.order, *new, settings.order)
  if settings.exclusive:  # a block that lost all its tokens is free
    some = (blocks.tokens >= 0).any(axis=1)
    after = after._replace(owner=jnp.where(some, after.owner, -1))
  return after._replace(order=order)


def _check_shapes(lists: int, capacity: int, page_size: int, heads: int) -> None:
  if capacity % page_size:
    raise ValueError(
      f"selections of {capacity} tokens are not whole pages of {page_size}; pad them with False"
    )
  if lists % heads:
    raise ValueError(f"{lists} lists are not rows of {heads} heads; give lists = rows * heads")


def _pages_with(tokens: jax.Array, page_size: int) -> jax.Array:
  """bool[X, P]: ordered pages with any of tokens bool[X, T]."""
  return tokens.reshape(tokens.shape[0], -1, page_size).any(axis=-1)


def _targets(source, found: Retrieval, moved, new, taken, attended, filling: str) -> jax.Array:
  """i32[R]: where each missing token goes, see `kvjax.opkv.filling`."""
  n, c = found.first.shape
  capacity = found.missing.shape[1]
  if filling == REFILL:
    open_slots = (found.hit[:, None] & ~(found.first & found.wanted)) | taken[:, None]
    return in_open_slots(source, moved, attended, open_slots, capacity)
  if filling == BY_PAGE:
    return in_block_of_page(source, _pages_with(found.missing, c), places(taken, n), c)
  return in_new_blocks(source, moved, new, places(taken, n), capacity, c)


def _fits(selected, settings: Settings, n: int, c: int) -> jax.Array:
  """bool[X]: the selections fit the pool and the width if nothing in it is a hit; all or none of
  them, unless each list has a pool of its own."""
  if settings.filling == BY_PAGE:
    need = _pages_with(selected, c).sum(axis=-1)
  else:
    need = -(-selected.sum(axis=-1) // c)
  fits = need <= settings.width
  return (
    fits if not settings.shared else jnp.broadcast_to(fits.all() & (need.sum() <= n), fits.shape)
  )


def _take(
  blocks: Blocks, hit: jax.Array, selected: jax.Array, fresh: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array, State]:
  """Blocks for new ones of each list, i32[X], as bool[n]: free ones first, then what the eviction
  gives up; where pools are not shared, each list's of its own.

  Rows below their share are spared while others have something to give. Where all that these have
  is not enough, it goes without being asked for, and the eviction chooses among the spared.

  Also returns how many were given up, and the state of the eviction.
  """
  if not settings.shared:
    return take_apart(blocks, hit, fresh, selected.shape[1], settings.order)
  order, count = settings.order.touch(blocks.order, hit), fresh.sum()
  free = blocks.owner < 0
  given_up = jnp.maximum(count - free.sum(dtype=jnp.int32), 0)
  idle = ~free & ~hit
  spared = idle & _below_fair_share(blocks, selected, settings.heads)
  others = idle & ~spared
  short = jnp.maximum(given_up - others.sum(dtype=jnp.int32), 0)
  enough = short == 0
  all_others = others & ~enough
  allowed, wanted = jnp.where(enough, others, spared), jnp.where(enough, given_up, short)
  keys = flat_tokens(blocks, *selected.shape)
  victims, order = settings.order.evict(order, keys, ~free & ~all_others, allowed, wanted)
  return victims | all_others | (free & (running(free) <= count)), given_up, order


def _below_fair_share(blocks: Blocks, selected: jax.Array, heads: int) -> jax.Array:
  """bool[n]: blocks of rows that hold less than half of a fair share, n / live rows.

  OPKV's "loose fairness threshold"; the half is ours, and that a row's holding is looked at once a
  step, before anything is given up. A row is live if it holds blocks or selects tokens.
  """
  lists = selected.shape[0]
  held = per_list(jnp.ones_like(blocks.owner), blocks.owner, lists).reshape(-1, heads).sum(axis=-1)
  live = (held > 0) | selected.reshape(held.shape[0], -1).any(axis=-1)
  spared = 2 * held * live.sum(dtype=jnp.int32) < blocks.owner.shape[0]
  return owned_by(blocks, jnp.repeat(spared, heads))


def _attended(owner, hit, hits, taken, new, width: int) -> jax.Array:
  """i32[X, M]: the hits of each list by id, then its new blocks by id; n beyond."""
  n = owner.shape[0]
  ids = jnp.arange(n, dtype=jnp.int32)
  by_list = jnp.sort(jnp.where(hit, owner, hits.shape[0]) * n + ids) % n
  place = jnp.arange(width, dtype=jnp.int32)[None]
  old = by_list.at[before(hits)[:, None] + place].get(mode="clip")
  later = place - hits[:, None]  # place among the new ones
  fresh = places(taken, n).at[before(new)[:, None] + later].get(mode="clip")
  return jnp.where(later < 0, old, jnp.where(later < new[:, None], fresh, n))


def _new_owner(owner: jax.Array, attended: jax.Array, hits: jax.Array) -> jax.Array:
  """i32[n]: owners after the step; what is attended and no hit is new."""
  lists, width = attended.shape
  is_new = jnp.arange(width)[None] >= hits[:, None]
  x = jnp.broadcast_to(jnp.arange(lists, dtype=jnp.int32)[:, None], attended.shape)
  return owner.at[jnp.where(is_new, attended, owner.shape[0])].set(x, mode="drop")
