"""Seconds of what an engine does, as they were measured, instead of what a machine would take.

`kvjax.sim.costs` says what a model takes on a machine whose engine wastes nothing. A real one reads
prompts in whole chunks, decodes a batch with empty rows in it, and moves things about when a turn
starts and ends; on a small model that is most of the time. Each number here is the mean of one kind
of operation, so that it can be measured where it happens; three say how much longer operations take
beside a read, when a loop wakes up, and at times at which a machine is slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

PACE_S = 0.25  # of a run, in which a machine is taken to be equally fast


class EngineCosts(NamedTuple):
  """Seconds, but for the first two, a share and the pace.

  Attributes:
    chunk_tokens: that a chunk of a prefill has, and a block in which a history comes back.
    segments: tokens of each segment of a slot.
    start_s: of every start.
    chunk_s: of each chunk that it reads.
    restore_s: of each block of keys and values that it puts back.
    attend_s: of each block that a chunk attends to, of those before it.
    step_s: of every step, with what the loop does around it.
    row_s: of each row of a step.
    token_s: of each token of a slot's segments that a step reads; see `reached_tokens`.
    cold_s: by which the first step after a start or an end takes longer; see `coldness`.
    store_s: to store a turn that has ended, before anything else goes on.
    lost_beside_read: seconds that all of this loses in each in which the disk reads; below 1.
    wake_s: by which a loop that sleeps goes on late.
    pace: how many times as long all of this takes in the first `PACE_S`, in the second, and so on;
      once as long after them.
  """

  chunk_tokens: int
  segments: tuple[int, ...]
  start_s: float
  chunk_s: float
  restore_s: float
  attend_s: float
  step_s: float
  row_s: float
  token_s: float
  cold_s: float
  store_s: float
  lost_beside_read: float
  wake_s: float
  pace: tuple[float, ...] = ()

  def pace_at(self, now: float) -> tuple[float, float]:
    """How many times as long everything takes at a second of the run, and until which it does."""
    period = int(now / PACE_S)
    if period >= len(self.pace):
      return 1.0, math.inf
    return self.pace[period], (period + 1) * PACE_S

  def starting_s(self, reloaded: int, read: int) -> float:
    """Seconds of a start.

    Args:
      reloaded: tokens of the history that is at hand; the last of them was an answer's last, which
        no step was given, so that it has no keys and values and is read with the rest.
      read: other tokens that are read.
    """
    kept = max(0, reloaded - 1)
    chunks, restored, attended = start_parts(self.chunk_tokens, kept, reloaded + read)
    blocks_s = restored * self.restore_s + attended * self.attend_s
    return self.start_s + chunks * self.chunk_s + blocks_s

  def stepping_s(self, rows: int, longest: int, since: int) -> float:
    """Seconds of a step.

    Args:
      rows: that it has.
      longest: tokens of the longest of them.
      since: steps between the latest start or end and this one.
    """
    read_s = reached_tokens(self.segments, longest) * self.token_s
    return self.step_s + rows * self.row_s + read_s + coldness(since) * self.cold_s


def coldness(since: int) -> float:
  """How much of `cold_s` a step takes, so many steps after the first one.

  After a start or an end steps are slower for a while: as measured, each by half as much as the one
  before.

  >>> [coldness(since) for since in (0, 1, 2)]
  [1.0, 0.5, 0.25]
  """
  return 0.5**since


def reached_tokens(segments: Sequence[int], longest: int) -> int:
  """Tokens of a slot that a step reads: whole segments of all slots, as far as any row goes.

  Args:
    segments: tokens of each.
    longest: tokens of the longest row.

  >>> reached_tokens((1024, 1024, 2048), 1025)
  2048
  """
  ends = list(itertools.accumulate(segments))
  return next((end for end in ends if longest <= end), ends[-1])


def start_parts(chunk_tokens: int, kept: int, tokens: int) -> tuple[int, int, int]:
  """Chunks that a start reads, blocks that it puts back, and blocks that all its chunks attend to.

  Chunks begin at multiples of their length, so what is kept of the first one is read once more.

  Args:
    chunk_tokens: of a chunk, and of a block.
    kept: first tokens of the row, with keys and values at hand.
    tokens: of the row, history and prompt.

  >>> start_parts(64, kept=70, tokens=130)
  (2, 2, 3)
  """
  read = range(kept // chunk_tokens, -(-tokens // chunk_tokens))
  return len(read), -(-kept // chunk_tokens), sum(read)
