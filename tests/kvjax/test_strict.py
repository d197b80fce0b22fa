"""Over hundreds of steps a strict store gives the tokens of the bare policy, one for one.

A model that decodes what it says itself goes its own way after one wrong token, so that the whole
answer is the test. Blocks come, serve again and are given up many times over in so many steps,
which the short runs of `test_host_stores` do not see.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvjax import CacheConfig, generate, make_policy, prepare
from kvjax.stores.traffic import totals
from tests.kvjax import matrix

NUM_STEPS, LENGTHS = 256, (130, 61)
CONFIG = CacheConfig(len(LENGTHS), 400, matrix.PAGE)
SHAPE = matrix.SHAPES[0]
PROMPTS = matrix.tokens_of(LENGTHS, seed=5)
# OmniKV's two lazy layers share what the first layer chose.
CASES = {
  "infinigen": (2, {"dense_layers": 1}),
  "omnikv": (3, {"filter_layers": (0,), "wait_layers": 0}),
}
STORES = "op_block:strict=True", "token_slots:strict=True"


@cache
def _answer(name: str, store: str):
  num_layers, options = CASES[name]
  model, params = matrix.tiny_model(SHAPE, num_layers)
  policy = make_policy(name, budget_tokens=32, **options)
  runner = prepare(model, policy, store, CONFIG, chunk_tokens=64)
  return generate(runner, params, PROMPTS, max_new_tokens=NUM_STEPS)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", CASES)
def test_as_the_bare_policy(name, store):
  bare, found = _answer(name, "resident"), _answer(name, store)
  assert found.tokens == bare.tokens
  assert min(len({*row[-64:]}) for row in bare.tokens) > 8, "it says the same over and over"
  moved = totals(found.cache)
  assert moved["moved"] > 2 * NUM_STEPS and moved["resident"] > 2 * NUM_STEPS, moved
