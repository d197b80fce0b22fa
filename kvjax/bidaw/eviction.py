"""Whose history leaves host memory: the contract, and the policies that are an order over users.

Evicting costs no I/O, since every history is on disk too. A policy hears of arrivals and answers
of all users, and of what enters and leaves host memory, from `kvjax.bidaw.conversations`; histories
that wait or are being served are pinned there and no policy gives them up. `previous_answer` and
`in_the_wild` have files of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from kvjax.bidaw.ranking import Ranking
from kvjax.eviction import Order, S3Fifo


class Eviction(Protocol):
  """Which history goes next.

  * `arrived(user, now)`: a request of the user has arrived, wherever its history lies.
  * `answered(user, now, answer_tokens, size_bytes)`: its turn has ended, and its history is as
    large as that now.
  * `insert(user)`: its history is in host memory from now on. `remove(user)`: not any more.
  * `pin(user)`: it must stay until `unpin(user)`, also if it is not there yet.
  * `victim()`: gives up a history and returns its user; None if all are pinned.
  * `forget(user)`: the conversation is over; its history was removed before.

  Times are seconds; one that is earlier than another before it counts as no time passed.
  """

  def arrived(self, user: int, now: float) -> None: ...
  def answered(self, user: int, now: float, answer_tokens: int, size_bytes: int) -> None: ...
  def insert(self, user: int) -> None: ...
  def remove(self, user: int) -> None: ...
  def pin(self, user: int) -> None: ...
  def unpin(self, user: int) -> None: ...
  def victim(self) -> int | None: ...
  def forget(self, user: int) -> None: ...


class Ranked:
  """Histories by a key, the smallest first, of equal ones the one whose key is oldest.

  An `Eviction`. Pinned histories are out of the way and keep their places, so a victim costs
  O(log n) however many are pinned.

  Args:
    key: `key(user)`, asked when a history comes into host memory.
    by_use: whether the key is asked for again with each arrival.
    soon: `soon()`: users of the requests to come, the next first, as far as they are known; they
      are spared while there are others.
  """

  def __init__(
    self,
    key: Callable[[int], float] = lambda user: 0.0,
    *,
    by_use: bool = True,
    soon: Callable[[], Sequence[int]] = tuple,
  ):
    self._by_use, self._soon, ticks = by_use, soon, itertools.count()
    self._ranking = Ranking(lambda user: (key(user), next(ticks)))
    self.insert, self.remove = self._ranking.insert, self._ranking.remove
    self.pin, self.unpin = self._ranking.pin, self._ranking.unpin

  def arrived(self, user: int, now: float) -> None:
    del now
    if self._by_use:
      self._ranking.rank_again(user)

  def answered(self, user: int, now: float, answer_tokens: int, size_bytes: int) -> None:
    """Changes nothing."""

  def victim(self) -> int | None:
    """The first in the order; if only spared ones are left, whose turn is last."""
    turn = {user: place for place, user in reversed(list(enumerate(self._soon())))}
    victim = self._ranking.pop(turn)
    if victim is not None:
      return victim
    spared = [user for user in turn if self._ranking.may_go(user)]
    if not spared:
      return None
    last = max(spared, key=turn.__getitem__)
    self._ranking.remove(last)
    return last

  def forget(self, user: int) -> None:
    """Changes nothing."""


class Ordered:
  """An order of `kvjax.eviction` over users; an arrival is a use. An `Eviction`.

  A victim costs as much as the order needs to pass over the pinned ones at its head.

  Args:
    order: of the histories in host memory.
  """

  def __init__(self, order: Order):
    self._order = order
    self._pinned: set[int] = set()

  def arrived(self, user: int, now: float) -> None:
    del now
    if user in self._order:
      self._order.touch(user)

  def answered(self, user: int, now: float, answer_tokens: int, size_bytes: int) -> None:
    """Changes nothing."""

  def insert(self, user: int) -> None:
    self._order.insert(user)

  def remove(self, user: int) -> None:
    self._order.remove(user)

  def pin(self, user: int) -> None:
    self._pinned.add(user)

  def unpin(self, user: int) -> None:
    self._pinned.discard(user)

  def victim(self) -> int | None:
    try:
      return cast("int", self._order.victim(lambda user: user not in self._pinned))
    except LookupError:
      return None

  def forget(self, user: int) -> None:
    """Changes nothing."""


def fifo() -> Ranked:
  """What came into host memory first goes first."""
  return Ranked(by_use=False)


def lru() -> Ranked:
  """Whose last request arrived longest ago goes first."""
  return Ranked()


def s3fifo(histories: int) -> Ordered:
  """S3-FIFO for about so many histories in host memory."""
  return Ordered(S3Fifo(histories))


def queue_lru(soon: Callable[[], Sequence[int]]) -> Ranked:
  """The queue-enhanced LRU of CachedAttention and FlashGen: spares whose request comes soon.

  Args:
    soon: `soon()`: users of the next requests, the next first; the paper's scripts look 30 ahead.
      If all others are pinned, whose request comes last of these goes first, as in CachedAttention.
  """
  return Ranked(soon=soon)


def belady(next_use: Callable[[int], float]) -> Ranked:
  """Whose next request is farthest goes first: a bound, for traces that are known to the end.

  Args:
    next_use: `next_use(user)`, asked when a request of the user has arrived and when its history
      comes into host memory: when the next request after it arrives, inf if none does.
  """
  return Ranked(lambda user: -next_use(user))
