"""InfiniGen by its paper: channels, speculation one layer ahead, how many tokens, options."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine.generate import prefill
from kvjax.profiling import Profile
from tests.kvjax import matrix, spied
from tests.models import naive

K, G, D, L = 2, 4, 16, 4
MODEL, PARAMS = matrix.known_model(matrix.Shape(K, G, D), L)
LENGTHS = (150, 97, 20)
ROWS = matrix.tokens_of([length + 8 for length in LENGTHS], seed=6)


def rotations(seed: int, heads: int = K, d: int = D) -> np.ndarray:
  """f[L, heads, d, d], random and orthogonal."""
  normal = np.random.default_rng(seed).standard_normal((L, heads, d, d))
  return np.linalg.qr(normal)[0]


def profiled(skew: np.ndarray) -> Profile:
  """A profile of the model."""
  return Profile("skewing", "tiny", MODEL.config.content_hash, {}, {"skew": skew})


def _runner(chunk=64, **options):
  config = CacheConfig(len(LENGTHS), 192, 16)
  return prepare(MODEL, make_policy("infinigen", **options), "resident", config, chunk_tokens=chunk)


def _filled(options, chunk=64):
  runner = _runner(chunk, **options)
  prompts = [row[:n] for row, n in zip(ROWS, LENGTHS, strict=True)]
  return runner, prefill(runner, PARAMS, prompts)[1]


def _by_hand(shown, layer, row, channels, skew, *, alpha, width, group):
  """Sets of one row's lists: scores of all but the newest token, one count for all heads."""
  length = int((shown.positions[layer][row, 0] >= 0).sum())
  if length <= width:
    return [set(range(length))] * (K if group == "max" else K * G)
  lists = []
  for head in range(K):
    basis = skew[layer, head][:, channels[row, head]]
    keys = shown.keys[layer][row, head, : length - 1].astype(np.float64) @ basis
    scores = (shown.next_q[layer - 1][row, head].astype(np.float64) @ basis) @ keys.T / D**0.5
    lists += [scores.max(axis=0)] if group == "max" else list(scores)
  counts = [int((scores > scores.max() - alpha).sum()) for scores in lists]
  count = min(int(np.mean(counts)), width - 1)
  return [{*np.argsort(-scores)[:count].tolist(), length - 1} for scores in lists]


@pytest.mark.parametrize(
  ("group", "alpha", "ratio", "dense"),
  [("max", 1.0, 0.25, 2), ("none", 0.5, 0.5, 1), ("max", np.inf, 0.2, 2), ("none", 1.5, 1.0, 3)],
)
def test_choice_by_the_formulas(group, alpha, ratio, dense):
  skew, width = rotations(1), 40
  options = {"alpha": alpha, "partial_ratio": ratio, "group": group, "dense_layers": dense}
  runner, cache = _filled({"budget_tokens": width, "profile": profiled(skew)} | options)
  assert runner.plan.select_layers == tuple(range(dense, L))
  assert runner.plan.watched == (dense - 1,)
  sizes = set()
  for step in range(2):
    channels = [np.asarray(partial.channels) for partial in cache.policy_state.partial]
    tokens = [row[n + step] for row, n in zip(ROWS, LENGTHS, strict=True)]
    shown = spied.decode(runner, PARAMS, cache, tokens)
    for layer in runner.plan.select_layers:
      for row in range(len(LENGTHS)):
        expected = _by_hand(
          shown, layer, row, channels[layer - dense], skew, alpha=alpha, width=width, group=group
        )
        assert shown.chosen[layer][row] == expected
        sizes.add(len(expected[0]))
    cache = shown.cache
  assert max(sizes) <= width
  assert len(sizes) > 2 or alpha == np.inf  # the rule has chosen, not the budget alone


