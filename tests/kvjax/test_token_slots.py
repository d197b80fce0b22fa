"""Slots of single tokens: what a step fills, held against sets in plain Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.opkv.token_slots import Slots, fill

LISTS, WIDTH, TOTAL = 3, 8, 40

_fill = jax.jit(fill)


def _empty() -> Slots:
  return Slots(jnp.full((LISTS, WIDTH), -1, jnp.int32), jnp.zeros(LISTS, jnp.int32))


def _mask(wanted) -> jax.Array:
  mask = np.zeros((LISTS, TOTAL), bool)
  for x, tokens in enumerate(wanted):
    mask[x, list(tokens)] = True
  return jnp.asarray(mask)


def _held(slots: Slots) -> list[dict[int, int]]:
  """Of each list token -> slot."""
  return [{t: s for s, t in enumerate(row) if t >= 0} for row in np.asarray(slots.tokens).tolist()]


_steps = st.lists(
  st.lists(st.sets(st.integers(0, TOTAL - 1), max_size=WIDTH), min_size=LISTS, max_size=LISTS),
  min_size=1,
  max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(_steps)
def test_every_selected_token_has_one_slot_and_what_stays_does_not_move(steps):
  slots = _empty()
  for wanted in steps:
    before = _held(slots)
    step = _fill(slots, _mask(wanted))
    after = _held(step.slots)
    tokens = np.asarray(step.slots.tokens)
    count = int(step.count)
    source, target = (np.asarray(x)[:count].tolist() for x in (step.source, step.target))
    moves = {}
    for come, go in zip(source, target, strict=True):
      assert come // TOTAL == go // WIDTH  # within its own list
      moves[come // TOTAL, come % TOTAL] = go % WIDTH
    assert len(moves) == len({*target}) == count
    for x, want in enumerate(wanted):
      assert want <= {*after[x]}
      assert len(after[x]) == (tokens[x] >= 0).sum(), "a token has two slots"
      assert int(step.moved[x]) == len(want - {*before[x]})
      for token in want:
        assert after[x][token] == before[x].get(token, moves.get((x, token)))
      gone = {*before[x]} - {*after[x]}
      assert not gone & want and len(gone) <= int(step.moved[x])
    assert (np.asarray(step.target)[count:] == LISTS * WIDTH).all()
    slots = step.slots


def test_empty_slots_come_first_and_then_those_that_were_filled_longest_ago():
  slots = _empty()
  for first in range(0, 10, 2):
    slots = _fill(slots, _mask([{first, first + 1}, set(), {first}])).slots
  # Ten tokens of the first list went through eight slots: the two oldest are gone.
  assert {*_held(slots)[0]} == {*range(2, 10)}
  assert not _held(slots)[1] and {*_held(slots)[2]} == {0, 2, 4, 6, 8}


def test_a_token_that_stays_wanted_is_passed_over():
  slots = _empty()
  for token in range(1, 30):
    step = _fill(slots, _mask([{0, token}, set(), set()]))
    assert int(step.count) == (2 if token == 1 else 1)
    slots = step.slots
  assert _held(slots)[0][0] == 0


def test_a_list_that_selects_more_than_it_has_slots_keeps_what_it_has():
  slots = _fill(_empty(), _mask([{1, 2}, {3}, {4}])).slots
  step = _fill(slots, _mask([set(range(WIDTH + 1)), {3, 5}, set(range(WIDTH))]))
  assert step.too_small.tolist() == [True, False, False]
  assert step.moved.tolist() == [0, 1, WIDTH - 1]
  assert step.slots.tokens[0].tolist() == slots.tokens[0].tolist()
  assert step.slots.hand[0] == slots.hand[0]


@pytest.mark.parametrize("size", [0, WIDTH])
def test_nothing_and_all(size):
  step = _fill(_empty(), _mask([set(range(size))] * LISTS))
  assert step.moved.tolist() == [size] * LISTS
  again = _fill(step.slots, _mask([set(range(size))] * LISTS))
  assert int(again.count) == 0
