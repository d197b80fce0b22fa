"""H2O, TOVA and MorphKV by their papers: who stays after the prompt, and who goes at each step."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest

from kvjax import CacheConfig, cache_bytes, make_policy, prepare
from kvjax.engine.generate import prefill
from models import build
from tests.kvjax import by_hand, matrix
from tests.kvjax.by_hand import Seen, softmax

K, G, D = 2, 2, 16
MODEL, PARAMS = matrix.tiny_model(matrix.Shape(K, G, D))
BUDGET, PAGE, STEPS = 24, 8, 40
WINDOW = 40  # of the model that has one
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
OPTIONS = {
  "h2o": [{}, {"recent": 0}, {"recent": 22}],
  "tova": [{}],
  "morphkv": [{"window": 5}, {"window": 7, "fuse": "sum"}, {"window": 22}],
}
CASES = [(name, options) for name, variants in OPTIONS.items() for options in variants]


def _runner(name, options, **settings):
  return _prepared(name, tuple(options.items()), **settings)


@cache
def _prepared(name, options, model=MODEL, budget=BUDGET, capacity=192, batch=1):
  policy = make_policy(name, budget_tokens=budget, page_size=PAGE, **dict(options))
  config = CacheConfig(batch, capacity, PAGE)
  return prepare(model, policy, "compact", config, chunk_tokens=64)


def _h2o(seen: Seen, head: int, *, recent: int = (BUDGET - 1) // 2):
  """Sums of all that a token ever got from this head's queries, and how many at the end stay."""
  group = range(head * G, (head + 1) * G)
  return {
    p: sum(given[h][p] for given in seen.weights[p:] for h in group) for p in seen.held[head]
  }, recent


def _tova(seen: Seen, head: int):
  """What a token got from the newest query, all heads of the layer together."""
  return {p: seen.weights[-1][:, p].sum() for p in seen.held[head]}, 0


def _morphkv(seen: Seen, head: int, *, window: int, fuse: str = "max", sight: int = 10**6):
  """What an older token gets from each query of the window, of all that goes to older ones."""
  n = len(seen.q)
  older = [p for p in seen.held[head] if max(n - sight, 0) <= p < n - window]
  rows = []
  for q in seen.q[max(n - window, 0) :]:
    raw = [sum(q[head * G : (head + 1) * G] @ seen.k[p][head]) / math.sqrt(D) for p in older]
    rows.append(softmax(raw) if older else [])
  fused = np.max(rows, axis=0) if fuse == "max" else np.sum(rows, axis=0)
  return dict(zip(older, fused, strict=True)), window


SCORES = {"h2o": _h2o, "tova": _tova, "morphkv": _morphkv}


def _rule(name, options, sight=10**6):
  """As the originals: after each forward pass, what is too much for the next one is dropped."""
  options = options | ({"sight": sight} if name == "morphkv" else {})

  def left_by(seen: Seen, head: int, prompt: bool):
    n, held = len(seen.q), seen.held[head]
    first = n - sight if prompt else n + 1 - sight  # at the next step one more is out of sight
    scores, recent = SCORES[name](seen, head, **options)
    gone = [p for p in held if p < first]
    others = [p for p in held if first <= p < n - recent]
    leaving = gone + sorted(others, key=lambda p: (scores[p], p))
    return sorted(set(held) - set(leaving[: max(len(held) - BUDGET + 1, prompt * len(gone))]))

  return lambda layer, seen, prompt: [left_by(seen, head, prompt) for head in range(K)]


def _agree(run, expected):
  logits, held = expected
  np.testing.assert_allclose(run.logits[:, 0], logits, **TOLERANCE)
  for layer, attended in run.attended.items():
    for step, heads in enumerate(held[layer]):
      for head, positions in enumerate(heads):
        found = np.flatnonzero(attended[step, 0, head * G])
        assert found.tolist() == positions, f"layer {layer}, step {step}, head {head}"


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_each_step_drops_what_the_paper_says(name, options):
  """Golden by lists and numpy: 40 steps after a prompt three times as long as the budget."""
  (row,) = matrix.tokens_of([70 + STEPS], seed=21)
  run = matrix.teacher_forced(_runner(name, options), PARAMS, [row], [70])
  _agree(run, by_hand.logits_and_held(MODEL, PARAMS, row, 70, _rule(name, options)))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_that_grows_into_its_budget(name):
  """Nothing is dropped before the row is full."""
  (row,) = matrix.tokens_of([3 + STEPS], seed=22)
  options = OPTIONS[name][0]
  run = matrix.teacher_forced(_runner(name, options), PARAMS, [row], [3])
  _agree(run, by_hand.logits_and_held(MODEL, PARAMS, row, 3, _rule(name, options)))
  assert run.attended[0][BUDGET - 4, 0].sum() == BUDGET * K * G


