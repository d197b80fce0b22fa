"""What is asked of a serving loop, and what became of it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """One prompt to continue.

  Attributes:
    id: unlike that of every other request that has not ended.
    prompt: token ids.
    max_new_tokens: most new tokens.
    user: whose it is, for fairness and for schedulers.
    arrival_s: when it arrives, in seconds of the clock.
    stop_ids: tokens that end it.
  """

  id: int
  prompt: tuple[int, ...]
  max_new_tokens: int
  user: int = 0
  arrival_s: float = 0.0
  stop_ids: Collection[int] = ()


class Outcome(enum.StrEnum):
  """How a request ended.

  DONE: it met a stop token or made all its tokens. CANCELLED: someone did not want it any more.
  UNFIT: no slot can ever hold it, or it is no prompt of this model. QUEUE_FULL: too many waited.
  FAILED: its row outgrew what the store keeps of it; the tokens before that are good.
  """

  DONE = enum.auto()
  CANCELLED = enum.auto()
  UNFIT = enum.auto()
  QUEUE_FULL = enum.auto()
  FAILED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
  """A request that has ended. Times are seconds of the clock, None for what never happened.

  Attributes:
    request: what was asked.
    outcome: how it ended.
    tokens: new tokens, without the stop token.
    ended_s: when.
    started_s: when its prompt was first read.
    first_token_s: when its first token was there.
    preemptions: times that it lost its slot and began again.
    sat_out: steps that it sat out, since what it needs was on its way.
    reason: in words, why it is UNFIT or FAILED.
  """

  request: Request
  outcome: Outcome
  tokens: tuple[int, ...]
  ended_s: float
  started_s: float | None = None
  first_token_s: float | None = None
  preemptions: int = 0
  sat_out: int = 0
  reason: str = ""

  @property
  def queueing_s(self) -> float | None:
    """From arrival to when its prompt was first read."""
    return None if self.started_s is None else self.started_s - self.request.arrival_s

  @property
  def ttft_s(self) -> float | None:
    """From arrival to the first token."""
    return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

  @property
  def tpot_s(self) -> float | None:
    """Seconds of each token after the first, waits and preemptions included."""
    if self.first_token_s is None or len(self.tokens) < 2:
      return None
    return (self.ended_s - self.first_token_s) / (len(self.tokens) - 1)


@dataclasses.dataclass(slots=True)
class Usage:
  """What one user has had so far, for fairness.

  Attributes:
    arrived: requests.
    ended: requests, however they ended.
    prompt_tokens: that were read, again after a preemption too.
    new_tokens: that were made, each counted once.
    queueing_s: seconds before its requests were started, summed.
  """

  arrived: int = 0
  ended: int = 0
  prompt_tokens: int = 0
  new_tokens: int = 0
  queueing_s: float = 0.0
