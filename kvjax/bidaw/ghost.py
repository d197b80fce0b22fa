"""A cache of sizes only, played over what has happened: what would Belady's policy have hit?

The recent past is the only trace of which the future is known. How often Belady would have hit
the accesses of each bucket of reuse distances is what Bidaw hopes of a history that is expected
back in that bucket.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.eviction import next_uses


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
  following = next_uses([access.user for access in accesses]).tolist()
  held: dict[int, tuple[float, int]] = {}  # user -> (-next use, bytes)
  heap: list[tuple[float, int]] = []
  hits: list[bool | None] = []
  seen: set[int] = set()
  used = 0
  for (user, size, _), later in zip(accesses, following, strict=True):
    old = held.pop(user, None)
    hits.append(old is not None if user in seen else None)
    seen.add(user)
    used -= old[1] if old else 0
    if later == float("inf"):
      continue
    held[user] = -later, size
    heapq.heappush(heap, (-later, user))
    used += size
    while used > capacity_bytes:
      next_use, farthest = heapq.heappop(heap)
      if farthest in held and held[farthest][0] == next_use:  # else it was used, or left, since
        used -= held.pop(farthest)[1]
  return hits


def hit_rates(accesses: Sequence[Access], capacity_bytes: int, num_buckets: int) -> list[float]:
  """Belady's hit rate in each bucket; that of the bucket before where nothing was accessed."""
  hits, counts = [0] * num_buckets, [0] * num_buckets
  for access, hit in zip(accesses, belady_hits(accesses, capacity_bytes), strict=True):
    if hit is not None and access.bucket is not None:
      hits[access.bucket] += hit
      counts[access.bucket] += 1
  rates, rate = [], 1.0
  for hit, count in zip(hits, counts, strict=True):
    rate = hit / count if count else rate
    rates.append(rate)
  return rates
