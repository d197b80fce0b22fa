"""Bidaw's eviction: who has just got a long answer will not be back soon (FAST 2026).

A user's next reuse distance (`reuse`) falls into one of nine buckets: *small*, less than host
memory holds; seven *promising* ones up to 2.4 times that (the paper's 200 to 480 GB by 40 at 200
GB); and *extreme*. For each history in host memory

    prior_b = how often the user's own distances, and everybody's, were in bucket b
    P = sum of prior_b * hit_b over buckets that reach beyond the lower bound / their sum of prior_b

where the lower bound is that of the last answer's length (`envelope`), and hit_b is 1 for small, 0
for extreme, and between them what Belady's policy would have hit of late (`ghost`). The smallest P
goes first, of equal ones the least recently used.

What the paper leaves open [ours]:

* prior: own counts, and the histogram of all users as three more, which decide for new users. Own
  counts are halved when there are 32; the histogram, Laplace-smoothed, is of the last accesses.
* envelope, ghost and histogram are of the last 10,000 accesses and made again every 1,000, so that
  they follow a workload that changes; in slices, one with each arrival, so that nobody waits for
  them. Until the first are made, and while answer lengths say nothing, that is while Spearman of
  the envelope is under a half, the least recently used history goes first.
* P is rounded to a 16th. Smaller differences are those of how often somebody was here, and would
  let new users go before those who have left for good, which matters when memory nearly suffices.
* a distance is at least what has passed of it, so P falls as time goes by, and who never comes back
  is given up in the end; `passed=False` is without this, as the paper has it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Generator

import numpy as np

from kvjax.bidaw.envelope import Envelope, envelope_in_slices
from kvjax.bidaw.ghost import Access, hit_rates_in_slices
from kvjax.bidaw.ranking import Ranking
from kvjax.bidaw.reuse import ReuseDistances
from kvjax.bidaw.slices import finished

PROMISING = 7
NUM_BUCKETS = PROMISING + 2
WINDOW, EVERY = 10_000, 1_000  # accesses
LEAST_SPEARMAN = 0.5
GRADES = 16  # of P
_BACKOFF, _MOST_COUNTS = 3, 32
_MOVED_AT_ONCE = 16  # users


def bucket_edges(host_bytes: int) -> list[float]:
  """Upper edges of all buckets but the last, which has none; a distance on an edge is above it."""
  return [host_bytes * (5 + i) / 5 for i in range(PROMISING + 1)]


def worth(prior: list[float], hit: list[float], first: int) -> float:
  """P of the module's text, over the buckets from `first` on; 0 where the prior has none."""
  total = sum(prior[first:])
  return sum(p * h for p, h in zip(prior[first:], hit[first:], strict=True)) / total if total else 0


@dataclasses.dataclass(slots=True)
class _User:
  """What is known of one user.

  Attributes:
    counts: own distances in each bucket.
    tick: number of its last access.
    passed: bucket of what has passed of the next distance.
    answer_tokens: of the last answer, None before it.
  """

  counts: list[float]
  tick: int = -1
  passed: int = 0
  answer_tokens: int | None = None


