"""The best places of a row: against a stable sort."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.policies._best import best_places

_choose = jax.jit(best_places, static_argnums=2)


def _by_sort(scores, count):
  order = np.argsort(-scores, kind="stable")[:count]
  return sorted(place for place in order.tolist() if scores[place] > -np.inf)


def _check(scores, count, width):
  places, chosen = (np.asarray(x) for x in _choose(scores, count, width))
  counts = np.broadcast_to(count, (*scores.shape[:2], 1))
  for row, head in np.ndindex(scores.shape[:2]):
    expected = _by_sort(scores[row, head], int(counts[row, head, 0]))
    assert places[row, head][chosen[row, head]].tolist() == expected
    assert chosen[row, head].tolist() == [i < len(expected) for i in range(width)]


@settings(deadline=None, max_examples=60)
@given(
  st.lists(
    st.sampled_from([0.0, 1.0, -1.0, 2.5, -2.5, 1e-30, -1e30, np.inf, -np.inf]),
    min_size=12,
    max_size=12,
  ),
  st.integers(0, 7),
)
def test_ties_and_infinities(values, count):
  _check(np.array(values, np.float32).reshape(1, 1, 12), np.int32(count), 7)


@pytest.mark.parametrize("total", [1, 64, 1000])
def test_each_row_by_its_own_number(total):
  rng = np.random.default_rng(total)
  scores = rng.standard_normal((3, 2, total)).astype(np.float32)
  width = max(1, total // 2)
  count = rng.integers(0, width + 1, (3, 1, 1)).astype(np.int32)
  _check(scores, count, width)
  _check(scores, np.int32(width), width)


def test_more_than_there_are():
  scores = np.array([[[3.0, -np.inf, 1.0, -np.inf]]], np.float32)
  places, chosen = _choose(scores, np.int32(4), 4)
  assert places[chosen].tolist() == [0, 2] and chosen.sum() == 2
