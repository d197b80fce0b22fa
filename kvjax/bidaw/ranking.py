"""Who goes first: users by a key that may change, of whom some may not go for now."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Ranking:
  """Users by key, the smallest first, of equal ones the smallest id. O(log n) for each call."""

  def __init__(self):
    self._key: dict[int, tuple] = {}
    self._pinned: set[int] = set()
    self._heap: list[tuple[tuple, int]] = []  # what counts: the current key of who is not pinned

  def __len__(self) -> int:
    return len(self._key)

  def __contains__(self, user: int) -> bool:
    return user in self._key

  def __iter__(self) -> Iterator[int]:
    return iter(self._key)

  def put(self, user: int, key: tuple) -> None:
    """Takes in a user, or changes its key."""
    if self._key.get(user) != key:
      self._key[user] = key
      self._push(user)

  def discard(self, user: int) -> None:
    """Forgets a user, if it is there; it stays pinned."""
    self._key.pop(user, None)

  def pin(self, user: int) -> None:
    """The user, whether it is there or not, may not go until it is unpinned."""
    self._pinned.add(user)

  def unpin(self, user: int) -> None:
    """The user may go again."""
    self._pinned.discard(user)
    if user in self._key:
      self._push(user)

  def pop(self) -> int | None:
    """Takes out who goes first; None if nobody may go."""
    while self._heap:
      key, user = heapq.heappop(self._heap)
      if self._key.get(user) == key and user not in self._pinned:
        del self._key[user]
        return user
    return None

  def _push(self, user: int) -> None:
    if user in self._pinned:
      return  # it is pushed when it is unpinned
    heapq.heappush(self._heap, (self._key[user], user))
    if len(self._heap) > 2 * len(self._key) + 64:  # mostly keys of the past
      self._heap = [(key, u) for u, key in self._key.items() if u not in self._pinned]
      heapq.heapify(self._heap)
