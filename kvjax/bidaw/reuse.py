"""Weighted reuse distance: how many bytes of others were used since a user was last here.

    distance(access of u) = sum of the sizes of the distinct other users accessed since u's last one

(Bidaw, FAST 2026). A history is still in host memory, under LRU, if its distance is less than what
the host holds. Each user's last access has a place in a Fenwick tree of bytes; a distance is the
sum of all places behind one, so an access costs O(log n) of the users that are remembered.
"""

from __future__ import annotations

from collections import OrderedDict


class ReuseDistances:
  """Last accesses in their order, with the bytes of each user.

  Args:
    limit_bytes: distances of this and more are not told apart. Who has reached it is dropped, so
      what is remembered is bounded; nobody else's distance depends on who was last here before.
  """

  def __init__(self, limit_bytes: int):
    self.limit_bytes = limit_bytes
    self._place: OrderedDict[int, int] = OrderedDict()  # user -> place in the tree; oldest first
    self._size: dict[int, int] = {}  # of the users that have a place
    self._total = 0
    self._last = 0  # the last place that was given
    self._tree = [0] * 65

  def __len__(self) -> int:
    return len(self._place)

  def access(self, user: int) -> int | None:
    """The distance of this access in bytes; None if the user is not remembered."""
    distance = self.since(user) if user in self._place else None
    size = self._size.get(user, 0)
    self._remove(user)
    if self._last + 1 == len(self._tree):
      self._renumber()
    self._last += 1
    self._place[user], self._size[user] = self._last, size
    self._add(self._last, size)
    return distance

  def since(self, user: int) -> int:
    """Bytes of others that were accessed since this user; the limit if it is not remembered."""
    place = self._place.get(user)
    if place is None:
      return self.limit_bytes
    before = 0
    while place:
      before += self._tree[place]
      place &= place - 1
    return self._total - before

  def resize(self, user: int, size_bytes: int) -> None:
    """Says how large a user's history is, from now on; nothing if it is not remembered."""
    if user in self._place:
      self._add(self._place[user], size_bytes - self._size[user])
      self._size[user] = size_bytes
      self._drop_far()

  def _remove(self, user: int) -> None:
    place = self._place.pop(user, None)
    if place is not None:
      self._add(place, -self._size.pop(user))

  def _add(self, place: int, num_bytes: int) -> None:
    self._total += num_bytes
    while place < len(self._tree):
      self._tree[place] += num_bytes
      place += place & -place

  def _drop_far(self) -> None:
    while self._place:
      oldest = next(iter(self._place))
      if self._total - self._size[oldest] < self.limit_bytes:
        return
      self._remove(oldest)

  def _renumber(self) -> None:
    """Places from 1 on, and as many free ones."""
    self._tree = [0] * (2 * len(self._place) + 65)
    self._last = self._total = 0
    for user in self._place:
      self._last += 1
      self._place[user] = self._last
      self._add(self._last, self._size[user])
