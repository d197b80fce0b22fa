"""The shortest reuse distance to expect after an answer of some length.

Who has got a long answer reads it before asking again, and meanwhile others use the cache. Single
distances say little of that, since many people do other things besides; their lower envelope over
the answer's length does (Bidaw's observation: Spearman 0.94 to 0.98).

As in the paper's scripts, of each answer length the smallest distance counts that is no outlier,
q1 - 1.5 (q3 - q1) or more. On line [ours]: lengths are binned by 2, as they are quantised in the
paper's trace; bins are pooled until they hold a 32nd of all samples, since the minimum of few is
larger than that of many; a running maximum makes the bounds monotone. Lengths between pools have
the bound of the pool below, and those below the first pool have none.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from kvjax.bidaw.slices import finished

BIN_TOKENS = 2
MOST_POOLS = 32
LEAST_POOLS = 5  # fewer say nothing


class Envelope(NamedTuple):
  """A monotone lower bound.

  Attributes:
    from_tokens: answer lengths from which a bound holds, ascending.
    bounds: bytes, as many, ascending.
    spearman: rank correlation of the pools' lengths and minima, before these were made monotone;
      0 for fewer than 5 pools.
  """

  from_tokens: list[int]
  bounds: list[float]
  spearman: float

  def lower_bound(self, answer_tokens: int) -> float:
    """Bytes that others will have used before who got such an answer is back."""
    pool = bisect.bisect_right(self.from_tokens, answer_tokens) - 1
    return self.bounds[pool] if pool >= 0 else 0.0


def lower_envelope(answer_tokens: np.ndarray, distances: np.ndarray) -> Envelope:
  """The envelope of samples.

  Args:
    answer_tokens: i64[samples], length of the answer before each distance.
    distances: f64[samples], weighted reuse distances in bytes, finite.
  """
  return finished(envelope_in_slices(answer_tokens, distances))


def envelope_in_slices(
  answer_tokens: np.ndarray, distances: np.ndarray
) -> Generator[None, None, Envelope]:
  """`lower_envelope`, which stops after every pool."""
  bins = np.minimum(answer_tokens // BIN_TOKENS, np.iinfo(np.uint16).max).astype(np.uint16)
  order = np.argsort(bins, kind="stable")  # by counting, for small numbers
  yield
  bins, distances = bins[order], distances[order]
  first_of_bin = np.flatnonzero(np.diff(bins.astype(np.int64), prepend=-1)).tolist()
  starts, least = [], len(bins) / MOST_POOLS
  for place in first_of_bin:
    if (not starts or place - starts[-1] >= least) and len(bins) - place >= least:
      starts.append(place)
  minima = []
  for begin, end in itertools.pairwise([*starts, len(bins)]):
    yield
    minima.append(robust_minimum(distances[begin:end]))
  return Envelope(
    [int(bins[start]) * BIN_TOKENS for start in starts],
    np.maximum.accumulate(minima).tolist() if minima else [],
    spearman(np.arange(len(minima)), np.array(minima)) if len(minima) >= LEAST_POOLS else 0.0,
  )


def robust_minimum(values: np.ndarray) -> float:
  """The smallest of values[n >= 1] that is no lower outlier."""
  low, high = np.quantile(values, [0.25, 0.75])
  return float(values[values >= low - 1.5 * (high - low)].min())


def spearman(x: np.ndarray, y: np.ndarray) -> float:
  """Rank correlation of x[n >= 2] and y[n]; equal values share a rank; 0 if either is constant."""
  if np.ptp(x) == 0 or np.ptp(y) == 0:
    return 0.0
  return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
  _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[place]
