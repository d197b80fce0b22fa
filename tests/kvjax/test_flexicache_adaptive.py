"""Periods that follow each head: by hand, at their ends, and for rows that sit out a step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import make_policy
from tests.kvjax.pages_by_hand import (
  KEYS,
  PROMPTS,
  QUERIES,
  B,
  D,
  K,
  best,
  decode,
  inputs_of,
  prefilled,
  scores_of_row,
)


def _promised(scores):
  """[P], what scores [G, P] of q . k promise to each page."""
  weights = np.exp(scores / np.sqrt(D))
  return (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)


def _adapted(row, head, steps, missed_mass, shortest, longest):
  """Pages that a head takes in each step, and its periods: lists of five pages of 8."""
  listed, period, made, taken, periods = [], 0, 0, [], []
  for at in range(steps):
    length = PROMPTS[row] + at + 1
    last = (length - 1) // 8
    born = [*range((made - 1) // 8 + 1, last + 1)]
    older = {*listed[: 5 - len(born)], *born}
    if not period or length % period == 0:
      scores = scores_of_row("minmax", QUERIES[at, row], KEYS[row, :length], 8)[head]
      listed, shares = best(scores.max(axis=0), {last}, 5), _promised(scores)
      missed = shares[listed].sum() - shares[[*older]].sum()
      if not period:
        period = shortest
      elif missed > missed_mass:
        period = max(period // 2, shortest)
      elif length - made >= period:
        period = min(2 * period, longest)
      made, older = length, {*listed}
    taken.append(older)
    periods.append(period)
  return taken, periods


@pytest.mark.parametrize(("shortest", "longest"), [(1, 32), (2, 8)])
def test_flexicache_adaptive(shortest, longest):
  """Every head of every row on its own, over pages that begin while lists serve."""
  options = {"missed_mass": 0.12, "shortest": shortest, "longest": longest}
  policy = make_policy("flexicache_adaptive", budget_tokens=40, page_size=8, **options)
  found, state = decode(policy, prefilled(policy, 8), 60)
  seen = set()
  for row, head in np.ndindex(B, K):
    taken, periods = _adapted(row, head, 60, **options)
    assert [rows[row][head] for rows in found] == taken
    assert state.lists[0].period[row, head] == periods[-1]
    seen |= {*periods}
    steps = np.diff(periods)
    assert (steps > 0).any() and ((steps < 0).any() or PROMPTS[row] < 33)
  assert {shortest, 2 * shortest, 4 * shortest} <= seen and max(seen) <= longest


def test_flexicache_adaptive_without_choice_is_quest_or_ranks_once_in_a_while():
  """algorithms.md 4, test (c), and a bound that every list keeps."""
  options = {"budget_tokens": 40, "page_size": 8}
  quest = make_policy("quest", dense_layers=0, **options)
  policy = make_policy("flexicache_adaptive", longest=1, **options)
  assert decode(policy, prefilled(policy, 8), 20)[0] == decode(quest, prefilled(quest, 8), 20)[0]
  policy = make_policy("flexicache_adaptive", missed_mass=1.0, longest=16, **options)
  state = decode(policy, prefilled(policy, 8), 40)[1]
  assert (np.asarray(state.lists[0].period) == 16).all()
  lengths = np.array(PROMPTS)[:, None] + 40
  np.testing.assert_array_equal(state.lists[0].length, np.broadcast_to(lengths // 16 * 16, (B, K)))


def test_a_row_that_sits_a_step_out_keeps_its_lists():
  """Those it has, and where it has none yet it does not begin with one of nothing."""
  policy = make_policy("flexicache_adaptive", budget_tokens=40, page_size=8, longest=8)
  for steps in (0, 5):
    state = decode(policy, prefilled(policy, 8), steps)[1]
    lengths = jnp.array([PROMPTS[0] + steps + 1, 0, 0])
    own = {
      "q": jnp.asarray(QUERIES[0][:, None]),
      "k": jnp.asarray(KEYS[:, :1]),
      "positions": lengths[:, None] - 1,
    }
    inputs = inputs_of(lengths, 8, **own, valid=lengths[:, None] > 0)
    after = policy.select(state, inputs)[1]
    for old, new in zip(state.lists[0], after.lists[0], strict=True):
      np.testing.assert_array_equal(new[1:], old[1:])
    assert after.lists[0].length[0].max() == lengths[0]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"shortest": 0}, "shortest 0 must be at least 1 and at most longest 64"),
    ({"shortest": 8, "longest": 4}, "shortest 8 must be at least 1 and at most longest 4"),
    ({"missed_mass": 0}, "missed_mass 0 must be over 0 and at most 1"),
    ({"missed_mass": 1.5}, "missed_mass 1.5 must be over 0 and at most 1"),
    ({"budget_tokens": 79}, "budget_tokens 79 has no room for the 5 pages of 16 tokens"),
    ({"score": "median"}, "unknown score 'median'; expected one of minmax, cuboid"),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make_policy("flexicache_adaptive", **options)
