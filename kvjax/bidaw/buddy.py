"""Pages of two sizes: big ones for what is long and known, small ones for what grows (Bidaw,
"mixed-grain paging").

A history and the question come at once, so they get big pages of 256 tokens: few entries in a page
table, long copies. An answer grows token by token to a length that nobody knows, so it gets small
pages of 16. A big page that is free splits into 16 small ones when none is left, and 16 free small
pages of one big page merge back at once: a buddy allocator of two levels. Of the last page of a
history at most 255 tokens stay unused, of an answer's at most 15.

Small pages come from the split page that has the fewest free ones, so that the others become whole
again soon (the paper does not say which; first fit would do as well for correctness). A turn later
the answer is part of the history and is loaded into big pages with it.

Only places are kept here, in tokens; what lies there is the store's.
"""

from __future__ import annotations

from typing import NamedTuple

BIG_TOKENS, SMALL_TOKENS = 256, 16
_PARTS = BIG_TOKENS // SMALL_TOKENS
_ALL = (1 << _PARTS) - 1  # a bit for each small page of a big one, set where it is free
_FREE, _WHOLE = -1, -2  # of a big page that is not split: nobody's, or in use as it is


class Page(NamedTuple):
  """A piece of the pool: `tokens` slots from slot `first` on, 256 or 16, a multiple of its size."""

  first: int
  tokens: int


class NoRoom(NamedTuple):
  """What was asked for is not there, and nothing was changed.

  Attributes:
    wanted_tokens: of pages of the size that was asked for.
    free_tokens: that pages of this size could have; others may be free in split pages.
  """

  wanted_tokens: int
  free_tokens: int


class MixedPages:
  """The one owner of which page is whose; O(1) for each page.

  Args:
    num_tokens: slots of the pool; what is beyond a multiple of 256 stays unused.

  Raises:
    ValueError: a pool of less than one big page.
  """

  def __init__(self, num_tokens: int):
    if num_tokens < BIG_TOKENS:
      raise ValueError(f"a pool of {num_tokens} tokens; give it at least {BIG_TOKENS}, a big page")
    big = num_tokens // BIG_TOKENS
    self._state = [_FREE] * big  # or the bits of its free small pages, where it is split
    self._free_big = list(range(big - 1, -1, -1))
    self._free_small = 0  # in split pages
    self._split: list[list[int]] = [[] for _ in range(_PARTS)]  # those with so many free small ones
    self._place = [0] * big  # of a split page in its list

  @property
  def free_tokens(self) -> int:
    """Slots of all free pages."""
    return len(self._free_big) * BIG_TOKENS + self._free_small * SMALL_TOKENS

  @property
  def free_big_tokens(self) -> int:
    """Slots of free pages that are not split: those that a history could have."""
    return len(self._free_big) * BIG_TOKENS

  def big(self, tokens: int) -> tuple[Page, ...] | NoRoom:
    """Big pages for so many tokens, 0 or more, in the order in which they are to be filled."""
    count = _pages(tokens, BIG_TOKENS)
    if count > len(self._free_big):
      return NoRoom(count * BIG_TOKENS, self.free_big_tokens)
    return tuple(self._take_big() for _ in range(count))

  def small(self, tokens: int) -> tuple[Page, ...] | NoRoom:
    """Small pages for so many tokens; big ones are split if it takes them."""
    count = _pages(tokens, SMALL_TOKENS)
    if count * SMALL_TOKENS > self.free_tokens:
      return NoRoom(count * SMALL_TOKENS, self.free_tokens)
    return tuple(self._take_small() for _ in range(count))

  def free(self, *pages: Page) -> None:
    """Gives pages back, all of them or, with an error, none.

    Raises:
      ValueError: a page that is not in use, or comes twice.
    """
    for page in pages:
      if not self._in_use(page):
        raise ValueError(f"{page} is not in use; free each page that was given once")
    if len(set(pages)) < len(pages):
      raise ValueError(f"{len(pages)} pages to free, of which some are the same; free each once")
    for page in pages:
      self._give(page)

  def _in_use(self, page: Page) -> bool:
    index, offset = divmod(page.first, BIG_TOKENS)
    if not 0 <= index < len(self._state):
      return False
    state = self._state[index]
    if page.tokens == BIG_TOKENS:
      return offset == 0 and state == _WHOLE
    part, rest = divmod(offset, SMALL_TOKENS)
    return page.tokens == SMALL_TOKENS and rest == 0 and state >= 0 and not state >> part & 1

  def _take_big(self) -> Page:
    index = self._free_big.pop()
    self._set(index, _WHOLE)
    return Page(index * BIG_TOKENS, BIG_TOKENS)

  def _take_small(self) -> Page:
    held = next((split for split in self._split if split), None)
    index = held[-1] if held else self._free_big.pop()
    bits = self._state[index] if held else _ALL
    part = (bits & -bits).bit_length() - 1
    self._set(index, bits & (bits - 1))
    return Page(index * BIG_TOKENS + part * SMALL_TOKENS, SMALL_TOKENS)

  def _give(self, page: Page) -> None:
    index, offset = divmod(page.first, BIG_TOKENS)
    bits = _ALL
    if page.tokens == SMALL_TOKENS:
      bits = self._state[index] | 1 << offset // SMALL_TOKENS
    self._set(index, bits if bits < _ALL else _FREE)
    if bits == _ALL:  # given back whole, or merged
      self._free_big.append(index)

  def _set(self, index: int, state: int) -> None:
    """A big page has this state, and its place among those with as many free small pages."""
    before = self._state[index]
    if before > 0:
      split, place = self._split[before.bit_count()], self._place[index]
      split[place] = split[-1]
      self._place[split.pop()] = place
      self._free_small -= before.bit_count()
    self._state[index] = state
    if state > 0:
      split = self._split[state.bit_count()]
      self._place[index] = len(split)
      split.append(index)
      self._free_small += state.bit_count()


def _pages(tokens: int, size: int) -> int:
  if tokens < 0:
    raise ValueError(f"pages for {tokens} tokens; ask for 0 or more")
  return -(-tokens // size)
