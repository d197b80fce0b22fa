"""Selections of every step, and the overlap of two of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import selections
from kvjax import CacheConfig, generate, make_policy, prepare
from tests.kvjax import matrix

PAGE, STEPS = matrix.PAGE, 20
SHAPE = next(shape for shape in matrix.SHAPES if shape.kv_heads > 1 and shape.group > 1)
MODEL, PARAMS = matrix.tiny_model(SHAPE, 2)
PROMPT = [(7 * n) % 61 for n in range(150)]


def _runner(policy, **options):
  made = make_policy(policy, page_size=PAGE, **options)
  cache = CacheConfig(1, 192, PAGE, base_tokens=192)
  return prepare(MODEL, made, made.stores[0], cache, chunk_tokens=64)


def test_every_step_is_seen_as_it_is_made():
  runner = _runner("quest", budget_tokens=48, dense_layers=1)
  seen = selections.follow(runner, PARAMS, PROMPT, STEPS)
  alone = generate(runner, PARAMS, [PROMPT], max_new_tokens=STEPS)
  assert seen.tokens == alone.tokens[0]
  assert seen.layers == (1,)
  assert seen.pages.shape == (STEPS, 1, SHAPE.kv_heads, 12) and seen.pages.dtype == bool
  assert (seen.pages.sum(axis=-1) == 3).all()
  assert seen.num_pages.tolist() == [-(-(150 + step + 1) // 16) for step in range(STEPS)]
  newest = seen.num_pages - 1
  assert all(pages[..., page].all() for pages, page in zip(seen.pages, newest, strict=True))
  assert not any(
    pages[..., page + 1 :].any() for pages, page in zip(seen.pages, newest, strict=True)
  )
  assert seen.cache.lengths.tolist() == [150 + STEPS]


def test_what_cannot_be_followed_is_refused():
  with pytest.raises(ValueError, match="'dense' on store 'resident' selects no pages"):
    selections.follow(_runner("dense"), PARAMS, PROMPT, STEPS)
  with pytest.raises(ValueError, match="on store 'compact' selects no pages"):
    selections.follow(_runner("snapkv", budget_tokens=64), PARAMS, PROMPT, STEPS)
  with pytest.raises(ValueError, match="150 tokens and 43 steps exceed the capacity of 192"):
    selections.follow(_runner("quest", budget_tokens=48, dense_layers=1), PARAMS, PROMPT, 43)


def _random_pages(rng, count, width, total):
  """bool[count, P] with width pages each."""
  return np.argsort(np.argsort(rng.random((count, total)), axis=-1), axis=-1) < width


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), width=st.integers(1, 30))
def test_what_stays_whole_overlaps_whole_and_what_is_left_not_at_all(seed, width):
  pages = _random_pages(np.random.default_rng(seed), 4, width, 64)
  np.testing.assert_allclose(selections.corrected_overlap(pages, pages, np.array(64)), 1)
  assert (selections.corrected_overlap(~pages, pages, np.array(64)) == 0).all()


def test_chance_counts_nothing():
  """Of 4 pages among 16, one is expected by chance: (2/4 - 1/4) / (3/4)."""
  first, later = np.zeros((2, 20), bool)
  first[:4], later[2:6] = True, True
  assert selections.corrected_overlap(first, later, np.array(16)) == pytest.approx(1 / 3)
  rng = np.random.default_rng(0)
  first, later = _random_pages(rng, 4000, 32, 64), _random_pages(rng, 4000, 32, 64)
  overlap = selections.corrected_overlap(first, later, np.full(4000, 64))
  share = (first & later).sum(axis=-1) / 32
  assert (2 * share - 1).mean() == pytest.approx(0, abs=0.01)
  np.testing.assert_allclose(overlap, np.maximum(2 * share - 1, 0))


def test_there_is_no_overlap_of_everything_or_of_nothing():
  everything, nothing = np.ones(8, bool), np.zeros(8, bool)
  assert np.isnan(selections.corrected_overlap(everything, everything, np.array(8)))
  assert np.isnan(selections.corrected_overlap(everything, nothing, np.array(8)))
