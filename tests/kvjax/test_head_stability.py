"""Stability of heads against plain Python, and which heads random choices make unstable."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import numpy as np
import pytest

from kvjax.profiling import head_stability as stability

PAGES, SIZE, HEADS = 40, 8, 12


def _chosen(rng, steps, keep):
  """bool[S, heads, P]: at each step head h keeps each of its pages with probability keep[h]."""
  chosen = np.zeros((steps, len(keep), PAGES), bool)
  for head, share in enumerate(keep):
    now = set(rng.choice(PAGES, SIZE, replace=False).tolist())
    for step in range(steps):
      chosen[step, head, sorted(now)] = True
      stays = {page for page in now if rng.random() < share}
      others = [page for page in range(PAGES) if page not in stays]
      now = stays | set(rng.choice(others, SIZE - len(stays), replace=False).tolist())
  return chosen


def _by_hand(chosen, pages, window):
  """Instability by sets, window by window."""
  sets = [[set(np.flatnonzero(head)) for head in step] for step in chosen]
  scores = []
  for start in range(0, len(sets) - window + 1, window):
    row = []
    for head in range(len(sets[0])):
      first, kept = sets[start][head], []
      for step in range(start + 1, start + window):
        chance = len(first) / pages[step]
        share = len(first & sets[step][head]) / len(first)
        kept.append(max(0.0, (share - chance) / (1 - chance)))
      row.append(1 - statistics.mean(kept))
    scores.append(row)
  return scores


def test_instability_by_hand():
  rng = np.random.default_rng(0)
  chosen = _chosen(rng, 21, np.linspace(0, 1, HEADS))
  pages = PAGES + np.arange(21) // 4
  scores = stability.instability(chosen, pages, window_steps=5)
  assert scores.shape == (4, HEADS)  # the last step is in no window
  np.testing.assert_allclose(scores, _by_hand(chosen, pages, 5), atol=1e-12)
  assert not scores[:, -1].any() and (scores[:, 0] > 0.5).all()


def test_constant_sets_are_1_and_random_ones_0_in_the_mean():
  rng = np.random.default_rng(1)
  drawn = np.argsort(rng.random((2, 20_000, PAGES)), axis=-1) < SIZE
  alike = stability.overlap_beyond_chance(drawn[0], drawn[0], PAGES, clipped=False)
  apart = stability.overlap_beyond_chance(drawn[0], drawn[1], PAGES, clipped=False)
  assert (alike == 1).all()
  assert abs(apart.mean()) < 4 * apart.std() / len(apart) ** 0.5
  half = np.arange(640) < 64, (np.arange(640) >= 32) & (np.arange(640) < 96)
  assert stability.overlap_beyond_chance(*half, 640) == pytest.approx(0.4 / 0.9)


@pytest.mark.parametrize("levels", [2, 50])
def test_the_unstable_heads_by_hand(levels):
  """With few levels almost all is ties, which go to the lower head."""
  rng = np.random.default_rng(levels)
  scores, m = rng.integers(levels, size=(9, HEADS)) / levels, 3
  counts = Counter()
  for row in scores:
    counts.update(sorted(range(HEADS), key=lambda head: (-row[head], head))[:m])
  expected = sorted(sorted(range(HEADS), key=lambda head: (-counts[head], head))[:m])
  assert stability.unstable_heads(scores, m).tolist() == expected


def test_consistency_by_hand():
  rng = np.random.default_rng(2)
  m, heads = 3, 8
  sets = [set(rng.choice(heads, m, replace=False).tolist()) for _ in range(5)]
  found = stability.consistency(sets, heads)
  pairs = list(itertools.combinations(sets, 2))
  assert found.overlap == pytest.approx(statistics.mean(len(a & b) / m for a, b in pairs))
  assert found.jaccard == pytest.approx(statistics.mean(len(a & b) / len(a | b) for a, b in pairs))
  every = [set(one) for one in itertools.combinations(range(heads), m)]
  shared = [len(a & b) for a, b in itertools.product(every, every)]
  unions = [len(a | b) for a, b in itertools.product(every, every)]
  assert found.overlap_chance == pytest.approx(statistics.mean(shared) / m)
  jaccards = [both / union for both, union in zip(shared, unions, strict=True)]
  assert found.jaccard_chance == pytest.approx(statistics.mean(jaccards))
  above = found.overlap * m - statistics.mean(shared)
  assert found.z_score == pytest.approx(above / statistics.pstdev(shared))
  assert stability.consistency([{0, 1}, {0, 1}], 2).z_score is None


def test_recall_of_windows_that_were_not_seen():
  same = np.tile([1, 4, 5], (6, 1))
  assert stability.held_out_recall(same, HEADS) == 1
  rng = np.random.default_rng(3)
  drawn = np.array([np.sort(rng.permutation(HEADS)[:3]) for _ in range(2000)])
  assert stability.held_out_recall(drawn, HEADS) == pytest.approx(3 / HEADS, abs=0.02)
  planted = np.where(np.arange(2000)[:, None] % 4 > 0, [0, 1, 2], drawn)
  assert stability.held_out_recall(planted, HEADS) == pytest.approx(0.75 + 0.25 * 3 / 12, abs=0.02)


def test_what_is_refused():
  chosen = np.ones((4, 2, 8), bool)
  with pytest.raises(ValueError, match="sets of 8 pages out of 8 say nothing"):
    stability.instability(chosen, np.full(4, 8), window_steps=4)
  with pytest.raises(
    ValueError, match="a window of 16 steps needs at least 2 and no more than the"
  ):
    stability.instability(chosen, np.full(4, 9))
  with pytest.raises(ValueError, match=r"2 sets of sizes \[1, 2\]; expected two or more of one"):
    stability.consistency([{0}, {0, 1}], 4)
