"""Weighted reuse distance: how many bytes of others were used since a user was last here.

    distance(access of u) = sum of the sizes of the distinct other users accessed since u's last one

(Bidaw, FAST 2026). A history is still in host memory, under LRU, if its distance is less than what
the host holds. Accesses are numbered; each user's bytes lie at the number of its last one, in a
ring, with a sum for every 128 numbers. A distance is the sum of what lies behind a number: of the
rest of its block, and of the blocks after it.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

_BLOCK, _BLOCKS = 128, 64  # numbers of a block, blocks at first
_MOST = 1 << 20  # numbers


class ReuseDistances:
  """Last accesses in their order, with the bytes of each user.

  Args:
    limit_bytes: distances of this and more are not told apart. Who has reached it is dropped, so
      what is remembered is bounded; nobody else's distance depends on who was last here before.
      Who was not here for a million accesses is dropped as well.
  """

  def __init__(self, limit_bytes: int):
    self.limit_bytes = limit_bytes
    self._place: OrderedDict[int, int] = OrderedDict()  # user -> number of it; oldest first
    self._size: dict[int, int] = {}  # of the users that have a place
    self._next = 0  # number of the next access
    self._total = 0
    self._bytes = np.zeros(_BLOCKS * _BLOCK, np.int64)  # by number, modulo its length
    self._blocks = np.zeros(_BLOCKS, np.int64)

  def __len__(self) -> int:
    return len(self._place)

  def access(self, user: int) -> int | None:
    """The distance of this access in bytes; None if the user is not remembered."""
    distance = self.since(user) if user in self._place else None
    size = self._size.setdefault(user, 0)
    if distance is not None:
      self._add(self._place[user], -size)
    self._place[user] = self._next
    self._place.move_to_end(user)  # to take it out and in would fill the table
    self._make_room()
    self._add(self._next, size)
    self._next += 1
    return distance

  def since(self, user: int) -> int:
    """Bytes of others that were accessed since this user; the limit if it is not remembered."""
    place = self._place.get(user)
    if place is None:
      return self.limit_bytes
    at, last = place % len(self._bytes), (self._next - 1) % len(self._bytes)
    block, last_block = at // _BLOCK, last // _BLOCK
    if block == last_block and at <= last:
      return int(self._bytes[at + 1 : last + 1].sum())
    behind = self._bytes[at + 1 : (block + 1) * _BLOCK].sum()
    if block < last_block:
      return int(behind + self._blocks[block + 1 : last_block + 1].sum())
    return int(behind + self._blocks[block + 1 :].sum() + self._blocks[: last_block + 1].sum())

  def size_bytes(self, user: int) -> int:
    """Bytes of a user's history; 0 if it is not remembered."""
    return self._size.get(user, 0)

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
    at = place % len(self._bytes)
    self._bytes[at] += num_bytes
    self._blocks[at // _BLOCK] += num_bytes

  def _drop_far(self) -> None:
    while self._place:
      oldest = next(iter(self._place))
      if self._total - self._size[oldest] < self.limit_bytes:
        return
      self._remove(oldest)

  def _make_room(self) -> None:
    """The block of the next number holds nothing of a round before."""
    while self._place:
      oldest = next(iter(self._place))
      first = self._place[oldest] // _BLOCK * _BLOCK
      if self._next < first + len(self._bytes):
        return
      if len(self._bytes) >= _MOST:
        self._remove(oldest)
      else:
        self._double()

  def _double(self) -> None:
    old = len(self._bytes)
    first = self._next // _BLOCK * _BLOCK - old  # of the oldest block, which is a whole one
    ring = np.zeros(2 * old, np.int64)
    numbers = np.arange(first, first + old)
    ring[numbers % (2 * old)] = self._bytes[numbers % old]
    self._bytes, self._blocks = ring, ring.reshape(-1, _BLOCK).sum(axis=1)
