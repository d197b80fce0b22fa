"""Hits without time: by hand, and policies in their known order."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.sim.generator import INTERACTIVE, generate
from kvjax.sim.replay import POLICIES, replay
from kvjax.sim.workloads import Turn, from_turns

BY_NAME = {policy.name: policy for policy in POLICIES}


def hits(name: str, users: str) -> list[int]:
  """Of turns of 10 tokens that all conversations keep; host memory of 2, free space apart."""
  turns = [Turn(ord(user), float(at), 5, 5, 0) for at, user in enumerate(users)]
  return replay(from_turns(name, turns), BY_NAME[name], 22, 1, 10).astype(int).tolist()


def test_by_hand():
  #                               a  b  a  c  a  b  b
  assert hits("lru", "abacabb") == [0, 0, 1, 0, 1, 0, 1]
  assert hits("fifo", "abacabb") == [0, 0, 1, 0, 0, 0, 1]
  assert hits("belady", "abcbca") == [0, 0, 0, 1, 1, 0]  # a, the farthest, makes way for c
  assert hits("queue_lru", "abcab") == [0, 0, 0, 1, 0]  # a and b come soon, b later


def test_who_knows_more_misses_less():
  workload = generate(INTERACTIVE, 600, 25, 0)
  later = (workload.previous >= 0) & (np.arange(len(workload)) > len(workload) // 2)
  rate = {
    name: 1 - replay(workload, BY_NAME[name], 200_000, 1, 2048)[later].mean()
    for name in ("lru", "previous_answer", "belady")
  }
  assert rate["belady"] < rate["previous_answer"] < rate["lru"]
  assert rate["lru"] == pytest.approx(0.7, abs=0.2)


def test_where_memory_nearly_suffices_previous_answer_is_no_worse_than_lru():
  """Nearly all P are nearly 1 there; what is left of their differences is not worth a miss."""
  workload = generate(INTERACTIVE, 500, 20, 0)
  later = (workload.previous >= 0) & (np.arange(len(workload)) > len(workload) // 2)
  lru, mine = (
    1 - replay(workload, BY_NAME[name], 420_000, 1, 2048)[later].mean()
    for name in ("lru", "previous_answer")
  )
  assert 0 < mine < lru + 0.02
