"""Bidaw's dual queue: who can be computed, and who has to be read from disk first (FAST 2026).

A request whose history is in host memory, or that has none, is *ready*; one whose history is only
on disk is *preparing* until it has been read. The ready are served in the order in which they
arrived, wherever they have waited; who does not fit into the device's memory is passed over, as in
FlashGen. The preparing are read in the order of disk-HRRN (`kvjax.bidaw.preparing`), each to its
end. Computing and reading never wait for each other.

`DualQueue` is a `Scheduler` of `kvjax.engine.serving`. A driver also tells it what has ended:

    placement = Placement(200 * 10**9, PreviousAnswer(200 * 10**9))
    queue = DualQueue(placement, TimedDisk(1.5e9))
    for finished in serve(requests, backend, clock, queue):
      queue.ended(finished.request, finished.ended_s, len(finished.tokens), history_bytes)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvjax.bidaw.conversations import Placement, Where
from kvjax.bidaw.disk import Disk, Read
from kvjax.bidaw.preparing import Preparing
from kvjax.bidaw.ready import Ready, Request

ENDED_AT_ONCE = 8  # reads


class DualQueue[R: Request]:
  """The ready and the preparing queue; a `Scheduler`.

  Turns of one user are served one after the other: a request waits behind the one before it until
  that has ended. The histories of all requests, waiting or started, are pinned.

  Args:
    placement: where histories lie; nobody else makes it read or pin.
    disk: reads them.
    reads_at_once: most reads that have begun and not ended.
    cost: `cost(num_bytes)`, what waiting times are divided by to choose who is read: bytes, or the
      disk's `read_s` for the form in seconds; see `preparing`.

  Raises:
    ValueError: no reads at once.
  """

  def __init__(
    self,
    placement: Placement,
    disk: Disk,
    *,
    reads_at_once: int = 1,
    cost: Callable[[int], float] = float,
  ):
    if reads_at_once < 1:
      raise ValueError(f"reads_at_once is {reads_at_once}; let at least 1 history be read")
    self._placement, self._disk, self._reads_at_once = placement, disk, reads_at_once
    self._ready = Ready[R]()
    self._preparing = Preparing(cost)
    self._reading: set[int] = set()  # users
    self._unread: dict[int, R] = {}  # user -> its request that is preparing or being read
    self._turn: dict[int, R] = {}  # user -> its first request that has not ended
    self._behind: dict[int, deque[R]] = {}  # user -> those after it
    self._num_behind = 0
    self._started: set[int] = set()  # ids

  def __len__(self) -> int:
    return len(self._turn) - len(self._started) + self._num_behind

  @property
  def num_ready(self) -> int:
    """Waiting requests whose history is there, or that have none."""
    return len(self._ready)

  def arrive(self, request: R, now: float) -> None:
    """Waits from now on: for the turn before it, for its history, or to be served."""
    self.poll(now)
    if request.id in self._started:  # it was preempted, and is still its user's turn
      self._started.remove(request.id)
      self._admit(request)
      return
    self._placement.arrive(request.user, now)
    if request.user in self._turn:
      self._behind.setdefault(request.user, deque()).append(request)
      self._num_behind += 1
      return
    self._turn[request.user] = request
    self._admit(request)
    self._begin_reads(now)

  def next(self, now: float, fits: Callable[[R], bool]) -> R | None:
    """Takes out the ready request that arrived first, of those that fit."""
    self.poll(now)
    request = self._ready.take(fits)
    if request is not None:
      self._started.add(request.id)
    return request

  def drop(self, request: R) -> None:
    """Out of whichever queue it is in; a read that has begun goes on."""
    user = request.user
    if self._turn[user].id != request.id:
      self._behind[user] = deque(r for r in self._behind[user] if r.id != request.id)
      self._num_behind -= 1
      if not self._behind[user]:
        del self._behind[user]
      self._placement.unpin(user)
      return
    if self._unread.pop(user, None) is None:
      self._ready.remove(request.id)
    self._preparing.remove(user)
    self._next_turn(user)

  def ended(self, request: R, now: float, answer_tokens: int, history_bytes: int) -> Where:
    """A turn that was started has made its answer; says where the user's history lies now.

    Args:
      request: whose turn.
      now: seconds.
      answer_tokens: that were made.
      history_bytes: of the whole history, with this turn.
    """
    self.poll(now)
    where = self._placement.end_turn(request.user, now, answer_tokens, history_bytes)
    self.gave_up(request, now)
    return where

  def gave_up(self, request: R, now: float) -> None:
    """A started turn ended otherwise, and the history is as before.

    Nothing happens if the request was not started, as one that was dropped.
    """
    if request.id in self._started:
      self._started.remove(request.id)
      self._next_turn(request.user)
      self.poll(now)

  def wakes_at(self, now: float) -> float | None:
    """When the next read ends; now if it just has."""
    return now if self.poll(now) else self._disk.wakes_at(now)

  def poll(self, now: float) -> bool:
    """Sees to the disk; whether a request has become ready.

    Every other call does so first. In real time a driver calls it between steps too, since with all
    slots taken `next` is not asked, and the disk would idle after a read. In virtual time reads
    begin when the one before has ended, however late that is seen. A call sees to about eight of
    them, so that none takes long; the disk wakes who asks for the others.
    """
    before, ended = len(self._unread), 0
    while ended < ENDED_AT_ONCE and (reads := self._disk.ended(now)):
      for read in reads:
        self._end_read(read)
        self._begin_reads(read.ended_s)
      ended += len(reads)
    if ended < ENDED_AT_ONCE:
      self._begin_reads(now)
    return len(self._unread) < before

  def _admit(self, request: R) -> None:
    user = request.user
    match self._placement.where(user):
      case Where.DISK:
        self._wait_for_history(request)
        self._preparing.add(user, request.arrival_s, self._placement.size_bytes(user))
      case Where.READING:  # for a request that was dropped
        self._wait_for_history(request)
      case _:
        self._make_ready(request)

  def _make_ready(self, request: R) -> None:
    self._ready.put(request)

  def _wait_for_history(self, request: R) -> None:
    self._unread[request.user] = request

  def _begin_reads(self, now: float) -> None:
    while self._preparing and len(self._reading) < self._reads_at_once:
      user = self._choose(now)
      if user is None:
        return
      self._preparing.remove(user)
      self._placement.begin_read(user)
      self._reading.add(user)
      self._disk.begin(user, self._placement.size_bytes(user), now)

  def _choose(self, now: float) -> int | None:
    """Whose history is read next."""
    return self._preparing.choose(now, self._placement.readable_bytes)

  def _end_read(self, read: Read) -> None:
    """Promotes the request that waits for it; one whose history is lost is computed anew."""
    self._reading.remove(read.user)
    if read.good:
      self._placement.end_read(read.user)
    else:
      self._placement.lose(read.user)
    if read.user in self._unread:
      self._make_ready(self._unread.pop(read.user))

  def _next_turn(self, user: int) -> None:
    """The user's turn is over; the one behind it comes into its queue."""
    self._placement.unpin(user)
    del self._turn[user]
    if user in self._behind:
      request = self._turn[user] = self._behind[user].popleft()
      self._num_behind -= 1
      if not self._behind[user]:
        del self._behind[user]
      self._admit(request)