def test_the_count_is_a_mean_over_heads_and_not_their_own():
  """(d): heads of one row take equally many, although alone they would not."""
  skew = rotations(1)
  options = {"alpha": 1.0, "partial_ratio": 0.25}
  runner, cache = _filled({"budget_tokens": 60, "profile": profiled(skew)} | options)
  shown = spied.decode(runner, PARAMS, cache, [1, 2, 3])
  channels = np.asarray(cache.policy_state.partial[0].channels)
  own = []
  for head in range(K):
    basis = skew[2, head][:, channels[0, head]]
    scores = (shown.next_q[1][0, head] @ basis) @ (shown.keys[2][0, head, :150] @ basis).T
    scores = scores.max(axis=0) / D**0.5
    own.append(int((scores > scores.max() - 1.0).sum()))
  assert own[0] != own[1]
  assert [len(chosen) - 1 for chosen in shown.chosen[2][0]] == [sum(own) // 2] * K


def test_channels_are_the_strongest_of_the_first_tokens_of_each_row():
  skew = rotations(2)
  _, cache = _filled({"profile": profiled(skew), "partial_ratio": 0.25})
  for row, length in enumerate(LENGTHS):
    seen = spied.queries_and_keys(MODEL, PARAMS, ROWS[row][: min(length, 64)])
    for layer in (2, 3):
      q, k = seen[layer]
      for head in range(K):
        a = skew[layer, head]
        strength = np.abs(k[:, head] @ a).sum(axis=0)
        for g in range(G):
          strength += np.abs(q[:, head * G + g] @ a).sum(axis=0) / G
        found = np.asarray(cache.policy_state.partial[layer - 2].channels[row, head])
        assert set(found.tolist()) == set(np.argsort(-strength)[:4].tolist())


@pytest.mark.parametrize("chunk", [64, 128])
def test_partial_keys_kept_up_equal_partial_keys_made_anew(chunk):
  skew = rotations(3)
  runner, cache = _filled(
    {"profile": profiled(skew), "budget_tokens": 40, "partial_ratio": 0.3}, chunk=chunk
  )
  for step in range(3):
    cache = spied.decode(runner, PARAMS, cache, [step] * 3).cache
  for row, partial in enumerate(cache.policy_state.partial):
    keys = np.asarray(matrix.paged_keys(cache, row)).reshape(3, K, -1, D)
    channels, found = np.asarray(partial.channels), np.asarray(partial.keys[0])
    for b, head in np.ndindex(3, K):
      basis = skew[row + 2, head][:, channels[b, head]]
      length = LENGTHS[b] + 3
      np.testing.assert_allclose(
        found[b, head, :, :length].T, keys[b, head, :length] @ basis, rtol=1e-5, atol=1e-5
      )


def test_all_channels_without_alpha_and_a_budget_for_all_reproduce_dense():
  """(b)"""
  options = {"partial_ratio": 1.0, "alpha": np.inf, "budget_tokens": 400}
  options["profile"] = profiled(rotations(1))
  run = matrix.teacher_forced(_runner(**options), PARAMS, ROWS, LENGTHS)
  whole = naive.logits(MODEL, PARAMS, matrix.padded(ROWS))
  expected = matrix.aligned(whole, LENGTHS, len(run.logits) - 1)
  np.testing.assert_allclose(run.logits, expected, rtol=1e-5, atol=1e-5)


def test_all_channels_make_the_skew_irrelevant():
  """(q A) . (k A) = q . k: with r = 1 the choice is exact whatever A is."""
  chosen = []
  options = {"partial_ratio": 1.0, "alpha": 1.0, "budget_tokens": 50}
  for profile in (None, profiled(rotations(4))):
    runner, cache = _filled(options | {"profile": profile})
    chosen.append(spied.decode(runner, PARAMS, cache, [1, 2, 3]).chosen)
  assert chosen[0] == chosen[1]


def test_bytes_of_partial_keys():
  runner = _runner(partial_ratio=0.25, budget_tokens=40)
  partial = 2 * 3 * K * 4 * 192 * 4  # 2 layers, 4 channels of f32
  channels = 2 * 3 * K * 4 * 4
  assert runner.decode_bytes.metadata == partial + channels


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"budget_tokens": 1}, "budget_tokens 1 must be at least 2"),
    ({"dense_layers": 0}, "dense_layers 0 must be at least 1"),
    ({"alpha": -1.0}, "alpha -1.0 at least 0"),
    ({"alpha": float("nan")}, "alpha nan at least 0"),
    ({"partial_ratio": 0.0}, r"partial_ratio 0.0 within \(0, 1\]"),
    ({"partial_ratio": 1.1}, r"partial_ratio 1.1 within \(0, 1\]"),
    ({"group": "mean"}, "unknown group 'mean'; expected one of max, none"),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy("infinigen", **options).register(MODEL.config, CacheConfig(1, 64))
  assert "\n" not in str(caught.value)


def test_a_model_with_one_layer_is_refused():
  model, _ = matrix.tiny_model(matrix.Shape(K, G, D), 1)
  with pytest.raises(ValueError, match="'infinigen' looks one layer ahead"):
    prepare(model, make_policy("infinigen"), "resident", CacheConfig(1, 64))
