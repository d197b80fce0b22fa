"""Least recently used goes first."""

from __future__ import annotations

from collections.abc import Hashable

from kvjax.eviction.fifo import Fifo


class Lru(Fifo):
  """The order of last use, which an insertion is too; an `Order`."""

  def touch(self, key: Hashable) -> None:
    """To the end of the queue."""
    self._queue[key] = self._queue.pop(key)
