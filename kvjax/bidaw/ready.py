"""Requests that could be computed now, in the order in which they first arrived."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

MOST_PASSED = 32


class Request(Protocol):
  """What is read of a `kvjax.engine.requests.Request`."""

  @property
  def id(self) -> int: ...
  @property
  def user(self) -> int: ...
  @property
  def arrival_s(self) -> float: ...


class Ready[R: Request]:
  """Rs by original arrival, of equal ones by the order in which they were put here.

  To look past requests that do not fit takes time, so a choice looks at 32 of them [ours].
  """

  def __init__(self):
    self._heap: list[tuple[float, int, int]] = []
    self._requests: dict[int, tuple[int, R]] = {}  # id -> number of its entry, itself
    self._entries = 0

  def __len__(self) -> int:
    return len(self._requests)

  def get(self, request_id: int) -> R | None:
    """The request of an id; None if it is not here."""
    return self._requests.get(request_id, (0, None))[1]

  def put(self, request: R) -> None:
    self._entries += 1
    self._requests[request.id] = self._entries, request
    heapq.heappush(self._heap, (request.arrival_s, self._entries, request.id))

  def remove(self, request_id: int) -> None:
    del self._requests[request_id]

  def first(self) -> R | None:
    """The first, which stays; None if there is none."""
    while self._heap:
      _, number, id = self._heap[0]
      current, request = self._requests.get(id, (0, None))
      if current == number:
        return request
      heapq.heappop(self._heap)  # it was removed
    return None

  def take(self, fits: Callable[[R], bool], most_passed: int = MOST_PASSED) -> R | None:
    """Takes out the first that fits, of the first so many; None if there is none."""
    passed, found = [], None
    while self._heap and found is None and len(passed) < most_passed:
      entry = heapq.heappop(self._heap)
      number, request = self._requests.get(entry[2], (0, None))
      if request is None or number != entry[1]:
        continue  # it was removed
      if fits(request):
        found = request
      else:
        passed.append(entry)
    for entry in passed:
      heapq.heappush(self._heap, entry)
    if found is not None:
      del self._requests[found.id]
    return found
