"""OmniKV by its paper: roles of layers, the four selectors, what is always attended to."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine.generate import prefill
from kvjax.policies.omnikv import SELECTORS
from kvjax.types import SELECT
from tests.kvjax import matrix, spied
from tests.models import naive

K, G, D, L = 2, 4, 16, 6
MODEL, PARAMS = matrix.tiny_model(matrix.Shape(K, G, D), L)
LENGTHS = (150, 70, 20)
STEPS = 20
ROWS = matrix.tokens_of([length + STEPS for length in LENGTHS], seed=6)


@cache
def _runner(**options):
  config = CacheConfig(len(LENGTHS), 192, 16)
  return prepare(MODEL, make_policy("omnikv", **options), "resident", config, chunk_tokens=64)


def _steps(runner, count):
  """Shown at each of the first decode steps."""
  cache = prefill(runner, PARAMS, [r[:n] for r, n in zip(ROWS, LENGTHS, strict=True)])[1]
  for step in range(count):
    tokens = [row[n + step] for row, n in zip(ROWS, LENGTHS, strict=True)]
    yield (shown := spied.decode(runner, PARAMS, cache, tokens))
    cache = shown.cache


def _softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def _by_hand(history, layer, row, *, selector, window, budget):
  """Chosen positions of one row at the last of the shown steps, from the queries of all of them.

  All steps of a window that reaches into the prompt are not known here: give at least `window`.
  """
  prompt, length = LENGTHS[row], LENGTHS[row] + len(history)
  if length <= budget:
    return set(range(length))
  windowed = selector in ("uniform", "exp")
  forced = set(range(max(prompt, length - max(1, budget // 2)), length))
  forced |= set(range(prompt - window, prompt)) if windowed else set()
  candidates = [p for p in range(length) if p not in forced]
  scores = dict.fromkeys(candidates, 0.0)
  for age in range(window if windowed else 1):
    shown, position = history[-1 - age], length - 1 - age
    keys = history[-1].keys[layer][row].astype(np.float64)
    visible = [p for p in candidates if p <= position]
    best = np.full(len(visible), -np.inf)
    for head, group in np.ndindex(K, G):
      logits = keys[head, visible] @ shown.q[layer][row, head, group].astype(np.float64) / D**0.5
      best = np.maximum(best, logits if selector == "last" else _softmax(logits))
    weight = 2.0**-age if selector == "exp" else 1.0
    for p, score in zip(visible, best, strict=True):
      scores[p] += weight * score
  best = sorted(candidates, key=lambda p: -scores[p])[: budget - len(forced)]
  return forced | set(best)


@pytest.mark.parametrize("selector", SELECTORS)
def test_choice_by_the_formulas(selector):
  window, budget = 6, 24
  runner = _runner(
    budget_tokens=budget, filter_layers=(1, 3), wait_layers=0, selector=selector, window=window
  )
  assert runner.plan.select_layers == (2, 4, 5) and runner.plan.watched == (1, 3)
  history = list(_steps(runner, STEPS))
  for count in (window, STEPS):  # the second one has more generated tokens than half of the budget
    shown = history[count - 1]
    for f, lazy in ((1, (2,)), (3, (4, 5))):
      for row in range(len(LENGTHS)):
        options = {"selector": selector, "window": window, "budget": budget}
        expected = _by_hand(history[:count], f, row, **options)
        for layer in lazy:
          assert shown.chosen[layer][row] == [expected] * K
    assert shown.chosen[2] != shown.chosen[4]  # each segment has its own filter


@pytest.mark.parametrize("selector", ["uniform", "exp"])
def test_the_window_begins_with_the_last_queries_of_the_prompt(selector):
  """Over the end of a chunk too: row 1 has 70 tokens and chunks have 64."""
  window = 16
  runner = _runner(
    budget_tokens=40, filter_layers=(1,), wait_layers=0, selector=selector, window=window
  )
  cache = next(_steps(runner, 1)).cache
  queries = spied.queries_and_keys(MODEL, PARAMS, ROWS[1][:71])[1][0].reshape(71, K, G, D)
  ring = np.asarray(cache.policy_state.rings[1])[1]  # f[K, W, G, D], position p in p % W
  for age in range(window):
    position = 70 - age
    found = ring[:, position % window]
    np.testing.assert_allclose(found, queries[position], rtol=1e-4, atol=1e-4)


def test_generated_tokens_are_always_attended_to():
  runner = _runner(budget_tokens=48, filter_layers=(1,), wait_layers=1)
  for step, shown in enumerate(_steps(runner, STEPS)):
    for chosen in shown.chosen.values():
      for row, length in enumerate(LENGTHS):
        generated = set(range(length, length + step + 1))
        assert all(generated <= head and len(head) <= 48 for head in chosen[row])


@pytest.mark.parametrize(
  "options",
  [
    {"budget_tokens": 400, "filter_layers": (0,), "wait_layers": 0},
    {"budget_tokens": 170, "filter_layers": (1, 3), "wait_layers": 0, "selector": "exp"},
    {"budget_tokens": 4, "filter_layers": tuple(range(L))},
    {"budget_tokens": 4, "filter_layers": (0,), "wait_layers": L},
  ],
  ids=["budget", "budget-exp", "all-filters", "all-wait"],
)
def test_what_reproduces_dense(options):
  runner = _runner(**options)
  run = matrix.teacher_forced(runner, PARAMS, ROWS, LENGTHS)
  whole = naive.logits(MODEL, PARAMS, matrix.padded(ROWS))
  expected = matrix.aligned(whole, LENGTHS, STEPS)
  np.testing.assert_allclose(run.logits, expected, rtol=1e-5, atol=1e-5)


def _lazy(model, **options):
  plan = make_policy("omnikv", **options).register(model, CacheConfig(1, 64))[0]
  return [layer for layer, role in enumerate(plan.roles) if role == SELECT], plan.watched


def test_roles_of_layers():
  config = MODEL.config
  assert _lazy(config, filter_layers=(1, 3), wait_layers=0) == ([2, 4, 5], (1, 3))
  assert _lazy(config, filter_layers=(1, 3), wait_layers=1) == ([5], (3,))
  assert _lazy(config, filter_layers=(0,), wait_layers=2) == ([3, 4, 5], (0,))
  assert _lazy(config, filter_layers=(5,), wait_layers=0) == ([], ())
  llama = dataclasses.replace(config, num_layers=32)
  dense = {0, 1, 2, 3, 8, 9, 18, 19}  # the authors' filter layers for Llama-3-8B, one waits each
  assert _lazy(llama) == ([layer for layer in range(32) if layer not in dense], (2, 8, 18))


@pytest.mark.parametrize(
  ("depth", "lazy", "watched"),
  [
    (1, [], ()),
    (2, [], ()),
    (3, [2], (0,)),
    (4, [3], (1,)),
    (6, [3, 4, 5], (1,)),
    (7, [3, 4, 5, 6], (1,)),
    (8, [6, 7], (4,)),
    (12, [5, 8, 9, 10, 11], (3, 6)),
    (16, [6, 7, 8, 11, 12, 13, 14, 15], (4, 9)),
  ],
)
def test_small_models_have_lazy_layers_too(depth, lazy, watched):
  assert _lazy(dataclasses.replace(MODEL.config, num_layers=depth)) == (lazy, watched)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"selector": "first"}, "unknown selector 'first'; expected one of last, softmax_before_last"),
    ({"budget_tokens": 0}, "budget_tokens 0 must be a positive whole number"),
    ({"budget_tokens": 31, "selector": "exp"}, "budget_tokens 31 must be at least 32"),
    ({"wait_layers": -1}, "wait_layers -1 at least 0"),
    ({"filter_layers": (2, 6)}, r"filter_layers \(2, 6\) must ascend within the 6 of the model"),
    ({"filter_layers": (3, 1)}, r"filter_layers \(3, 1\) must ascend"),
    ({"filter_layers": (1, 1)}, r"filter_layers \(1, 1\) must ascend"),
    ({"filter_layers": ()}, r"filter_layers \(\) must ascend"),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy("omnikv", **options).register(MODEL.config, CacheConfig(1, 64))
  assert "\n" not in str(caught.value)
