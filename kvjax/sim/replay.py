"""Plays a workload on a placement without any time: which turns find their history in host memory?

Turns come one after another, each to its end before the next, so nothing depends on how fast a
machine is; that is how Bidaw's scripts count hits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.bidaw import (
  Eviction,
  InTheWild,
  Placement,
  PreviousAnswer,
  Where,
  belady,
  fifo,
  lru,
  queue_lru,
  s3fifo,
)
from kvjax.eviction import next_uses
from kvjax.sim.workloads import Workload

LOOK_AHEAD = 30  # requests, as in the scripts


class Cursor:
  """Where in the workload a replay is, for policies that are told what comes.

  Args:
    workload: that is played.
  """

  def __init__(self, workload: Workload):
    self.at = 0
    self._users = workload.user.tolist()
    self._next = next_uses(self._users).tolist()

  def next_use(self, user: int) -> float:
    """When the request after the one that is played comes; only for its own user."""
    assert self._users[self.at] == user
    return self._next[self.at]

  def soon(self) -> Sequence[int]:
    """Users of the requests after this one."""
    return self._users[self.at + 1 : self.at + 1 + LOOK_AHEAD]


class Policy(NamedTuple):
  """A policy that can be replayed.

  Attributes:
    name: of it.
    make: `make(host_bytes, histories, cursor)`, for host memory of about so many histories.
  """

  name: str
  make: Callable[[int, int, Cursor], Eviction]


POLICIES = (
  Policy("fifo", lambda host_bytes, histories, cursor: fifo()),
  Policy("lru", lambda host_bytes, histories, cursor: lru()),
  Policy("s3fifo", lambda host_bytes, histories, cursor: s3fifo(histories)),
  Policy("queue_lru", lambda host_bytes, histories, cursor: queue_lru(cursor.soon)),
  Policy("in_the_wild", lambda host_bytes, histories, cursor: InTheWild()),
  Policy("previous_answer", lambda host_bytes, histories, cursor: PreviousAnswer(host_bytes)),
  Policy("belady", lambda host_bytes, histories, cursor: belady(cursor.next_use)),
)


def replay(
  workload: Workload, policy: Policy, host_bytes: int, token_bytes: int, max_tokens: int
) -> np.ndarray:
  """bool[R], whether each turn finds its history; False for first turns.

  Args:
    workload: conversations.
    policy: who leaves.
    host_bytes: of host memory.
    token_bytes: that are kept of a token.
    max_tokens: that are kept of a conversation.
  """
  sizes = (np.minimum(workload.total_tokens, max_tokens) * token_bytes).tolist()
  cursor = Cursor(workload)
  histories = max(1, int(host_bytes / max(1.0, float(np.mean(sizes)))))
  placement = Placement(host_bytes, policy.make(host_bytes, histories, cursor))
  hits = np.zeros(len(workload), bool)
  for at, (turn, size) in enumerate(zip(workload, sizes, strict=True)):
    cursor.at = at
    hits[at] = placement.arrive(turn.user, turn.arrival_s) is Where.HOST
    if placement.where(turn.user) is Where.DISK and placement.begin_read(turn.user):
      placement.end_read(turn.user)
    placement.end_turn(turn.user, turn.arrival_s, turn.answer_tokens, size)
    placement.unpin(turn.user)
  return hits
