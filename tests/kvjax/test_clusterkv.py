"""ClusterKV by its paper: k-means of the prompt, recall of clusters, what always stays."""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine.generate import prefill
from kvjax.policies import _clusters
from tests.kvjax import matrix, spied
from tests.models import naive

K, G, D = 2, 4, 16
MODEL, PARAMS = matrix.tiny_model(matrix.Shape(K, G, D), 4)
LENGTHS = (150, 97, 9)
STEPS = 20
ROWS = matrix.tokens_of([length + STEPS for length in LENGTHS], seed=6)
OPTIONS = {"budget_tokens": 40, "cluster_tokens": 12, "sinks": 4}


@cache
def _runner(**options):
  config = CacheConfig(len(LENGTHS), 192, 16)
  return prepare(MODEL, make_policy("clusterkv", **options), "resident", config, chunk_tokens=64)


def _steps(runner, count):
  cache = prefill(runner, PARAMS, [r[:n] for r, n in zip(ROWS, LENGTHS, strict=True)])[1]
  for step in range(count):
    tokens = [row[n + step] for row, n in zip(ROWS, LENGTHS, strict=True)]
    yield (shown := spied.decode(runner, PARAMS, cache, tokens))
    cache = shown.cache


def _normal(seed, shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _k_means_by_hand(keys, start, end, count, most, iterations, seed):
  """Labels and centroids of one head, a token at a time."""
  spread = np.random.default_rng(seed).random(most, np.float32)
  step = (end - start) / count
  centroids = [keys[start + int((i + spread[i]) * step)].astype(np.float64) for i in range(count)]

  def nearest(key):
    return int(np.argmax([key @ c / np.linalg.norm(c) for c in centroids]))

  for _ in range(iterations):
    groups = [[] for _ in range(count)]
    for position in range(start, end):
      groups[nearest(keys[position])].append(keys[position].astype(np.float64))
    centroids = [np.mean(g, axis=0) if g else c for g, c in zip(groups, centroids, strict=True)]
  return [nearest(keys[position]) for position in range(start, end)], np.array(centroids)


@pytest.mark.parametrize("total", [130, 600, 1100])  # under, over and well over one block
def test_k_means_by_hand(total):
  keys = _normal(0, (2, 2, total, 8))
  start, end = np.array([4, 4]), np.array([total - 3, total // 2])
  keys[1, :, total // 2 :] = np.nan  # not the row's own
  found = _clusters.k_means(
    jnp.asarray(keys), jnp.asarray(start), jnp.asarray(end),
    most=-(-total // 30), cluster_tokens=30, iterations=5, seed=3,
  )  # fmt: skip
  for row, head in np.ndindex(2, 2):
    count = -(-int(end[row] - start[row]) // 30)
    labels, centroids = _k_means_by_hand(
      keys[row, head], start[row], end[row], count, -(-total // 30), 5, 3
    )
    np.testing.assert_array_equal(found.labels[row, head, start[row] : end[row]], labels)
    np.testing.assert_allclose(found.centroids[row, head, :count], centroids, rtol=1e-4, atol=1e-5)
    filled = np.flatnonzero(found.filled[row, head]).tolist()
    assert filled == sorted(set(labels))


def test_k_means_lowers_the_angle_and_is_seeded():
  keys = _normal(1, (1, 1, 400, 8)) + 2 * np.repeat(_normal(2, (1, 1, 8, 8)), 50, axis=2)
  ends = {"start": jnp.array([0]), "end": jnp.array([400])}

  def mean_cosine(iterations, seed=0):
    found = _clusters.k_means(
      jnp.asarray(keys), **ends, most=8, cluster_tokens=50, iterations=iterations, seed=seed
    )
    near = np.asarray(found.centroids)[0, 0][np.asarray(found.labels)[0, 0]]
    norms = np.linalg.norm(near, axis=1) * np.linalg.norm(keys[0, 0], axis=1)
    return float(((near * keys[0, 0]).sum(axis=1) / norms).mean()), found.labels

  assert mean_cosine(20)[0] > mean_cosine(1)[0]
  assert (mean_cosine(1)[1] == mean_cosine(1)[1]).all()
  assert (mean_cosine(1)[1] != mean_cosine(1, seed=1)[1]).any()


def test_rows_without_keys_are_harmless():
  keys = jnp.full((2, 1, 64, 8), jnp.nan)
  found = _clusters.k_means(
    keys, jnp.array([16, 16]), jnp.array([9, 16]),
    most=4, cluster_tokens=16, iterations=3, seed=0,
  )  # fmt: skip
  assert np.isfinite(found.centroids).all() and not found.filled.any()


def _by_hand(shown, clusters, layer, row, group, step):
  """Lists of one row: sinks, generated tokens, then clusters by score, the last one cut."""
  length, budget = LENGTHS[row] + step + 1, OPTIONS["budget_tokens"]
  if length <= budget:
    return [set(range(length))] * (K if group == "max" else K * G)
  newest = range(max(LENGTHS[row], length - budget // 2), length)
  lists = []
  for head in range(K):
    scores = shown.q[layer][row, head] @ np.asarray(clusters.centroids[row, head]).T  # f[G, X]
    labels = np.asarray(clusters.labels[row, head])
    for one in [scores.max(axis=0)] if group == "max" else scores:
      kept = [*range(OPTIONS["sinks"]), *newest]
      for cluster in np.argsort(-one):
        members = np.flatnonzero(labels[:length] == cluster)
        kept += [p for p in members.tolist() if p not in kept]
        if len(kept) >= budget:
          break
      lists.append(set(kept[:budget]))
  return lists


@pytest.mark.parametrize("group", ["max", "none"])
def test_choice_by_the_formulas(group):
  runner = _runner(**OPTIONS, group=group)
  assert runner.plan.select_layers == (2, 3)
  for step, shown in enumerate(_steps(runner, 2)):
    for layer in (2, 3):
      clusters = shown.cache.policy_state.clusters[layer - 2]
      for row in range(len(LENGTHS)):
        expected = _by_hand(shown, clusters, layer, row, group, step)
        assert shown.chosen[layer][row] == expected


def test_clusters_are_made_once_of_the_prompt_and_new_tokens_join_them():
  runner = _runner(**OPTIONS)
  history = list(_steps(runner, 3))
  for layer in (2, 3):
    first, last = (shown.cache.policy_state.clusters[layer - 2] for shown in history[::2])
    np.testing.assert_array_equal(first.centroids, last.centroids)
    for row, length in enumerate(LENGTHS[:2]):
      keys = history[-1].keys[layer][row]
      for head in range(K):
        count = -(-(length - 4) // 12)
        labels, centroids = _k_means_by_hand(keys[head], 4, length, count, 16, 20, 0)
        np.testing.assert_array_equal(last.labels[row, head, 4:length], labels)
        unit = centroids / np.linalg.norm(centroids, axis=1, keepdims=True)
        filled = np.isin(np.arange(count), labels)
        cosines = np.where(filled, keys[head, length : length + 3] @ unit.T, -np.inf)
        np.testing.assert_array_equal(
          last.labels[row, head, length : length + 3], cosines.argmax(axis=1)
        )


def test_sinks_and_generated_tokens_are_always_attended_to():
  for step, shown in enumerate(_steps(_runner(**OPTIONS), STEPS)):
    for chosen in shown.chosen.values():
      for row, length in enumerate(LENGTHS):
        wanted = {*range(4), *range(length, length + step + 1)}
        assert all(wanted <= head and len(head) <= 40 for head in chosen[row])


def test_a_budget_for_all_reproduces_dense():
  run = matrix.teacher_forced(_runner(budget_tokens=400), PARAMS, ROWS, LENGTHS)
  whole = naive.logits(MODEL, PARAMS, matrix.padded(ROWS))
  expected = matrix.aligned(whole, LENGTHS, STEPS)
  np.testing.assert_allclose(run.logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"budget_tokens": 32}, "budget_tokens 32 must be over twice the 16 sinks"),
    ({"cluster_tokens": 0}, "cluster_tokens 0 and iterations 20 must be at least 1"),
    ({"iterations": 0}, "iterations 0 must be at least 1"),
    ({"sinks": -1}, "sinks -1 at least 0"),
    ({"group": "mean"}, "unknown group 'mean'; expected one of max, none"),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy("clusterkv", **options)
  assert "\n" not in str(caught.value)
