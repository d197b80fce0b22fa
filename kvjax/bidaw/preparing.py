"""Who is read from disk next: disk-HRRN, the highest response ratio of those who wait.

Bidaw's ratio is R = 1 + wait / bytes, so that small histories come early and nobody waits for ever.
The one in seconds, R = 1 + wait / time of the read, is a true response ratio; the two orders differ
only by what a read takes besides its bytes. Ratios change with time at different rates, so there is
no heap: all are computed at each choice, in numpy, which takes microseconds for thousands.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class Preparing:
  """Requests whose history is to be read.

  Args:
    cost: `cost(num_bytes)`, what a wait is divided by, over 0 for more than 0 bytes.
  """

  def __init__(self, cost: Callable[[int], float]):
    self._cost = cost
    self._at: dict[int, int] = {}  # user -> its column, all below len(self)
    self._columns = np.zeros((4, 16))  # arrival_s, cost, bytes, user

  def __len__(self) -> int:
    return len(self._at)

  def __contains__(self, user: int) -> bool:
    return user in self._at

  def add(self, user: int, arrival_s: float, num_bytes: int) -> None:
    """A history of a user who has none here."""
    at = self._at[user] = len(self._at)
    if at == self._columns.shape[1]:
      self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
    self._columns[:, at] = arrival_s, self._cost(num_bytes), num_bytes, user

  def remove(self, user: int) -> None:
    """Out, if it is there; the last column takes its place."""
    at = self._at.pop(user, None)
    last = len(self._at)
    if at is not None and at != last:
      self._columns[:, at] = self._columns[:, last]
      self._at[int(self._columns[3, at])] = at

  def choose(self, now: float, most_bytes: float) -> int | None:
    """The user of the highest ratio, of equal ones who came first, then of the smallest id.

    Args:
      now: seconds.
      most_bytes: who has more is passed over.
    """
    arrival_s, cost, num_bytes, users = self._columns[:, : len(self._at)]
    allowed = np.flatnonzero(num_bytes <= most_bytes)
    if not allowed.size:
      return None
    ratio = (now - arrival_s[allowed]) / cost[allowed]  # the 1 of R changes no order
    best = allowed[ratio == ratio.max()]
    return int(users[min(best.tolist(), key=lambda at: (arrival_s[at], users[at]))])
