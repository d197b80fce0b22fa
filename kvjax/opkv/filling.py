"""Where a missing token goes: OPKV's aggregation, its ablation, and a variant of ours.

Missing tokens come as `source` i32[R], x*T + t ascending, of which the first `count` are meant; the
functions here give each its place i32[R] in the pool, b*C + slot. What they give beyond is not
meant either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.cache.counting import before, places, running

AGGREGATE = "aggregate"  # OPKV: ascending, C to a new block; the last one of a list may be short
BY_PAGE = "by_page"  # its ablation: a new block for each ordered page that they come from
REFILL = "refill"  # ours: in place of tokens that are not selected now, then in new blocks
FILLINGS = (AGGREGATE, BY_PAGE, REFILL)


def new_blocks(
  filling: str,
  page_size: int,
  hits: jax.Array,
  wanted: jax.Array,
  missing: jax.Array,
  pages: jax.Array | None,
) -> jax.Array:
  """Blocks that a list needs besides its hits, elementwise.

  Args:
    filling: one of FILLINGS.
    page_size: C.
    hits: i32[...], blocks that are hits.
    wanted: i32[...], |S|.
    missing: i32[...], tokens of S that no hit has.
    pages: i32[...], ordered pages with such a token, for BY_PAGE.
  """
  if filling == BY_PAGE:
    assert pages is not None
    return pages
  if filling == REFILL:  # all slots of a hit that hold nothing of S can be filled
    return jnp.maximum(-(-wanted // page_size) - hits, 0)
  return -(-missing // page_size)


def in_new_blocks(
  source: jax.Array,
  moved: jax.Array,
  new: jax.Array,
  ids: jax.Array,
  capacity_tokens: int,
  page_size: int,
) -> jax.Array:
  """AGGREGATE: token i of a list goes to slot i % C of the list's new block i // C.

  Args:
    source: i32[R].
    moved: i32[X], missing tokens of each list.
    new: i32[X], new blocks of each list.
    ids: i32[n], new blocks of all lists, those of the first list first.
    capacity_tokens: T.
    page_size: C.
  """
  x = source // capacity_tokens
  i = jnp.arange(source.shape[0], dtype=jnp.int32) - before(moved).at[x].get(mode="clip")
  block = before(new).at[x].get(mode="clip") + i // page_size
  return ids.at[block].get(mode="clip") * page_size + i % page_size


def in_block_of_page(
  source: jax.Array, pages: jax.Array, ids: jax.Array, page_size: int
) -> jax.Array:
  """BY_PAGE: a token keeps its slot, in the new block of its page.

  Args:
    source: i32[R].
    pages: bool[X, P], pages with a missing token, which have a new block each.
    ids: i32[n], new blocks in the order of the pages.
    page_size: C.
  """
  block = running(pages.reshape(-1)).at[source // page_size].get(mode="clip") - 1
  return ids.at[block].get(mode="clip") * page_size + source % page_size


def in_open_slots(
  source: jax.Array,
  moved: jax.Array,
  attended: jax.Array,
  open_slots: jax.Array,
  capacity_tokens: int,
) -> jax.Array:
  """REFILL: token i of a list goes to the list's i-th open slot.

  Args:
    source: i32[R].
    moved: i32[X], missing tokens of each list.
    attended: i32[X, M], hits of each list, then its new blocks; n for none.
    open_slots: bool[n, C], slots of hits that hold nothing selected, and all of new blocks.
    capacity_tokens: T.
  """
  page_size = open_slots.shape[1]
  open_ = open_slots.at[attended].get(mode="fill", fill_value=False)  # bool[X, M, C]
  counts = open_.sum(axis=(1, 2), dtype=jnp.int32)
  found = places(open_.reshape(-1), source.shape[0])
  x = source // capacity_tokens
  i = jnp.arange(source.shape[0], dtype=jnp.int32) - before(moved).at[x].get(mode="clip")
  slot = found.at[before(counts).at[x].get(mode="clip") + i].get(mode="clip")
  block = attended.reshape(-1).at[slot // page_size].get(mode="clip")
  return block * page_size + slot % page_size