@pytest.mark.parametrize("name", OPTIONS)
def test_under_a_window_of_the_model_what_is_out_of_sight_goes_first(name):
  """A prompt that turns the ring of slots over, and steps that see ever fewer of its tokens."""
  model = build(dataclasses.replace(MODEL.config, family="mistral", window_tokens=WINDOW))
  options = OPTIONS[name][0]
  (row,) = matrix.tokens_of([150 + STEPS], seed=23)
  run = matrix.teacher_forced(_runner(name, options, model=model), PARAMS, [row], [150])
  rule = _rule(name, options, sight=WINDOW)
  _agree(run, by_hand.logits_and_held(model, PARAMS, row, 150, rule, WINDOW))


def test_what_each_protects():
  """TOVA drops first and newest tokens like any other; H2O and MorphKV keep their recent ones."""
  (row,) = matrix.tokens_of([70 + STEPS], seed=21)
  protected = {"h2o": 11, "tova": 0, "morphkv": 5}
  for name, recent in protected.items():
    attended = matrix.teacher_forced(_runner(name, OPTIONS[name][0]), PARAMS, [row], [70]).attended
    always = [
      all(
        seen[step, 0, :, 70 + step - age].all()
        for seen in attended.values()
        for step in range(STEPS)
      )
      for age in range(1, 12)
    ]
    assert always == [age <= recent for age in range(1, 12)], name
    if name == "tova":
      assert not all(seen[-1, 0, :, 0].all() for seen in attended.values())
      for seen in attended.values():
        assert (seen == seen[:, :, :1]).all(), "all heads of a layer hold the same"
  assert [name for name in OPTIONS if make_policy(name).joins_heads] == ["tova"]


def test_sums_of_h2o_do_not_know_the_future():
  """What tokens got from the queries of a text does not depend on what followed it."""
  rows = matrix.tokens_of([150, 150], seed=24)
  rows[1] = rows[0][:100] + rows[1][100:]
  sums = []
  for row, length in ((rows[0], 100), (rows[1], 100), (rows[0], 150), (rows[1], 150)):
    cache = prefill(_runner("h2o", {}), PARAMS, [row[:length]])[1]
    sums.append(np.stack([x[0] for x in cache.policy_state]))
  np.testing.assert_array_equal(sums[0], sums[1])
  assert (sums[2][..., :100] >= sums[0][..., :100]).all()
  assert np.abs(sums[2] - sums[3])[..., :100].max() > 1e-3
  for total, length in zip(sums, (100, 100, 150, 150), strict=True):
    # Each query of each head gives 1 in all, and nothing to what comes after it.
    np.testing.assert_allclose(total.sum(axis=-1), G * length, rtol=1e-5)
    assert not total[..., length:].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_by_hand(name):
  """f32, 3 layers: what a step attends to, and what is remembered beside it."""
  budget, capacity, batch, window = 64, 512, 3, 5
  runner = _runner(name, OPTIONS[name][0], budget=budget, capacity=capacity, batch=batch)
  heads = 3 * batch * K
  state = {"h2o": capacity * 4, "tova": 4, "morphkv": window * D * 4 + 4}
  kept, cursors = runner.decode_bytes, 2 * batch * 4
  assert kept.keys_values == heads * budget * 2 * D * 4
  assert kept.metadata == heads * (budget * 4 + state[name])
  assert kept.tables == cursors + heads * budget // PAGE * 4
  dense = prepare(MODEL, make_policy("dense"), "resident", CacheConfig(batch, capacity, PAGE))
  assert kept.keys_values * capacity == dense.decode_bytes.keys_values * budget
  assert cache_bytes(prefill(runner, PARAMS, [[1] * 300, [2], [3] * 64])[1]) == kept


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("h2o", {"budget_tokens": 12, "recent": 11}, "h2o keeps recent 11 tokens, the new one and a"),
    ("h2o", {"recent": -1}, "h2o keeps recent -1"),
    ("h2o", {"budget_tokens": 1}, "budget_tokens is 1; give a budget of at least recent"),
    ("tova", {"budget_tokens": 1}, "tova budget_tokens 1 has no room"),
    ("tova", {"recent": 4}, "policy 'tova' has no option recent"),
    ("morphkv", {"budget_tokens": 33}, "morphkv keeps a window of 32 tokens.*budget_tokens is 33"),
    ("morphkv", {"window": 0}, "a window of 0 tokens"),
    ("morphkv", {"fuse": "mean"}, "morphkv fuse 'mean' is not one of max, sum"),
  ],
)
def test_options_that_are_refused(name, options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy(name, **options)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_store_that_drops_nothing_is_refused(name):
  policy = make_policy(name, page_size=PAGE)
  with pytest.raises(ValueError, match=f"policy '{name}' cannot run on store 'resident'"):
    prepare(MODEL, policy, "resident", CacheConfig(1, 64, PAGE))
