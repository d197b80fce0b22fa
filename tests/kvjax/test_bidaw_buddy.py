"""Pages of two sizes against a pool that is a list of slots with the names of their owners."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvjax.bidaw.buddy import BIG_TOKENS, SMALL_TOKENS, MixedPages, NoRoom, Page

NUM_BIG = 4
POOL = NUM_BIG * BIG_TOKENS + 100
STEPS = st.lists(
  st.tuples(st.sampled_from(["big", "small", "free"]), st.integers(0, 700), st.randoms()),
  max_size=60,
)


class Naive:
  """The same pool by its definition: whose each small piece is, and what is whole is searched."""

  def __init__(self, num_big: int):
    self.owner: list[Page | None] = [None] * (num_big * BIG_TOKENS // SMALL_TOKENS)

  def take(self, pages):
    for page in pages:
      for piece in self.pieces(page):
        assert self.owner[piece] is None, "pages overlap"
        self.owner[piece] = page

  def give(self, pages):
    for page in pages:
      for piece in self.pieces(page):
        assert self.owner[piece] == page
        self.owner[piece] = None

  @staticmethod
  def pieces(page):
    assert page.first % page.tokens == 0
    return range(page.first // SMALL_TOKENS, (page.first + page.tokens) // SMALL_TOKENS)

  @property
  def free_tokens(self):
    return self.owner.count(None) * SMALL_TOKENS

  @property
  def free_big_tokens(self):
    parts = BIG_TOKENS // SMALL_TOKENS
    firsts = range(0, len(self.owner), parts)
    return BIG_TOKENS * sum(not any(self.owner[first : first + parts]) for first in firsts)


def step(pool: MixedPages, naive: Naive, held: list, kind: str, tokens: int, rng) -> None:
  """One request, or the end of one, in both pools, which then agree."""
  before = pool.free_tokens, pool.free_big_tokens
  if kind == "free":
    if held:
      pages = held.pop(rng.randrange(len(held)))
      pool.free(*pages)
      naive.give(pages)
  else:
    size = BIG_TOKENS if kind == "big" else SMALL_TOKENS
    pages = pool.big(tokens) if kind == "big" else pool.small(tokens)
    room = naive.free_big_tokens if kind == "big" else naive.free_tokens
    wanted = -(-tokens // size) * size
    if wanted > room:
      assert pages == NoRoom(wanted, room)
      assert (pool.free_tokens, pool.free_big_tokens) == before
    else:
      assert all(page.tokens == size for page in pages)
      assert 0 <= sum(page.tokens for page in pages) - tokens < size  # 255, and 15
      naive.take(pages)
      held.append(pages)
  assert pool.free_tokens == naive.free_tokens
  assert pool.free_big_tokens == naive.free_big_tokens  # what can merge has merged


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_agrees_with_the_naive_pool(steps):
  pool, naive, held = MixedPages(POOL), Naive(NUM_BIG), []
  for kind, tokens, rng in steps:
    step(pool, naive, held, kind, tokens, rng)
  for pages in held:
    pool.free(*pages)
  assert pool.free_big_tokens == pool.free_tokens == NUM_BIG * BIG_TOKENS


def test_ten_thousand_steps():
  rng = random.Random(0)
  pool, naive, held = MixedPages(40 * BIG_TOKENS), Naive(40), []
  for _ in range(10_000):
    kind = rng.choices(["big", "small", "free"], [1, 4, 5])[0]
    step(pool, naive, held, kind, rng.randrange(2500 if kind == "big" else 200), rng)


def test_a_big_page_splits_and_merges():
  pool = MixedPages(2 * BIG_TOKENS)
  answer = pool.small(BIG_TOKENS)
  assert sorted(answer) == [Page(first, 16) for first in range(0, 256, 16)]
  assert pool.free_big_tokens == 256 and pool.big(257) == NoRoom(512, 256)
  (history,) = pool.big(200)
  assert history == Page(256, 256) and pool.small(1) == NoRoom(16, 0)
  pool.free(*answer[1:])
  assert (pool.free_tokens, pool.free_big_tokens) == (240, 0)
  assert pool.big(1) == NoRoom(256, 0)  # room enough, but in pieces
  pool.free(answer[0])
  assert pool.big(1) == (Page(0, 256),)


def test_small_pages_come_from_the_fullest_split_page():
  pool = MixedPages(2 * BIG_TOKENS)
  first, second = pool.small(BIG_TOKENS), pool.small(BIG_TOKENS)
  pool.free(*second[:5], *first[:3])
  assert {page.first // BIG_TOKENS for page in pool.small(48)} == {first[0].first // BIG_TOKENS}


@pytest.mark.parametrize(
  "wrong",
  [
    [Page(0, 16), Page(0, 16)],
    [Page(16, 16)],
    [Page(0, 256)],
    [Page(256, 16)],
    [Page(512, 256)],
    [Page(264, 256)],
    [Page(8, 16)],
    [Page(0, 32)],
    [Page(-256, 256)],
  ],
)
def test_what_is_not_in_use_is_not_freed(wrong):
  pool = MixedPages(3 * BIG_TOKENS)
  small, big = pool.small(16), pool.big(256)
  assert (small, big) == ((Page(0, 16),), (Page(256, 256),))
  with pytest.raises(ValueError, match="free each"):
    pool.free(*big, *wrong)
  assert pool.free_tokens == 2 * BIG_TOKENS - 16  # nor is what came before it
  pool.free(*big, *small)
  with pytest.raises(ValueError, match="not in use"):
    pool.free(*big)
  assert pool.free_big_tokens == 3 * BIG_TOKENS


def test_bad_input_is_refused():
  with pytest.raises(ValueError, match="at least 256"):
    MixedPages(255)
  for ask in (MixedPages(256).big, MixedPages(256).small):
    with pytest.raises(ValueError, match="0 or more"):
      ask(-1)
  assert MixedPages(256).big(0) == MixedPages(256).small(0) == ()
