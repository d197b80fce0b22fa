"""Makes conversations: as people hold them with a chat service, and a control without the signal.

Users arrive at random (Poisson). The next question comes when the answer has been read and thought
over:

    gap = answer_tokens / reading_tokens_per_s + pause

so that no gap is much shorter than reading takes: that is the signal Bidaw uses. The numbers of
INTERACTIVE are those of Bidaw's public trace (its parts 1 and 3: 302,000 turns): 22.4 turns a user
with a median of 18 and a 90th percentile of 45, questions of 35 tokens (median 26), answers of 45
(median 38), gaps of 49 s (median 43) whose part beyond 0.6 s a token has a median of 14 s and a
95th percentile of 60 s whatever the answer's length.

CONTROL is like ShareGPT, with 5.7 turns. Its questions of 161 and answers of 338 tokens are our
choice, of the size that serving benchmarks have; we found no source to cite. Gaps are those of a
Poisson process, without think time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvjax.sim.workloads import Workload


class Profile(NamedTuple):
  """What conversations are like. Distributions are named where two numbers are theirs.

  Attributes:
    name: of the workload.
    mean_turns: of a user; gamma, rounded up.
    turns_shape: of that gamma.
    query_tokens: mean; log-normal.
    query_spread: standard deviation of its logarithm.
    answer_tokens: mean; gamma.
    answer_shape: of that gamma.
    pause_s: mean of what a gap has beside reading; log-normal.
    pause_spread: standard deviation of its logarithm; None for an exponential distribution.
    reading_tokens_per_s: how fast answers are read; None if gaps do not depend on them.
  """

  name: str
  mean_turns: float
  turns_shape: float
  query_tokens: float
  query_spread: float
  answer_tokens: float
  answer_shape: float
  pause_s: float
  pause_spread: float | None
  reading_tokens_per_s: float | None


INTERACTIVE = Profile("interactive", 22.4, 1.7, 35.3, 0.77, 45.0, 1.9, 21.0, 0.9, 1.67)
CONTROL = Profile("control", 5.7, 1.7, 161.0, 1.0, 338.0, 1.9, 48.0, None, None)


def generate(profile: Profile, users: int, users_per_minute: float, seed: int) -> Workload:
  """A workload; the same arguments make the same one.

  Args:
    profile: INTERACTIVE, CONTROL, or another.
    users: conversations, at least 1.
    users_per_minute: that begin, on average.
    seed: of all that is random.

  Raises:
    ValueError: no users, or a rate that is not positive.
  """
  if users < 1 or not 0 < users_per_minute < math.inf:
    raise ValueError(
      f"{users} users at {users_per_minute:g} a minute make no workload; expected 1 or more at a "
      "positive rate"
    )
  rng = np.random.default_rng(seed)
  begins = np.cumsum(rng.exponential(60 / users_per_minute, users))
  turns = _gamma(rng, profile.mean_turns, profile.turns_shape, users)
  user = np.repeat(np.arange(users), turns)
  query = _lognormal(rng, profile.query_tokens, profile.query_spread, len(user))
  query = np.maximum(1, np.rint(query)).astype(np.int64)
  answer = _gamma(rng, profile.answer_tokens, profile.answer_shape, len(user))
  gaps = _pauses(rng, profile, len(user))
  if profile.reading_tokens_per_s is not None:
    gaps += answer / profile.reading_tokens_per_s
  said = query + answer
  first = np.cumsum(turns) - turns
  arrival_s = np.repeat(begins, turns) + _sums_before(gaps, first, turns)
  history = _sums_before(said, first, turns)
  order = np.argsort(arrival_s, kind="stable")
  columns = (column[order] for column in (user, arrival_s, query, answer, history))
  return Workload(profile.name, *columns)


def _gamma(rng: np.random.Generator, mean: float, shape: float, count: int) -> np.ndarray:
  """i64[count], rounded up, which adds a half to the mean."""
  drawn = rng.gamma(shape, (mean - 0.5) / shape, count)
  return np.maximum(1, np.ceil(drawn)).astype(np.int64)


def _lognormal(rng: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
  return rng.lognormal(math.log(mean) - spread**2 / 2, spread, count)


def _pauses(rng: np.random.Generator, profile: Profile, count: int) -> np.ndarray:
  if profile.pause_spread is None:
    return rng.exponential(profile.pause_s, count)
  return _lognormal(rng, profile.pause_s, profile.pause_spread, count)


def _sums_before(values: np.ndarray, first: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Of each turn, the sum over the turns before it in its conversation."""
  before = np.cumsum(values) - values
  return before - np.repeat(before[first], counts)
