"""One queue for computing and reading, as the systems that Bidaw is compared with have it.

Requests are served strictly in the order in which they arrived, and histories are read ahead in the
same order. Whose history is on its way from disk holds up everybody behind it. If host memory is
full of histories of requests that wait, the last of them makes way for the first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from kvjax.bidaw.conversations import Placement, Where
from kvjax.bidaw.disk import Disk
from kvjax.bidaw.ready import MOST_PASSED, Request
from kvjax.bidaw.scheduler import DualQueue


class InOrder[R: Request](DualQueue[R]):
  """First come, first served, whatever has to be read; a `Scheduler`.

  CachedAttention's look-ahead window is as long as host memory allows: what waits is read until
  nothing is left to make room.

  Args:
    placement: where histories lie; nobody else makes it read or pin.
    disk: reads them.
    skip_ahead: whether a request that does not fit into the device's memory is passed over, as in
      FlashGen; one that waits for the disk never is.
  """

  def __init__(self, placement: Placement, disk: Disk, *, skip_ahead: bool = False):
    super().__init__(placement, disk, cost=lambda num_bytes: 1.0)  # so the longest wait is first
    self._most_passed = MOST_PASSED if skip_ahead else 1
    self._unread_heap: list[tuple[float, int, int]] = []  # arrival, id, user
    self._in_host_heap: list[tuple[float, int]] = []  # the same, negative: the last is first

  def next(self, now: float, fits: Callable[[R], bool]) -> R | None:
    """Takes out the request that arrived first; None while its history is read."""
    self.poll(now)
    first, unread = self._ready.first(), self._first_unread()
    if first is None or (unread is not None and _order(unread) < _order(first)):
      return None
    return self._take(fits, unread)

  def _take(self, fits: Callable[[R], bool], unread: R | None) -> R | None:
    def may(request: R) -> bool:
      return (unread is None or _order(request) < _order(unread)) and fits(request)

    request = self._ready.take(may, self._most_passed)
    if request is not None:
      self._started.add(request.id)
    return request

  def _make_ready(self, request: R) -> None:
    super()._make_ready(request)
    if self._in_host(request.user):
      heapq.heappush(self._in_host_heap, (-request.arrival_s, -request.id))
    if len(self._in_host_heap) > 2 * len(self._ready) + 64:  # mostly those that have started
      self._in_host_heap = [one for one in self._in_host_heap if self._ready.get(-one[1])]
      heapq.heapify(self._in_host_heap)

  def _wait_for_history(self, request: R) -> None:
    super()._wait_for_history(request)
    heapq.heappush(self._unread_heap, (request.arrival_s, request.id, request.user))

  def _choose(self, now: float) -> int | None:
    user = self._preparing.choose(now, math.inf)
    assert user is not None
    size, turn = self._placement.size_bytes(user), _order(self._unread[user])
    while size > self._placement.readable_bytes:
      last = self._last_in_host()
      if last is None or _order(last) <= turn:
        return None
      self._ready.remove(last.id)
      self._placement.give_up(last.user)
      self._admit(last)
    return user

  def _in_host(self, user: int) -> bool:
    return self._placement.where(user) is Where.HOST

  def _last_in_host(self) -> R | None:
    """The last ready request whose history is in host memory, which stays."""
    while self._in_host_heap:
      request = self._ready.get(-self._in_host_heap[0][1])
      if request is not None and self._in_host(request.user):
        return request
      heapq.heappop(self._in_host_heap)  # it has started, was dropped, or has made way
    return None

  def _first_unread(self) -> R | None:
    while self._unread_heap:
      _, id, user = self._unread_heap[0]
      request = self._unread.get(user)
      if request is not None and request.id == id:
        return request
      heapq.heappop(self._unread_heap)
    return None


def _order(request: Request) -> tuple[float, int]:
  return request.arrival_s, request.id
