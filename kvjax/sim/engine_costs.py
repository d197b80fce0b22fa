"""Seconds of what an engine does, as they were measured, instead of what a machine would take.

`kvjax.sim.costs` says what a model takes on a machine whose engine wastes nothing. A real one reads
prompts in whole chunks, decodes a batch with empty rows in it, and moves things about when a turn
starts and ends; on a small model that is most of the time. Each number here is the mean of one kind
of operation, so that it can be measured where it happens.
"""

from __future__ import annotations

from typing import NamedTuple


class EngineCosts(NamedTuple):
  """Seconds, but for the first.

  Attributes:
    chunk_tokens: that a chunk of a prefill has, and a block in which a history comes back.
    start_s: of every start.
    chunk_s: of each chunk that it reads.
    restore_s: of each block of keys and values that it puts back, and of attending to it.
    step_s: of every step, with what the loop does around it.
    row_s: of each row of a step.
    token_s: of each token that a step attends to, of all rows.
    store_s: to store a turn that has ended, before anything else goes on.
  """

  chunk_tokens: int
  start_s: float
  chunk_s: float
  restore_s: float
  step_s: float
  row_s: float
  token_s: float
  store_s: float

  def starting_s(self, reloaded: int, read: int) -> float:
    """Seconds of a start.

    Args:
      reloaded: tokens of the history that is at hand; the last of them was an answer's last, which
        no step was given, so that it has no keys and values and is read with the rest.
      read: other tokens that are read.
    """
    kept = max(0, reloaded - 1)
    chunks, blocks = start_parts(self.chunk_tokens, kept, reloaded + read)
    return self.start_s + chunks * self.chunk_s + blocks * self.restore_s


def start_parts(chunk_tokens: int, kept: int, tokens: int) -> tuple[int, int]:
  """Chunks that a start reads and blocks that it puts back.

  Chunks begin at multiples of their length, so what is kept of the first one is read once more.

  Args:
    chunk_tokens: of a chunk, and of a block.
    kept: first tokens of the row, with keys and values at hand.
    tokens: of the row, history and prompt.

  >>> start_parts(64, kept=70, tokens=130)
  (2, 2)
  """
  return -(-tokens // chunk_tokens) - kept // chunk_tokens, -(-kept // chunk_tokens)
