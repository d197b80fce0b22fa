"""S3-FIFO (Yang et al., SOSP 2023): two queues, and a memory of what passed the first one unused.

What is new waits in a *small* queue of a tenth of the capacity and leaves it soon: for the *main*
queue if it was used more than once meanwhile, else for good, and is then remembered for a while as
a *ghost*. What comes back while it is remembered goes to main at once. Main is a FIFO with second
chances: up to three uses are counted, and each of them is another turn.

Where this departs from Algorithm 1 of the paper: it looks at small before each head and not before
each victim, so that promotions do not drain small; the capacity of main is the caller's business;
keys may be barred from going, and are passed over without losing their place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from kvjax.eviction.order import Allowed, check_new, first_allowed, no_victim

SMALL_SHARE = 0.1
MOST_USES = 3


def small_size(capacity: int) -> int:
  """Keys of which the small queue gives up before the main one does."""
  return max(1, round(SMALL_SHARE * capacity))


class S3Fifo:
  """Small queue, main queue, ghosts; an `Order`.

  Args:
    capacity: keys that the cache can hold, about.
    parts_of: what a ghost is known by, if that is not the key itself, asked when a key comes and
      when it goes; what comes is remembered if at least half of its parts are. An OP block is known
      by its tokens, since the same set of them hardly ever comes together again [ours].
  """

  def __init__(
    self, capacity: int, parts_of: Callable[[Hashable], Iterable[Hashable]] = lambda key: (key,)
  ):
    self._parts_of = parts_of
    self._small_size = small_size(capacity)
    self._ghosts_kept = capacity - self._small_size  # evictions that are remembered
    self._small: dict[Hashable, None] = {}  # oldest first, as main and ghosts
    self._main: dict[Hashable, None] = {}
    self._uses: dict[Hashable, int] = {}
    self._ghosts: dict[Hashable, int] = {}  # part -> number of the eviction it went with
    self._evictions = 0  # from small

  def __len__(self) -> int:
    return len(self._uses)

  def __contains__(self, key: Hashable) -> bool:
    return key in self._uses

  def insert(self, key: Hashable) -> None:
    """To main if it is remembered, else to small."""
    check_new(key, self._uses)
    parts = list(self._parts_of(key))
    remembered = sum(part in self._ghosts for part in parts)
    queue = self._main if 2 * remembered >= len(parts) else self._small
    queue[key] = None
    self._uses[key] = 0
    for part in parts:
      self._ghosts.pop(part, None)

  def touch(self, key: Hashable) -> None:
    """Counts up to three uses."""
    self._uses[key] = min(self._uses[key] + 1, MOST_USES)

  def remove(self, key: Hashable) -> None:
    """Out of its queue, without a ghost."""
    del self._uses[key]
    self._small.pop(key, None)
    self._main.pop(key, None)

  def victim(self, allowed: Allowed | None = None) -> Hashable:
    """Gives up the head of small while small is full, else of main; of small where main cannot."""
    while True:
      in_small = first_allowed(self._small, allowed)
      in_main = first_allowed(self._main, allowed)
      if in_small is None and in_main is None:
        raise no_victim(len(self))
      if in_small is not None and (in_main is None or len(self._small) >= self._small_size):
        if self._uses[in_small] <= 1:
          self._remember(self._parts_of(in_small))
          self.remove(in_small)
          return in_small
        del self._small[in_small]
        self._main[in_small] = None
        self._uses[in_small] = 0
      elif self._uses[in_main] == 0:
        self.remove(in_main)
        return in_main
      else:
        self._uses[in_main] -= 1
        self._main[in_main] = self._main.pop(in_main)

  def _remember(self, parts: Iterable[Hashable]) -> None:
    """New ghosts, and none that are older than the last evictions that are kept."""
    for part in parts:
      self._ghosts.pop(part, None)
      self._ghosts[part] = self._evictions
    self._evictions += 1
    while self._ghosts:
      oldest = next(iter(self._ghosts))
      if self._ghosts[oldest] >= self._evictions - self._ghosts_kept:
        break
      del self._ghosts[oldest]
