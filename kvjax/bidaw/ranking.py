"""Who goes first: users by a key that may change, of whom some may not go for now."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator


class Ranking:
  """Users by key, the smallest first, of equal ones the smallest id.

  A list in order: each call searches it in O(log n) and moves what lies behind, which takes
  microseconds for ten thousand users and, unlike a heap that is cleared now and then, never more.

  Args:
    key: `key(user)`, asked when a user comes in and whenever it is ranked again.
  """

  def __init__(self, key: Callable[[int], tuple]):
    self._key_of = key
    self._key: dict[int, tuple] = {}  # as they were when asked
    self._pinned: set[int] = set()
    self._order: list[tuple[tuple, int]] = []  # of who is not pinned

  def __len__(self) -> int:
    return len(self._key)

  def __contains__(self, user: int) -> bool:
    return user in self._key

  def __iter__(self) -> Iterator[int]:
    return iter(self._key)

  def rank_again(self, user: int) -> None:
    """Asks for the user's key again, if it is there."""
    if user in self._key:
      self.insert(user)

  def insert(self, user: int) -> None:
    """Takes in a user."""
    key = self._key_of(user)
    if self._key.get(user) != key:
      self._take_out(user)
      self._key[user] = key
      self._put_in(user)

  def remove(self, user: int) -> None:
    """Forgets a user, if it is there; it stays pinned."""
    self._take_out(user)
    self._key.pop(user, None)

  def pin(self, user: int) -> None:
    """The user, whether it is there or not, may not go until it is unpinned."""
    self._take_out(user)
    self._pinned.add(user)

  def unpin(self, user: int) -> None:
    """The user may go again."""
    if user in self._pinned:
      self._pinned.remove(user)
      self._put_in(user)

  def may_go(self, user: int) -> bool:
    """Whether the user is there and not pinned."""
    return user in self._key and user not in self._pinned

  def pop(self, spared: Collection[int] = ()) -> int | None:
    """Takes out who goes first but for those that are spared; None if nobody may go."""
    for place, (_, user) in enumerate(self._order):
      if user not in spared:
        del self._order[place]
        del self._key[user]
        return user
    return None

  def _put_in(self, user: int) -> None:
    if self.may_go(user):
      bisect.insort(self._order, (self._key[user], user))

  def _take_out(self, user: int) -> None:
    if self.may_go(user):
      del self._order[bisect.bisect_left(self._order, (self._key[user], user))]
