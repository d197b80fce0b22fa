"""Who goes first: users by a key that may change, of whom some may not go for now."""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class Ranking:
  """Users by key, the smallest first, of equal ones the smallest id.

  A list in order: each call searches it in O(log n) and moves what lies behind, which takes
  microseconds for ten thousand users and, unlike a heap that is cleared now and then, never more.
  """

  def __init__(self):
    self._key: dict[int, tuple] = {}
    self._pinned: set[int] = set()
    self._order: list[tuple[tuple, int]] = []  # of who is not pinned

  def __len__(self) -> int:
    return len(self._key)

  def __contains__(self, user: int) -> bool:
    return user in self._key

  def __iter__(self) -> Iterator[int]:
    return iter(self._key)

  def put(self, user: int, key: tuple) -> None:
    """Takes in a user, or changes its key."""
    if self._key.get(user) != key:
      self._take_out(user)
      self._key[user] = key
      self._put_in(user)

  def discard(self, user: int) -> None:
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

  def pop(self) -> int | None:
    """Takes out who goes first; None if nobody may go."""
    if not self._order:
      return None
    _, user = self._order.pop(0)
    del self._key[user]
    return user

  def _put_in(self, user: int) -> None:
    if user in self._key and user not in self._pinned:
      bisect.insort(self._order, (self._key[user], user))

  def _take_out(self, user: int) -> None:
    if user in self._key and user not in self._pinned:
      del self._order[bisect.bisect_left(self._order, (self._key[user], user))]
