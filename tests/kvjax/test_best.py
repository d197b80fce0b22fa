"""The best places of a row: against a stable sort."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.policies._best import best
from kvjax.policies._tokens import by_position, select_tokens

_choose = jax.jit(best)


def _by_sort(scores, count):
  order = np.argsort(-scores, kind="stable")[:count]
  return sorted(place for place in order.tolist() if scores[place] > -np.inf)


def _check(scores, count):
  chosen = np.asarray(_choose(scores, count))
  counts = np.broadcast_to(count, (*scores.shape[:2], 1))
  for row, head in np.ndindex(scores.shape[:2]):
    expected = _by_sort(scores[row, head], int(counts[row, head, 0]))
    assert np.flatnonzero(chosen[row, head]).tolist() == expected


@settings(deadline=None, max_examples=60)
@given(
  st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-30, -1e30, np.inf, -np.inf]),
    min_size=12,
    max_size=12,
  ),
  st.integers(0, 7),
)
def test_ties_and_infinities(values, count):
  _check(np.array(values, np.float32).reshape(1, 1, 12), np.int32(count))


@pytest.mark.parametrize("total", [1, 64, 9000])
def test_each_row_by_its_own_number(total):
  rng = np.random.default_rng(total)
  scores = rng.standard_normal((3, 2, total)).astype(np.float32)
  width = max(1, total // 2)
  count = rng.integers(0, width + 1, (3, 1, 1)).astype(np.int32)
  _check(scores, count)
  _check(scores, np.int32(width))


def test_more_than_there_are():
  scores = np.array([[[3.0, -np.inf, 1.0, -np.inf]]], np.float32)
  assert _choose(scores, np.int32(4)).tolist() == [[[True, False, True, False]]]


def test_all_of_a_row_but_one():
  """More in a column than a sum of a byte could hold, if blocks had no fewer rows than that."""
  scores = np.ones((1, 1, 40_000), np.float32)
  chosen = _choose(scores, np.int32(39_999))
  assert np.flatnonzero(~np.asarray(chosen)).tolist() == [39_999]


@pytest.mark.parametrize("total", [7, 64, 1030])
def test_both_forms_of_a_selection_are_the_same_tokens(total):
  rng = np.random.default_rng(total)
  chosen = rng.random((2, 3, total)) < rng.random((2, 3, 1))
  width = int(chosen.sum(axis=-1).max())
  selection = jax.jit(select_tokens, static_argnums=(1, 2))(chosen, width, 4)
  assert np.array_equal(selection.tokens, chosen)
  for x in np.ndindex(2, 3):
    named = (selection.pages * 4 + selection.slots)[x][selection.mask[x][:, 0]]
    assert named.tolist() == np.flatnonzero(chosen[x]).tolist()


def test_slots_of_a_ring_become_positions():
  chosen = np.array([[[True, False, True, True]]])
  positions = np.array([[[8, 5, 6, -1]]], np.int32)
  found = by_position(jax.numpy.asarray(chosen & (positions >= 0)), positions, 9)
  assert np.flatnonzero(found).tolist() == [6, 8] and found.shape == (1, 1, 9)
