"""What time it is for a serving loop: that of the wall, or that of a simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
  """Seconds since the clock was made.

  `now()` tells them. `spend(seconds)` says what a backend has just taken, by its own account.
  `wait_until(then)` comes back at that time, at once if it has passed.
  """

  def now(self) -> float: ...
  def spend(self, seconds: float) -> None: ...
  def wait_until(self, then: float) -> None: ...


class VirtualClock:
  """Time that passes only by what is said to take time."""

  def __init__(self):
    self._now = 0.0

  def now(self) -> float:
    return self._now

  def spend(self, seconds: float) -> None:
    self._now += seconds

  def wait_until(self, then: float) -> None:
    self._now = max(self._now, then)


class WallClock:
  """Real time; what a backend takes passes by itself."""

  def __init__(self):
    self._start = time.monotonic()

  def now(self) -> float:
    return time.monotonic() - self._start

  def spend(self, seconds: float) -> None:
    del seconds

  def wait_until(self, then: float) -> None:
    time.sleep(max(0.0, then - self.now()))
