"""Prompts in, tokens out, and one clear line for what cannot be served."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvjax import STORES, CacheConfig, ModelConfig, decode_step, generate, make_policy, prepare
from kvjax.engine.generate import prefill
from models import llama
from tests.kvjax import matrix

MODEL, PARAMS = matrix.tiny_model(matrix.SHAPES[0])
CONFIG = CacheConfig(2, 128)
RUNNER = prepare(MODEL, make_policy("dense"), "resident", CONFIG, chunk_tokens=64)
PROMPTS = matrix.tokens_of((70, 9), seed=30)


def _free(max_new_tokens=20):
  return generate(RUNNER, PARAMS, PROMPTS, max_new_tokens=max_new_tokens)


def test_greedy_tokens_are_the_best_of_each_step():
  result = _free()
  last, cache = prefill(RUNNER, PARAMS, PROMPTS)
  logits = MODEL.unembed(PARAMS, last)
  for step in range(20):
    best = np.argmax(logits, axis=-1)
    assert [row[step] for row in result.tokens] == best.tolist()
    logits, cache = decode_step(RUNNER, PARAMS, cache, best.astype(np.int32))
  assert result.stopped == [False, False]
  assert result.ttft_s > 0 and len(result.step_s) == 19 and min(result.step_s) > 0
  assert result.cache.lengths.tolist() == [70 + 19, 9 + 19]  # the last token is not fed


def test_a_stop_token_ends_its_row():
  free = _free().tokens
  stop = next(token for token in free[0][3:] if token not in free[0][:3] and token not in free[1])
  result = generate(RUNNER, PARAMS, PROMPTS, max_new_tokens=20, stop_ids=(stop, 159))
  assert result.stopped == [True, 159 in free[1]]
  assert result.tokens[0] == free[0][: free[0].index(stop)]
  if not result.stopped[1]:
    assert result.tokens[1] == free[1]


def test_it_ends_when_all_rows_have():
  free = _free().tokens
  result = generate(RUNNER, PARAMS, PROMPTS, max_new_tokens=20, stop_ids={row[0] for row in free})
  assert result.tokens == [[], []] and result.stopped == [True, True] and result.step_s == []


def test_one_token():
  result = _free(1)
  assert [len(row) for row in result.tokens] == [1, 1] and result.step_s == []


def test_the_last_slot_can_be_used():
  prompts = matrix.tokens_of((120, 3), seed=31)
  result = generate(RUNNER, PARAMS, prompts, max_new_tokens=8)
  assert [len(row) for row in result.tokens] == [8, 8]


def test_progress():
  calls = []
  generate(RUNNER, PARAMS, PROMPTS, max_new_tokens=4, progress=lambda *call: calls.append(call))
  assert calls[:2] == [("prefill", 64, 70), ("prefill", 70, 70)]
  decode = calls[2:]
  assert {call[0] for call in decode} == {"decode"} and {call[2] for call in decode} == {4}
  assert [call[1] for call in decode] == sorted(call[1] for call in decode)
  assert decode[-1] == ("decode", 4, 4)


def _one_line(call, message):
  with pytest.raises(ValueError, match=message) as caught:
    call()
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("prompts", "options", "message"),
  [
    ([[1], []], {}, "prompt 1 is empty; give at least one token"),
    ([[1]], {}, "1 prompts for a cache of batch_size 2; give one a row"),
    ([[1]] * 3, {}, "3 prompts for a cache of batch_size 2"),
    ([[1], [1] * 125], {"max_new_tokens": 4}, "prompt 1 has 125 tokens.*129.*the cache holds 128"),
    ([[1], [160]], {}, r"prompt 1 holds token ids outside \[0, 160\)"),
    ([[-1], [1]], {}, r"prompt 0 holds token ids outside \[0, 160\)"),
    ([[1], [1]], {"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
  ],
)
def test_requests_that_are_refused(prompts, options, message):
  _one_line(lambda: generate(RUNNER, PARAMS, prompts, **options), message)


def test_a_prompt_longer_than_the_context():
  config = dataclasses.replace(MODEL.config, max_tokens=100)
  runner = prepare(llama.build(config), make_policy("dense"), "resident", CONFIG)
  _one_line(
    lambda: generate(runner, PARAMS, [[1] * 90, [1]], max_new_tokens=11),
    "prompt 0 has 90 tokens; with 11 new ones that is 101, and the model's context is 100",
  )


@pytest.mark.parametrize(
  ("policy", "options", "store", "message"),
  [
    ("dense", {}, "compact", "policy 'dense' cannot run on store 'compact'; it runs on resident"),
    ("quest", {}, "compact", "policy 'quest' cannot run on store 'compact'"),
    ("quest", {}, "disk", "unknown store 'disk'; expected one of resident, compact"),
    ("quest", {"page_size": 0}, "resident", "page_size 0 must be a positive whole number"),
    ("best", {}, "resident", "unknown policy 'best'; expected one of arkvale, clusterkv, dense"),
    ("dense", {"sinks": 4}, "resident", "policy 'dense' has no option sinks; it has none"),
    ("quest", {"budget_tokens": 8}, "resident", "budget_tokens 8 is under one page of 16"),
    (
      "quest",
      {"page_size": 32},
      "resident",
      "made for pages of 32 tokens and the cache has pages of 16; give both the same page_size",
    ),
  ],
)
def test_runs_that_are_refused(policy, options, store, message):
  _one_line(lambda: prepare(MODEL, make_policy(policy, **options), store, CONFIG), message)


def test_dense_takes_the_options_that_every_policy_is_given():
  assert make_policy("dense", budget_tokens=7, page_size=32).budget_tokens is None
  assert "resident" in STORES


@pytest.mark.parametrize("chunk", [0, 63, 100, 2048])
def test_chunks_that_are_refused(chunk):
  _one_line(
    lambda: prepare(MODEL, make_policy("dense"), "resident", CONFIG, chunk_tokens=chunk),
    f"chunk_tokens {chunk} is not one of",
  )


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"page_size": 12}, "page_size 12 is not one of"),
    ({"batch_size": 0}, "batch_size 0 must be positive"),
    ({"capacity_tokens": -1}, "capacity_tokens -1 must be positive"),
  ],
)
def test_caches_that_are_refused(change, message):
  _one_line(lambda: dataclasses.replace(CONFIG, **change), message)


def test_models_that_are_refused():
  base = dataclasses.asdict(MODEL.config)
  _one_line(lambda: ModelConfig(**base | {"num_heads": 3}), "num_heads 3 is not a multiple")
  _one_line(lambda: ModelConfig(**base | {"head_dim": 15}), "head_dim 15 is odd")
