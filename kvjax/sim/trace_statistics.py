"""What a workload is like: turns, reuse distances, and whether answers tell when users come back.

*Weighted reuse distance* of a turn: the sum of the sizes of the distinct other conversations that
were used since this one last was (Bidaw, section 3). A conversation's size is what it holds when
its latest turn has been answered, at most the model's context. A least-recently-used cache of
histories hits if the distance and the history itself fit.

*Signal*: Bidaw's observation 4, that the lower bound of the reuse distance grows with the length
of the answer before it. The bound is estimated in two ways:

* `by_length`, as the paper's scripts do: for every length of answer the least distance, outliers
  below the first quartile - 1.5 interquartile ranges left out. Rare lengths have few distances and
  so a higher least one: where long answers are rare, this alone makes the two grow together.
* `by_group`: answers in groups of equal size by length, and of each a low percentile, which does
  not depend on how many there are.

Distances are counted in tokens; multiply by the bytes that a model keeps of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from kvjax.bidaw.reuse import ReuseDistances
from kvjax.sim.workloads import Workload

GROUPS, PERCENTILE = 20, 5


class Bounds(NamedTuple):
  """Lower bounds of the reuse distance.

  Attributes:
    answer_tokens: f64[N], of the answer before, ascending.
    distance_tokens: f64[N].
  """

  answer_tokens: np.ndarray
  distance_tokens: np.ndarray

  @property
  def spearman(self) -> float | None:
    """Rank correlation of the two; None where one does not vary."""
    return spearman(self.answer_tokens, self.distance_tokens)


def turns_by_user(workload: Workload) -> np.ndarray:
  """i64[users], by the number of the user."""
  return np.unique(workload.user, return_counts=True)[1]


def durations_s(workload: Workload) -> np.ndarray:
  """f64[users], from the first turn to the last, by the number of the user."""
  _, first, place = np.unique(workload.user, return_index=True, return_inverse=True)
  last = np.zeros(len(first))
  np.maximum.at(last, place, workload.arrival_s)
  return last - workload.arrival_s[first]


def sizes(workload: Workload, max_tokens: int | None = None) -> np.ndarray:
  """i64[R], tokens that a conversation keeps after each turn, at most those of the context."""
  total = workload.total_tokens
  return total if max_tokens is None else np.minimum(total, max_tokens)


def reuse_distances(workload: Workload, max_tokens: int | None = None) -> np.ndarray:
  """f64[R], weighted reuse distance of every turn in tokens; nan for the first of a conversation.

  In O(R log R), by what the eviction uses on-line.
  """
  size = sizes(workload, max_tokens)
  reuse, distances = ReuseDistances(int(size.sum()) + 1), np.full(len(workload), np.nan)
  for turn, (user, tokens) in enumerate(zip(workload.user.tolist(), size.tolist(), strict=True)):
    distance = reuse.access(user)
    reuse.resize(user, tokens)
    if distance is not None:
      distances[turn] = distance
  return distances


def under_way_tokens(workload: Workload, max_tokens: int | None = None) -> np.ndarray:
  """i64[R], at each turn: what all conversations hold that have begun and not had their last."""
  size, previous = sizes(workload, max_tokens), workload.previous
  grown = size - np.where(previous < 0, 0, size[previous])
  last = np.ones(len(workload), bool)
  last[previous[previous >= 0]] = False
  over = np.where(last, size, 0)
  return np.cumsum(grown) - (np.cumsum(over) - over)


def answers_before(workload: Workload) -> np.ndarray:
  """f64[R], tokens of the answer before each turn; nan for the first of a conversation."""
  previous = workload.previous
  return np.where(previous < 0, np.nan, workload.answer_tokens[previous])


def by_length(answers: np.ndarray, distances: np.ndarray) -> Bounds:
  """The robust minimum for every length that there is.

  Args:
    answers: f64[N], tokens of the answer before.
    distances: f64[N], reuse distance in tokens.
  """
  order = np.lexsort((distances, answers))
  lengths, begins = np.unique(answers[order], return_index=True)
  groups = np.split(distances[order], begins[1:])
  return Bounds(lengths, np.array([_robust_minimum(group) for group in groups]))


def _robust_minimum(ascending: np.ndarray) -> float:
  low, high = (ascending[int(len(ascending) * share)] for share in (0.25, 0.75))
  return float(ascending[np.searchsorted(ascending, low - 1.5 * (high - low))])


def by_group(
  answers: np.ndarray, distances: np.ndarray, groups: int = GROUPS, percentile: float = PERCENTILE
) -> Bounds:
  """A low percentile of each of some groups of equal size, by length; the mean length of each.

  Args:
    answers: f64[N], tokens of the answer before.
    distances: f64[N], reuse distance in tokens.
    groups: how many, at most N of them.
    percentile: of the distances of a group.
  """
  order = np.argsort(answers, kind="stable")
  parts = np.array_split(order, min(groups, len(order)))
  means = np.array([answers[part].mean() for part in parts])
  return Bounds(means, np.array([np.percentile(distances[part], percentile) for part in parts]))


def spearman(
  first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> float | None:
  """Rank correlation of two columns; None where there are under 3 or one does not vary."""
  if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
    return None
  return float(stats.spearmanr(first, second).statistic)
