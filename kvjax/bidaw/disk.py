"""The disk, as far as the scheduler sees it: reads that begin, and end some time later."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Read(NamedTuple):
  """A read that has ended.

  Attributes:
    user: whose history.
    ended_s: when, in seconds of the clock.
    good: whether it is there; False for one that is damaged, gone, or took too long.
  """

  user: int
  ended_s: float
  good: bool = True


class Disk(Protocol):
  """What reads histories.

  * `begin(user, num_bytes, now)`: begins to read one.
  * `ended(now)`: the reads that have ended by now and were not told before, the first first.
  * `wakes_at(now)`: when to ask again; None while nothing is being read.
  * `read_s(num_bytes)`: about how long a read takes that does not wait for another one.
  """

  def begin(self, user: int, num_bytes: int, now: float) -> None: ...
  def ended(self, now: float) -> Sequence[Read]: ...
  def wakes_at(self, now: float) -> float | None: ...
  def read_s(self, num_bytes: int) -> float: ...


class TimedDisk:
  """A disk in virtual time: one read after the other, each in the order in which it began.

  Args:
    bytes_per_s: of a read.
    seek_s: before its first byte.

  Attributes:
    busy_s: that it has read, or will once what has begun has ended.
    read_bytes: likewise.
    free_s: when all that has begun has ended.

  Raises:
    ValueError: a disk that never ends.
  """

  def __init__(self, bytes_per_s: float, seek_s: float = 0.0):
    if not bytes_per_s > 0 or not seek_s >= 0:
      raise ValueError(
        f"a disk of {bytes_per_s} bytes/s after {seek_s} s; give it more than 0 bytes/s and 0 s on"
      )
    self._bytes_per_s, self._seek_s = bytes_per_s, seek_s
    self.free_s = self.busy_s = 0.0
    self.read_bytes = 0
    self._reads: list[tuple[float, int]] = []

  def read_s(self, num_bytes: int) -> float:
    return self._seek_s + num_bytes / self._bytes_per_s

  def begin(self, user: int, num_bytes: int, now: float) -> None:
    seconds = self.read_s(num_bytes)
    self.free_s = max(self.free_s, now) + seconds
    self.busy_s += seconds
    self.read_bytes += num_bytes
    heapq.heappush(self._reads, (self.free_s, user))

  def ended(self, now: float) -> list[Read]:
    reads = []
    while self._reads and self._reads[0][0] <= now:
      ended_s, user = heapq.heappop(self._reads)
      reads.append(Read(user, ended_s))
    return reads

  def wakes_at(self, now: float) -> float | None:
    return max(now, self._reads[0][0]) if self._reads else None
