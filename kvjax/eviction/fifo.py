"""First in, first out: what came first goes first, however often it was used."""

from __future__ import annotations

from collections.abc import Hashable

from kvjax.eviction.order import Allowed, check_new, first_allowed, no_victim


class Fifo:
  """The order of insertion; an `Order`."""

  def __init__(self):
    self._queue: dict[Hashable, None] = {}  # oldest first

  def __len__(self) -> int:
    return len(self._queue)

  def __contains__(self, key: Hashable) -> bool:
    return key in self._queue

  def insert(self, key: Hashable) -> None:
    """At the end of the queue."""
    check_new(key, self._queue)
    self._queue[key] = None

  def touch(self, key: Hashable) -> None:
    """Changes nothing."""
    self._queue[key]

  def remove(self, key: Hashable) -> None:
    """Out of the queue."""
    del self._queue[key]

  def victim(self, allowed: Allowed | None = None) -> Hashable:
    """The oldest."""
    key = first_allowed(self._queue, allowed)
    if key is None:
      raise no_victim(len(self))
    del self._queue[key]
    return key
