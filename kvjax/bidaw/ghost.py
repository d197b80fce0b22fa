"""A cache of sizes only, played over what has happened: what would Belady's policy have hit?

The recent past is the only trace of which the future is known. How often Belady would have hit
the accesses of each bucket of reuse distances is what Bidaw hopes of a history that is expected
back in that bucket.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

from kvjax.bidaw.slices import finished


class Access(NamedTuple):
  """One access of a trace.

  Attributes:
    user: whose history.
    size_bytes: of it, once this turn has ended.
    bucket: of its weighted reuse distance; None if it had none.
  """

  user: int
  size_bytes: int
  bucket: int | None


def belady_hits(accesses: Sequence[Access], capacity_bytes: int) -> list[bool | None]:
  """Whether each access finds its user's history; None for the first of a user.

  The farthest next use goes until the rest fits, the history that was just used among them; a
  history without a next use does not stay. With histories of different sizes this is not the best
  that could be done, but it is what the paper's scripts call Belady.
  """
  return finished(_hits(accesses, capacity_bytes, max(1, len(accesses))))


def hit_rates(accesses: Sequence[Access], capacity_bytes: int, num_buckets: int) -> list[float]:
  """Belady's hit rate in each bucket; that of the bucket before where nothing was accessed."""
  whole = max(1, len(accesses))
  return finished(hit_rates_in_slices(accesses, capacity_bytes, num_buckets, whole))


def hit_rates_in_slices(
  accesses: Sequence[Access], capacity_bytes: int, num_buckets: int, at_once: int
) -> Generator[None, None, list[float]]:
  """`hit_rates`, which stops after every so many accesses."""
  played = yield from _hits(accesses, capacity_bytes, at_once)
  hits, counts = [0] * num_buckets, [0] * num_buckets
  for begin in range(0, len(accesses), at_once):
    end = begin + at_once
    for access, hit in zip(accesses[begin:end], played[begin:end], strict=True):
      if hit is not None and access.bucket is not None:
        hits[access.bucket] += hit
        counts[access.bucket] += 1
    yield
  rates, rate = [], 1.0
  for hit, count in zip(hits, counts, strict=True):
    rate = hit / count if count else rate
    rates.append(rate)
  return rates


def _hits(
  accesses: Sequence[Access], capacity_bytes: int, at_once: int
) -> Generator[None, None, list[bool | None]]:
  following = yield from _next_uses(accesses, at_once)
  held: dict[int, tuple[float, int]] = {}  # user -> (-next use, bytes)
  heap: list[tuple[float, int]] = []
  hits: list[bool | None] = []
  seen: set[int] = set()
  used = 0
  for number, ((user, size, _), later) in enumerate(zip(accesses, following, strict=True), 1):
    if number % at_once == 0:
      yield
    old = held.pop(user, None)
    hits.append(old is not None if user in seen else None)
    seen.add(user)
    used -= old[1] if old else 0
    if later == math.inf:
      continue
    held[user] = -later, size
    heapq.heappush(heap, (-later, user))
    used += size
    while used > capacity_bytes:
      next_use, farthest = heapq.heappop(heap)
      if farthest in held and held[farthest][0] == next_use:  # else it was used, or left, since
        used -= held.pop(farthest)[1]
  return hits


def _next_uses(accesses: Sequence[Access], at_once: int) -> Generator[None, None, list[float]]:
  """Of each access the number of its user's next one; inf for none."""
  following, later = [math.inf] * len(accesses), dict[int, float]()
  for number in range(len(accesses) - 1, -1, -1):
    user = accesses[number].user
    following[number] = later.get(user, math.inf)
    later[user] = number
    if number % at_once == 0:
      yield
  return following
