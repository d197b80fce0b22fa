"""Profiles: InfiniGen's skew, OmniKV's filter layers, and files that know their model."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine import steps
from kvjax.engine.generate import prefill
from kvjax.profiling import (
  Profile,
  check_model,
  filter_layers,
  load_profile,
  save_profile,
  skewing,
)
from models import build
from models.fetch import SMOLLM2
from tests.kvjax import matrix, spied
from tests.models import naive

K, G, D, L = 2, 4, 16, 4
MODEL, PARAMS = matrix.tiny_model(matrix.Shape(K, G, D), L)
LENGTHS = (150, 37)
ROWS = matrix.tokens_of([length + 6 for length in LENGTHS], seed=9)
PROMPTS = [row[:length] for row, length in zip(ROWS, LENGTHS, strict=True)]


def _opt():
  """An OPT with biases that are not zero."""
  model, params = matrix.tiny_model(matrix.Shape(3, 1, 16, "opt"), L)
  key = jax.random.key(3)
  biased = tuple(
    layer | {name: jax.random.normal(key, layer[name].shape) for name in ("q_bias", "k_bias")}
    for layer in params["layers"]
  )
  return model, params | {"layers": biased}


@cache
def _watcher(model):
  config = CacheConfig(len(LENGTHS), 192)
  return prepare(model, skewing.watch_queries(), "resident", config, chunk_tokens=64)


def _skew(model, params):
  return skewing.skew_of(prefill(_watcher(model), params, PROMPTS)[1].policy_state)


def _stacked_queries(model, params):
  """For each layer f64[K, n, D] of all rows, a KV head's query heads one after the other."""
  rows = [spied.queries_and_keys(model, params, prompt) for prompt in PROMPTS]
  config = model.config
  shape = (-1, config.num_kv_heads, config.group_size, config.head_dim)
  queries = [np.concatenate([row[layer][0] for row in rows]) for layer in range(L)]
  moved = [q.reshape(shape).astype(np.float64).transpose(1, 0, 2, 3) for q in queries]
  return [q.reshape(q.shape[0], -1, q.shape[-1]) for q in moved]


@pytest.mark.parametrize("make", [lambda: (MODEL, PARAMS), _opt], ids=["llama", "opt"])
def test_the_skew_is_the_right_factor_of_the_queries(make):
  model, params = make()
  skew = _skew(model, params)
  for layer, queries in enumerate(_stacked_queries(model, params)):
    for head, q in enumerate(queries):
      a, v = skew[layer, head], np.linalg.svd(q)[2].T
      np.testing.assert_allclose(a.T @ a, np.eye(16), atol=1e-5)
      # Each direction as the factorisation has it, but for its sign.
      np.testing.assert_allclose(np.abs((a * v).sum(axis=0)), 1.0, atol=1e-3)


def test_the_skew_leaves_products_as_they_are_and_gathers_the_energy():
  """(a) and (c)"""
  skew = _skew(MODEL, PARAMS)
  rng = np.random.default_rng(0)
  for layer, queries in enumerate(_stacked_queries(MODEL, PARAMS)):
    for head, q in enumerate(queries):
      a = skew[layer, head]
      k = rng.standard_normal((50, D)).astype(np.float32)
      q32 = q.astype(np.float32)
      np.testing.assert_allclose((q32 @ a) @ (k @ a).T, q32 @ k.T, rtol=1e-5, atol=1e-5 * D)
      plain, skewed = (np.sort((x * x).sum(axis=0))[::-1].cumsum() for x in (q, q @ a))
      assert (skewed >= plain * (1 - 1e-5)).all()
      assert skewed[2] > 1.05 * plain[2]


def test_a_profile_of_the_same_text_is_the_same():
  np.testing.assert_array_equal(_skew(MODEL, PARAMS), _skew(MODEL, PARAMS))


