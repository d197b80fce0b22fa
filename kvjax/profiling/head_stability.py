"""FlexiCache's stability of KV heads: how long the pages that a head chooses stay the same.

Steps of a text are cut into windows of 16, and in each the first step is the reference. A head's
instability in a window is 1 minus the mean overlap of the reference with the other 15 steps, where
what two random choices would share is taken off (RCO). So it is what a list that is made every 16th
step loses. The unstable heads are those that are most often among the most unstable of a window.

    scores = instability(chosen, pages)            # of each text; np.concatenate of all
    heads = unstable_heads(scores, count=M)

Everything is plain numpy. The formulas are those of the original's published analysis code, which
leaves ties to its sort: here the head with the lower number comes first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

METHOD = "head_stability"
WINDOW_STEPS = 16


def overlap_beyond_chance(
  first: np.ndarray, later: np.ndarray, pages: np.ndarray | int, *, clipped: bool = True
) -> np.ndarray:
  """RCO f64[...]: 1 for the same sets, 0 for no more in common than random ones.

  Args:
    first: bool[..., P], sets of the same size.
    later: bool[..., P], the others, of that size too.
    pages: i[...], pages that there are to choose from at the later step.
    clipped: values under 0 are 0, as in the original; otherwise the mean of random sets is 0.

  Raises:
    ValueError: there are no more pages than a set has, so that nothing is chosen.
  """
  size, pages = first.sum(axis=-1), np.asarray(pages)
  if (size >= pages).any() or not size.all():
    raise ValueError(
      f"sets of {size.max()} pages out of {pages.min()} say nothing; take longer texts or "
      "a lower budget"
    )
  chance = size / pages
  corrected = ((first & later).sum(axis=-1) / size - chance) / (1 - chance)
  return corrected.clip(0) if clipped else corrected


def instability(
  chosen: np.ndarray, pages: np.ndarray, window_steps: int = WINDOW_STEPS
) -> np.ndarray:
  """f64[windows, ...]: 1 - the mean RCO of the first step of a window with each of the others.

  Args:
    chosen: bool[S, ..., P], the pages that each head chooses at each step.
    pages: i[S], pages that there are at each step.
    window_steps: steps of a window; what is left at the end is not used.

  Raises:
    ValueError: fewer steps than one window, or as `overlap_beyond_chance`.
  """
  steps = len(chosen)
  if not 2 <= window_steps <= steps:
    raise ValueError(
      f"a window of {window_steps} steps needs at least 2 and no more than the {steps} that there "
      "are; decode more of the text"
    )
  there = np.reshape(pages, (steps, *(1,) * (chosen.ndim - 2)))
  scores = []
  for start in range(0, steps - window_steps + 1, window_steps):
    others = slice(start + 1, start + window_steps)
    kept = overlap_beyond_chance(chosen[start][None], chosen[others], there[others])
    scores.append(1 - kept.mean(axis=0))
  return np.stack(scores)


def by_distance(chosen: np.ndarray, pages: np.ndarray, steps: Sequence[int]) -> np.ndarray:
  """f64[len(steps), ...]: mean RCO of every step with the one so many steps later (Fig. 1).

  Args:
    chosen: bool[S, ..., P], as for `instability`.
    pages: i[S].
    steps: distances, each from 1 and under S.
  """
  there = np.reshape(pages, (len(chosen), *(1,) * (chosen.ndim - 2)))
  means = [overlap_beyond_chance(chosen[:-d], chosen[d:], there[d:]).mean(axis=0) for d in steps]
  return np.stack(means)


def most_unstable(scores: np.ndarray, count: int) -> np.ndarray:
  """i64[windows, M], ascending: the M heads of f64[windows, heads] with the highest scores."""
  order = np.argsort(-scores, axis=-1, kind="stable")
  return np.sort(order[:, :count], axis=-1)


def unstable_heads(scores: np.ndarray, count: int) -> np.ndarray:
  """i64[M], ascending: the heads that are most often among the M most unstable of a window.

  Args:
    scores: f64[windows, heads], `instability` of all windows of all texts.
    count: M.
  """
  return consensus(most_unstable(scores, count), scores.shape[1])


def consensus(sets: np.ndarray, heads: int) -> np.ndarray:
  """i64[M], ascending: of sets i64[n, M] of heads the M heads that are in most of them."""
  often = np.bincount(sets.ravel(), minlength=heads)
  return np.sort(np.argsort(-often, kind="stable")[: sets.shape[1]])


class Consistency(NamedTuple):
  """How alike sets of M heads are, and how alike random ones would be.

  Attributes:
    overlap: mean share of a set that another one has too.
    overlap_chance: of random sets, M / heads.
    z_score: how many standard deviations of a pair of random sets the mean is above that of random
      ones; None where a random pair does not vary.
    jaccard: mean size of the intersection over that of the union.
    jaccard_chance: of random sets.
  """

  overlap: float
  overlap_chance: float
  z_score: float | None
  jaccard: float
  jaccard_chance: float


def consistency(sets: Sequence[Collection[int]], heads: int) -> Consistency:
  """Over all pairs of sets.

  Args:
    sets: at least two sets of M heads, each a number under `heads`.
    heads: how many there are, L * K.

  Raises:
    ValueError: fewer than two sets, or sets of different sizes.
  """
  sizes = {len(one) for one in sets}
  if len(sets) < 2 or len(sizes) != 1:
    raise ValueError(f"{len(sets)} sets of sizes {sorted(sizes)}; expected two or more of one size")
  [m] = sizes
  members = np.zeros((len(sets), heads), np.int64)
  for row, one in zip(members, sets, strict=True):
    row[list(one)] = 1
  pairs = np.triu_indices(len(sets), 1)
  shared = (members @ members.T)[pairs]
  share, spread = m / heads, _spread_of_random(m, heads)
  return Consistency(
    overlap=float(shared.mean() / m),
    overlap_chance=share,
    z_score=float((shared.mean() - m * share) / spread) if spread else None,
    jaccard=float((shared / (2 * m - shared)).mean()),
    jaccard_chance=_jaccard_of_random(m, heads),
  )


def held_out_recall(sets: np.ndarray, heads: int, seed: int = 0) -> float:
  """Mean share of the sets of one half of the windows that the consensus of the other half has.

  Args:
    sets: i64[windows, M], from `most_unstable`; at least two.
    heads: L * K.
    seed: of how they are halved.
  """
  order = np.random.default_rng(seed).permutation(len(sets))
  seen, unseen = np.split(sets[order], [len(sets) // 2])
  return float(np.isin(unseen, consensus(seen, heads)).mean())


def _spread_of_random(m: int, heads: int) -> float:
  """Standard deviation of what two random sets share: hypergeometric."""
  share = m / heads
  return math.sqrt(m * share * (1 - share) * (heads - m) / max(1, heads - 1))


def _jaccard_of_random(m: int, heads: int) -> float:
  ways = [math.comb(m, both) * math.comb(heads - m, m - both) for both in range(m + 1)]
  return sum(n * both / (2 * m - both) for both, n in enumerate(ways)) / math.comb(heads, m)
