"""Belady's order: what is used again last goes first. Needs the future; a bound for the others."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from kvjax.eviction.order import Allowed, check_new, no_victim


def next_uses(accesses: Sequence[Hashable]) -> np.ndarray:
  """f64[len(accesses)]: for each access the place of the next one to the same key, inf if none.

  >>> next_uses("abcab").tolist()
  [3.0, 4.0, inf, inf, inf]
  """
  following = np.full(len(accesses), math.inf)
  seen: dict[Hashable, int] = {}
  for place in range(len(accesses) - 1, -1, -1):
    following[place] = seen.get(accesses[place], math.inf)
    seen[accesses[place]] = place
  return following


class Belady:
  """Farthest next use first, of equal ones what was used longest ago; an `Order`.

  Args:
    next_use: `next_use(key)`, asked at each insertion and use of a key: when it is used next, inf
      for never. While a trace of accesses is played, the number of `next_uses` at its place.
  """

  def __init__(self, next_use: Callable[[Hashable], float]):
    self._next_use = next_use
    self._ticks = itertools.count()
    self._entry: dict[Hashable, tuple] = {}  # what counts of the heap's entries
    self._heap: list[tuple] = []

  def __len__(self) -> int:
    return len(self._entry)

  def __contains__(self, key: Hashable) -> bool:
    return key in self._entry

  def insert(self, key: Hashable) -> None:
    """Takes in a key."""
    check_new(key, self._entry)
    self._push(key)

  def touch(self, key: Hashable) -> None:
    """Asks for its next use."""
    self._entry[key]
    self._push(key)

  def remove(self, key: Hashable) -> None:
    """Forgets a key."""
    del self._entry[key]

  def victim(self, allowed: Allowed | None = None) -> Hashable:
    """The key that is used again last."""
    skipped, found = [], None
    while self._heap and found is None:
      entry = heapq.heappop(self._heap)
      key = entry[-1]
      if self._entry.get(key) is not entry:
        continue  # removed, or used since
      if allowed is None or allowed(key):
        found = key
      else:
        skipped.append(entry)
    for entry in skipped:
      heapq.heappush(self._heap, entry)
    if found is None:
      raise no_victim(len(self))
    del self._entry[found]
    return found

  def _push(self, key: Hashable) -> None:
    entry = self._entry[key] = (-self._next_use(key), next(self._ticks), key)
    heapq.heappush(self._heap, entry)
    if len(self._heap) > 2 * len(self._entry) + 64:  # mostly entries of uses long past
      self._heap = list(self._entry.values())
      heapq.heapify(self._heap)
