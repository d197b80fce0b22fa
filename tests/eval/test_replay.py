"""A replayed prompt leaves the cache that the runner's own prefill leaves."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from eval import replay
from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine.generate import decode, prefill
from tests.kvjax import matrix

PROMPT_TOKENS, NEW_TOKENS = 150, 6


@pytest.fixture(scope="module")
def setup():
  model, params = matrix.tiny_model(matrix.SHAPES[0])
  (prompt,) = matrix.tokens_of([PROMPT_TOKENS])
  config = CacheConfig(1, PROMPT_TOKENS + NEW_TOKENS, matrix.PAGE)
  recorder = replay.recorder(model, config)
  return model, params, config, replay.record(recorder, params, prompt)


# Dense and paged layers, keys that are not turned, watched layers, queries of prefill, settling.
@pytest.mark.parametrize("name", ["quest", "streaming", "omnikv", "h2o", "clusterkv"])
def test_as_the_runners_own_prefill(setup, name):
  model, params, config, recording = setup
  policy = make_policy(name, **matrix.SETTINGS[name]["harsh"])
  runner = prepare(model, policy, policy.stores[0], config, chunk_tokens=64)
  own = prefill(runner, params, [recording.prompt])
  again = replay.replayed(runner, params, recording)
  for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(again), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)
  expected = decode(runner, params, *own, max_new_tokens=NEW_TOKENS).tokens
  assert decode(runner, params, *again, max_new_tokens=NEW_TOKENS).tokens == expected