def test_folding_the_skew_into_an_opt_changes_nothing():
  model, params = _opt()
  skew = _skew(model, params)
  folded = skewing.fold_skew(model.config, params, skew)
  tokens = matrix.padded(ROWS)
  expected = np.asarray(naive.logits(model, params, tokens))
  np.testing.assert_allclose(naive.logits(model, folded, tokens), expected, rtol=1e-4, atol=1e-4)
  before, after = (_stacked_queries(model, one) for one in (params, folded))
  for layer in range(L):
    np.testing.assert_allclose(after[layer], before[layer] @ skew[layer], rtol=1e-3, atol=1e-3)


def test_infinigen_chooses_alike_with_the_skew_folded_and_given():
  model, params = _opt()
  skew = _skew(model, params)
  model = build(dataclasses.replace(model.config, content_hash="cd" * 32))
  profile = Profile(skewing.METHOD, "tiny", "cd" * 32, {}, {"skew": skew})
  chosen = []
  for weights, given in ((skewing.fold_skew(model.config, params, skew), None), (params, profile)):
    policy = make_policy("infinigen", budget_tokens=40, alpha=2.0, profile=given)
    runner = prepare(model, policy, "resident", CacheConfig(2, 192), chunk_tokens=64)
    cache = prefill(runner, weights, PROMPTS)[1]
    chosen.append(spied.decode(runner, weights, cache, [1, 2]).chosen)
  assert chosen[0] == chosen[1]


def test_a_rotating_model_takes_no_folded_skew():
  with pytest.raises(ValueError, match="cannot be folded into the weights of 'llama'"):
    skewing.fold_skew(MODEL.config, PARAMS, np.zeros((L, K, D, D)))


