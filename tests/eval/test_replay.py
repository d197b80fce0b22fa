"""A replayed prompt leaves the cache that the runner's own prefill leaves."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from eval import replay
from eval.run_selection_cost import measure
from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine import selected_pages
from kvjax.engine.generate import decode, prefill
from tests.kvjax import matrix

PROMPT_TOKENS, NEW_TOKENS = 150, 6


@pytest.fixture(scope="module")
def setup():
  model, params = matrix.tiny_model(matrix.SHAPES[0])
  (prompt,) = matrix.tokens_of([PROMPT_TOKENS])
  config = CacheConfig(1, PROMPT_TOKENS + NEW_TOKENS, matrix.PAGE)
  recorder = replay.recorder(model, config)
  return model, params, config, replay.record(recorder, params, [prompt])


# Dense and paged layers, keys that are not turned, watched layers, queries of prefill, settling.
@pytest.mark.parametrize("name", ["quest", "streaming", "omnikv", "h2o", "clusterkv"])
def test_as_the_runners_own_prefill(setup, name):
  model, params, config, recording = setup
  policy = make_policy(name, **matrix.SETTINGS[name]["harsh"])
  runner = prepare(model, policy, policy.stores[0], config, chunk_tokens=64)
  own = prefill(runner, params, recording.prompts)
  again = replay.replayed(runner, params, recording)
  for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(again), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)
  expected = decode(runner, params, *own, max_new_tokens=NEW_TOKENS).tokens
  assert decode(runner, params, *again, max_new_tokens=NEW_TOKENS).tokens == expected


def test_a_step_without_the_model_selects_as_the_models_own(setup):
  model, params, config, recording = setup
  runner = prepare(model, make_policy("quest", budget_tokens=32), "resident", config)
  short = recording._replace(prompts=[recording.prompts[0][:-1]])
  _, cache = replay.replayed(runner, params, short)
  own = selected_pages(runner, params, cache, recording.prompts[0][-1:])
  for attended in (False, True):
    _, cache = replay.replayed(runner, params, short)
    chosen, total, cache = replay.replayed_step(runner, attended, params, recording.layers, cache)
    for selection, pages in zip(chosen, own.values(), strict=True):
      there = np.asarray(selection.mask).any(axis=-1)
      np.testing.assert_array_equal(np.where(there, selection.pages, -1), pages)
    assert cache.lengths.tolist() == [PROMPT_TOKENS] and bool(total.any()) == attended


def test_what_selecting_costs(setup):
  model, params, config, recording = setup
  policies = [make_policy("quest", budget_tokens=32), make_policy("dense")]
  runners = [prepare(model, policy, policy.stores[0], config) for policy in policies]
  quest, dense = measure(runners, params, recording, new_tokens=4)
  assert quest["prompt_tokens"] == PROMPT_TOKENS - 4 and quest["output_tokens"] == 2
  assert quest["select_ratio"] == quest["select_s"] / dense["attend_s"]
  assert min(row[name] for row in (quest, dense) for name in ("select_s", "attend_s")) > 0