class PreviousAnswer:
  """Smallest P first; an `Eviction`.

  Args:
    host_bytes: of the host memory for histories.
    passed: whether P takes account of what has passed since the user was last here.
    window: accesses that envelope, ghost and histogram are made of.
    every: accesses after which they are made again.

  Attributes:
    envelope: lower bounds in force.
    hit: hit_b in force.
  """

  def __init__(
    self, host_bytes: int, *, passed: bool = True, window: int = WINDOW, every: int = EVERY
  ):
    self.envelope = Envelope([], [], 0.0)
    self.hit = [1 - bucket / (NUM_BUCKETS - 1) for bucket in range(NUM_BUCKETS)]
    self._host_bytes, self._use_passed, self._every = host_bytes, passed, every
    self._edges = bucket_edges(host_bytes)
    self._reuse = ReuseDistances(int(2 * self._edges[-1]))
    self._everyone = [1 / NUM_BUCKETS] * NUM_BUCKETS
    self._users: dict[int, _User] = {}
    self._ranking = Ranking(self._key)
    self.insert, self.remove = self._ranking.insert, self._ranking.remove
    self.pin, self.unpin = self._ranking.pin, self._ranking.unpin
    self._window: deque[Access] = deque(maxlen=window)  # of turns that have ended
    self._samples = np.zeros((window, 2), np.int64)  # a ring: answer length, distance
    self._num_samples = 0  # so far
    self._at_arrival: dict[int, int | None] = {}  # user -> bucket, of turns that have not ended
    self._waiting = [OrderedDict[int, None]() for _ in self._edges]  # by `passed`, oldest first
    self._flow = 0  # bytes that arrivals and answers have added to distances
    self._due = [0.0] * len(self._edges)  # flow before which nobody passes each edge
    self._accesses = self._begun = 0
    self._making: Generator[None, None, None] | None = None

  @property
  def falls_back(self) -> bool:
    """Whether answer lengths say too little, so that this is LRU."""
    return self.envelope.spearman < LEAST_SPEARMAN

  def arrived(self, user: int, now: float) -> None:
    """Measures the distance; after every so many arrivals makes all tables again."""
    del now
    state = self._user(user)
    distance = self._reuse.access(user)
    self._at_arrival[user] = None
    if state.tick >= 0:
      distance = self._reuse.limit_bytes if distance is None else distance
      self._at_arrival[user] = self._bucket(distance)
      self._learn(state, distance)
    self._flow += self._reuse.size_bytes(user)
    self._accesses += 1
    self._move(user, state, 0)
    state.tick = self._accesses
    self._go_on()
    self._ranking.rank_again(user)

  def answered(self, user: int, now: float, answer_tokens: int, size_bytes: int) -> None:
    del now
    self._user(user).answer_tokens = answer_tokens
    self._flow += max(0, size_bytes - self._reuse.size_bytes(user))
    self._reuse.resize(user, size_bytes)
    self._pass_time()
    self._window.append(Access(user, size_bytes, self._at_arrival.pop(user, None)))
    self._ranking.rank_again(user)

  def victim(self) -> int | None:
    self._pass_time()
    return self._ranking.pop()

  def forget(self, user: int) -> None:
    state = self._users.pop(user, None)
    if state is not None and state.passed < len(self._waiting):
      self._waiting[state.passed].pop(user, None)
    self._at_arrival.pop(user, None)

  def refresh(self) -> None:
    """Makes at once what is being made again in slices, if anything is."""
    if self._making is not None:
      finished(self._making)
      self._making = None

  def _go_on(self) -> None:
    """One slice; after so many accesses the tables are begun again."""
    if self._making is None and self._accesses - self._begun >= self._every:
      self._begun, self._making = self._accesses, self._made_again()
    if self._making is not None and next(self._making, self) is self:
      self._making = None

  def _made_again(self) -> Generator[None, None, None]:
    """Envelope, hit rates and histogram; then all histories are ranked anew."""
    samples = self._samples[: self._num_samples].copy()
    at_once = -(-4 * len(self._window) // self._every) or 1
    if len(samples):
      tokens, distances = samples.T
      envelope = yield from envelope_in_slices(tokens, distances)
      buckets = np.searchsorted(self._edges, distances, side="right")
      counts = np.bincount(buckets, minlength=NUM_BUCKETS) + 1
      yield
      hit = yield from hit_rates_in_slices(
        list(self._window), self._host_bytes, NUM_BUCKETS, at_once
      )
      self._everyone = (counts / counts.sum()).tolist()
      self.envelope, self.hit = envelope, [1.0, *hit[1:-1], 0.0]
    users = list(self._ranking)
    at_once = -(-4 * len(users) // self._every) or 1
    for number, user in enumerate(users, 1):
      self._ranking.rank_again(user)
      if number % at_once == 0:
        yield

  def _learn(self, state: _User, distance: int) -> None:
    state.counts[self._bucket(distance)] += 1
    if sum(state.counts) >= _MOST_COUNTS:
      state.counts = [count / 2 for count in state.counts]
    if state.answer_tokens is not None:
      self._samples[self._num_samples % len(self._samples)] = state.answer_tokens, distance
      self._num_samples += 1

  def _pass_time(self) -> None:
    """Moves users on whose distance has passed an edge; those of longest ago are asked first.

    At most so many at once. Who waits at an edge is not asked before enough bytes have flowed.
    """
    left = _MOVED_AT_ONCE
    for bucket, waiting in enumerate(self._waiting):
      while waiting and left and self._flow >= self._due[bucket]:
        user = next(iter(waiting))
        missing = self._edges[bucket] - self._reuse.since(user)
        if missing > 0:
          self._due[bucket] = self._flow + missing
          break
        self._move(user, self._users[user], bucket + 1)
        self._ranking.rank_again(user)
        left -= 1

  def _move(self, user: int, state: _User, passed: int) -> None:
    """Into the queue of those of whose distance so much has passed; the extreme have none."""
    if not self._use_passed:
      return
    if state.passed != passed and state.passed < len(self._waiting):
      self._waiting[state.passed].pop(user, None)
    state.passed = passed
    if passed < len(self._waiting):
      if not self._waiting[passed]:
        self._due[passed] = 0
      self._waiting[passed][user] = None
      self._waiting[passed].move_to_end(user)  # to take it out and in would fill the table

  def _key(self, user: int) -> tuple[int, int]:
    state = self._user(user)
    if self.falls_back:
      return 0, state.tick
    first = state.passed
    if state.answer_tokens is not None:
      first = max(first, self._bucket(self.envelope.lower_bound(state.answer_tokens)))
    prior = [own + _BACKOFF * all_ for own, all_ in zip(state.counts, self._everyone, strict=True)]
    return round(GRADES * worth(prior, self.hit, first)), state.tick

  def _bucket(self, distance: float) -> int:
    return bisect.bisect_right(self._edges, distance)

  def _user(self, user: int) -> _User:
    state = self._users.get(user)
    if state is None:
      state = self._users[user] = _User([0.0] * NUM_BUCKETS)
    return state