def _mass_by_hand(share, steps_taken):
  """f64[L, L], from plain attention: mean over rows and steps."""
  mass, count = np.zeros((L, L)), 0
  for row, prompt in zip(ROWS, LENGTHS, strict=True):
    seen = spied.queries_and_keys(MODEL, PARAMS, row[: prompt + steps_taken])
    for at in range(prompt, prompt + steps_taken):
      weights = []
      for q, k in seen:
        scores = [q[at, h] @ k[: at + 1, h // G].T / D**0.5 for h in range(K * G)]
        e = np.exp(np.array(scores, np.float64))
        weights.append(e / e.sum(axis=-1, keepdims=True))
      number = int(np.ceil(np.float32(share) * np.float32(at + 1)))
      for f, layer in itertools.combinations_with_replacement(range(L), 2):
        top = np.argsort(-weights[f].max(axis=0))[:number]
        mass[f, layer] += weights[layer].mean(axis=0)[top].sum()
      count += 1
  return mass / count


def test_captured_mass_by_hand():
  policy = filter_layers.watch_attention(share=0.1)
  runner = prepare(MODEL, policy, "resident", CacheConfig(2, 192), chunk_tokens=64)
  cache = prefill(runner, PARAMS, PROMPTS)[1]
  with pytest.raises(ValueError, match="no decode step was watched"):
    filter_layers.captured(cache.policy_state)
  for step in range(4):
    tokens = np.array([row[n + step] for row, n in zip(ROWS, LENGTHS, strict=True)], np.int32)
    cache = steps.decode_step(runner, PARAMS, cache, tokens)[1]
  found = filter_layers.captured(cache.policy_state)
  np.testing.assert_allclose(found, _mass_by_hand(0.1, 4), rtol=1e-4, atol=1e-5)


def _total(mass, filters, wait):
  """What filters capture, layer by layer."""
  total = 0.0
  for layer in range(filters[0], len(mass)):
    f = max(f for f in filters if f <= layer)
    total += 1.0 if layer - f <= wait else mass[f, layer]
  return total


def test_filters_are_added_by_what_they_gain():
  layers, first, wait = 12, 2, 1
  mass = np.triu(np.random.default_rng(5).random((layers, layers)))
  chosen = [
    filter_layers.choose_filters(mass, count, first=first, wait_layers=wait) for count in (1, 2, 3)
  ]
  assert chosen[0] == (2,)
  pairs = [tuple(sorted((2, f))) for f in range(3, layers)]
  assert chosen[1] == max(pairs, key=lambda filters: _total(mass, filters, wait))
  assert set(chosen[1]) < set(chosen[2]) and len(chosen[2]) == 3
  assert list(chosen[2]) == sorted(chosen[2])
  others = [tuple(sorted((*chosen[1], f))) for f in range(3, layers) if f not in chosen[1]]
  assert chosen[2] == max(others, key=lambda filters: _total(mass, filters, wait))


def test_no_more_filters_than_gain_anything():
  assert filter_layers.choose_filters(np.triu(np.ones((6, 6))), 4) == (2,)
  with pytest.raises(ValueError, match="count 0 must be at least 1"):
    filter_layers.choose_filters(np.ones((6, 6)), 0)
  with pytest.raises(ValueError, match="first 6 one of the model's 6 layers"):
    filter_layers.choose_filters(np.ones((6, 6)), 1, first=6)
  with pytest.raises(ValueError, match=r"share 0.0 must be within \(0, 1\]"):
    filter_layers.watch_attention(0.0)


def test_watching_changes_nothing():
  model = build(dataclasses.replace(MODEL.config, num_layers=2))
  params = PARAMS | {"layers": PARAMS["layers"][:2]}
  logits = []
  for policy in (make_policy("dense"), skewing.watch_queries(), filter_layers.watch_attention()):
    runner = prepare(model, policy, "resident", CacheConfig(2, 192), chunk_tokens=64)
    cache = prefill(runner, params, PROMPTS)[1]
    logits.append(steps.decode_step(runner, params, cache, np.array([1, 2], np.int32))[0])
  np.testing.assert_array_equal(logits[0], logits[1])
  np.testing.assert_array_equal(logits[0], logits[2])


def test_a_profile_names_its_model_and_is_refused_for_another(tmp_path):
  path = tmp_path / "made" / "skew.npz"
  skew = np.arange(6.0).reshape(1, 2, 3)
  saved = Profile("skewing", "tiny", "ab" * 32, {"seed": 3, "text": "book"}, {"skew": skew})
  save_profile(path, saved)
  found = load_profile(path, "skewing")
  check_model(found, "ab" * 32)
  assert found._replace(arrays={}) == saved._replace(arrays={})
  np.testing.assert_array_equal(found.arrays["skew"], skew)
  with pytest.raises(
    ValueError, match="is one of tiny with sha256 abababababababab, and the model"
  ):
    check_model(found, "cd" * 32)
  with pytest.raises(ValueError, match="is one of tiny, and the weights of this model are unknown"):
    check_model(found, "")
  with pytest.raises(ValueError, match="is a profile of skewing, expected one of filter_layers"):
    load_profile(path, "filter_layers")
  with pytest.raises(ValueError, match=r"none.npz is not a file; make a profile with"):
    load_profile(tmp_path / "none.npz", "skewing")
  with pytest.raises(FileExistsError):
    save_profile(path, saved)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut"])
def test_what_is_no_profile_is_said_to_be_none(tmp_path, content):
  path = tmp_path / "other.npz"
  path.write_bytes(content)
  with pytest.raises(ValueError, match="is no profile; make one with"):
    load_profile(path, "skewing")
  np.savez(tmp_path / "arrays.npz", x=np.zeros(3))
  with pytest.raises(ValueError, match="is no profile"):
    load_profile(tmp_path / "arrays.npz", "skewing")


def test_the_kept_profile_of_smollm2():
  path = Path(__file__).resolve().parents[2] / "profiles" / "smollm2-135m-filter_layers.npz"
  profile = load_profile(path, filter_layers.METHOD)
  check_model(profile, SMOLLM2.sha256)
  mass, filters = profile.arrays["mass"], profile.arrays["filters"].tolist()
  assert mass.shape == (30, 30)
  assert filters == list(filter_layers.choose_filters(mass, len(filters)))
