"""Whose history leaves host memory: the contract, and the policies that are an order over users.

Evicting costs no I/O, since every history is on disk too. A policy hears of arrivals and answers
of all users, and of what enters and leaves host memory, from `kvjax.bidaw.conversations`; histories
that wait or are being served are pinned there and no policy gives them up. `previous_answer` and
`in_the_wild` have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, cast

from kvjax.eviction import Belady, Fifo, Lru, Order, S3Fifo


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


class Ordered:
  """An order of `kvjax.eviction` over users; an arrival is a use. An `Eviction`.

  A victim costs as much as the order needs to pass over the pinned ones at its head.

  Args:
    order: of the histories in host memory.
    soon: `soon()`: users of the requests to come, the next first, as far as they are known; they
      are spared while there are others.
  """

  def __init__(self, order: Order, soon: Callable[[], Sequence[int]] = tuple):
    self._order, self._soon = order, soon
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
    """The first in the order; if only spared ones are left, whose turn is last."""
    turn = {user: place for place, user in reversed(list(enumerate(self._soon())))}
    victim = self._first(lambda user: user not in self._pinned and user not in turn)
    if victim is not None:
      return victim
    spared = [user for user in turn if user in self._order and user not in self._pinned]
    return self._first(max(spared, key=turn.__getitem__).__eq__) if spared else None

  def forget(self, user: int) -> None:
    """Changes nothing."""

  def _first(self, allowed: Callable[[Hashable], bool]) -> int | None:
    try:
      return cast("int", self._order.victim(allowed))
    except LookupError:
      return None


def fifo() -> Ordered:
  """What came into host memory first goes first."""
  return Ordered(Fifo())


def lru() -> Ordered:
  """Whose last request arrived longest ago goes first."""
  return Ordered(Lru())


def s3fifo(histories: int) -> Ordered:
  """S3-FIFO for about so many histories in host memory."""
  return Ordered(S3Fifo(histories))


def queue_lru(soon: Callable[[], Sequence[int]]) -> Ordered:
  """The queue-enhanced LRU of CachedAttention and FlashGen: spares whose request comes soon.

  Args:
    soon: `soon()`: users of the next requests, the next first; the paper's scripts look 30 ahead.
      If all others are pinned, whose request comes last of these goes first, as in CachedAttention.
  """
  return Ordered(Lru(), soon)


def belady(next_use: Callable[[int], float]) -> Ordered:
  """Whose next request is farthest goes first: a bound, for traces that are known to the end.

  Args:
    next_use: `next_use(user)`, asked when a request of the user has arrived and when its history
      comes into host memory: when the next request after it arrives, inf if none does.
  """
  return Ordered(Belady(lambda user: next_use(cast("int", user))))
