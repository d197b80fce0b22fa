"""Digests that are kept as int8: what rounding may change, and what it may not."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Sampling, make_policy, prepare
from kvjax.engine import steps
from kvjax.policies._digests import DIGESTS, SPREAD
from kvjax.policies._kept import quantised
from models import PRESETS, build, param_shapes
from pallas_kernels.page_scores import page_products
from tests import aot
from tests.kvjax import matrix
from tests.kvjax.pages_by_hand import (
  CAPACITY,
  KEYS,
  MODEL,
  PROMPTS,
  QUERIES,
  B,
  D,
  G,
  K,
  best,
  decode,
  normal,
  prefilled,
  scores_of_page,
)
from tests.panels import in_order, in_panels

FORMS = tuple(name for name in DIGESTS if name != "exact")
SHAPE = matrix.SHAPES[0]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def test_numbers_by_hand():
  digests = jnp.array([[-12.7, 0.04, 0.06, 6.34], [0.0, 0.0, 0.0, 0.0]])
  numbers, scales = quantised(digests)
  assert numbers.dtype == jnp.int8
  assert numbers.tolist() == [[-127, 0, 1, 63], [0, 0, 0, 0]]
  np.testing.assert_allclose(scales, [[0.1], [0]], rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_as_near_as_the_scale_says(form):
  """A number is off by half a scale at most, so a product by that times the sum of |q|."""
  digest, keys, q = DIGESTS[form], 3 * normal(2, (1, K, 100, 8, D)), normal(3, (1, K, G, D))
  made = digest.of_pages(jnp.asarray(keys), jnp.ones(keys.shape[:-1], bool))
  numbers, scales = (x.swapaxes(2, 3) for x in quantised(made))
  queries = digest.queries(jnp.asarray(q))
  found = digest.scores(
    page_products(queries, (in_panels(numbers),), jnp.int32(100), (in_panels(scales),))
  )
  off = np.abs(queries).sum(axis=-1, keepdims=True) * np.asarray(scales) / 2  # [1, K, R, P]
  if form == "mean_std":  # the root of what is off by e is off by the root of e at most
    mean, variance = np.split(off, 2, axis=2)
    off = mean + SPREAD * np.sqrt(variance)
  elif form == "outlier":
    off = np.maximum(*np.split(off, 2, axis=2))
  expected = np.empty((1, K, G, 100))
  for at in np.ndindex(expected.shape):
    expected[at] = scores_of_page(form, q[0, at[1], at[2]], keys[0, at[1], at[3]])
  error = np.abs(found - expected)
  assert (error <= off + 1e-4).all()
  assert error.max() > 1e-3 and error.mean() < expected.std() / 20


def _by_hand(form, q, keys):
  """Score of a page [n, D] of which rounded numbers are kept, for one query [D]."""
  kept = [keys.max(axis=0), keys.min(axis=0)] if form == "minmax" else [keys.mean(axis=0)]
  scale = np.abs(kept).max() / 127
  kept = [np.round(one / scale) for one in kept]
  if form == "mean":
    return scale * (kept[0] @ q)
  return scale * np.maximum(kept[0] * q, kept[1] * q).sum()


@pytest.mark.parametrize("form", ["minmax", "mean"])
def test_choice_by_hand(form):
  options = {"budget_tokens": 24, "page_size": 8, "score": form, "dense_layers": 0}
  policy = make_policy("quest", **options, digest_dtype="int8")
  for at, rows in enumerate(decode(policy, prefilled(policy, 8), 20)[0]):
    for row, prompt in enumerate(PROMPTS):
      length = prompt + at + 1
      pages = [slice(first, min(first + 8, length)) for first in range(0, length, 8)]
      for head in range(K):
        queries = QUERIES[at, row, head * G : (head + 1) * G]
        keys = KEYS[row, :, head]
        scores = np.array([max(_by_hand(form, q, keys[page]) for q in queries) for page in pages])
        assert rows[row][head] == set(best(scores, {len(pages) - 1}, 3)), (at, row)


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("form", FORMS)
def test_digests_that_grew_are_digests_made_at_once(form, page_size):
  """After ragged chunks with padding, and after tokens that fill and begin pages."""
  options = {"budget_tokens": 32, "page_size": page_size, "score": form, "dense_layers": 0}
  policy = make_policy("quest", **options, digest_dtype="int8")
  _, (kept, *_) = decode(policy, prefilled(policy, page_size), 20)
  numbers, scales = (np.asarray(in_order(x)) for x in (kept.digests, kept.scales))
  assert numbers.dtype == np.int8 and scales.dtype == np.float32
  off = []
  for row, prompt in enumerate(PROMPTS):
    for page, at in enumerate(range(0, prompt + 20, page_size)):
      keys = KEYS[row, at : min(at + page_size, prompt + 20)].swapaxes(0, 1)
      made = DIGESTS[form].of_pages(jnp.asarray(keys), jnp.ones(keys.shape[:-1], bool))
      expected, scale = quantised(made)
      np.testing.assert_allclose(scales[row, :, page], scale, rtol=1e-5)
      off.append(numbers[row, :, page].astype(int) - np.asarray(expected))
  # Sums in another order may round to the neighbour what lies half way.
  assert np.abs(off).max() <= (form != "minmax") and np.mean(np.array(off) != 0) < 0.005


# In a model.


@cache
def _runner(score, *, batch=4, chunk=64, budget=32, capacity=matrix.CAPACITY):
  policy = make_policy("quest", budget_tokens=budget, score=score, digest_dtype="int8")
  config = CacheConfig(batch, capacity, matrix.PAGE)
  return prepare(matrix.tiny_model(SHAPE)[0], policy, "resident", config, chunk_tokens=chunk)


def _logits(runner, rows=matrix.ROWS, lengths=matrix.LENGTHS):
  return matrix.teacher_forced(runner, matrix.tiny_model(SHAPE)[1], rows, lengths).logits


@cache
def _base(score):
  return _logits(_runner(score))


@pytest.mark.parametrize("score", ["minmax", "outlier"])
def test_batch_mates_change_nothing(score):
  for row in (0, 2):
    alone = _logits(
      _runner(score, batch=1), matrix.ROWS[row : row + 1], matrix.LENGTHS[row : row + 1]
    )
    np.testing.assert_allclose(alone[:, 0], _base(score)[:, row], **TOLERANCE)


@pytest.mark.parametrize("score", ["minmax", "outlier"])
def test_chunks_change_nothing(score):
  np.testing.assert_allclose(_logits(_runner(score, chunk=128)), _base(score), **TOLERANCE)


@pytest.mark.parametrize("score", ["minmax", "outlier"])
def test_what_unused_slots_hold_changes_nothing(score, monkeypatch):
  empty_cache, poison = steps.empty_cache, {"float32": jnp.nan, "int8": -128}

  def poisoned(runner):
    def fill(x):
      return jnp.full_like(x, poison[x.dtype.name]) if x.dtype.name in poison else x

    return jax.tree.map(fill, empty_cache(runner))

  monkeypatch.setattr(steps, "empty_cache", poisoned)
  np.testing.assert_allclose(_logits(_runner(score)), _base(score), **TOLERANCE)


def test_a_budget_for_all_pages_is_dense():
  """Ten pages of twenty are chosen, and no row has more."""
  config = CacheConfig(len(matrix.LENGTHS), 320, matrix.PAGE)
  model = matrix.tiny_model(SHAPE)[0]
  dense = prepare(model, make_policy("dense"), "resident", config, chunk_tokens=64)
  found = _logits(_runner("minmax", budget=160, capacity=320))
  np.testing.assert_allclose(found, _logits(dense), **TOLERANCE)
  assert np.abs(_base("minmax") - found).max() > 1e-3  # a smaller one is not


@pytest.mark.parametrize(
  ("score", "size"), [("minmax", 2 * D), ("mean", D), ("outlier", 2 * D + 1)]
)
@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_metadata_bytes(score, size, dtype, item):
  policy = make_policy("quest", budget_tokens=32, score=score, digest_dtype="int8")
  runner = prepare(MODEL, policy, "resident", CacheConfig(B, CAPACITY, 16, dtype), chunk_tokens=64)
  pages = CAPACITY // 16
  assert runner.decode_bytes.metadata == B * K * (pages * (size + 4) + 16 * D * item)


@pytest.mark.usefixtures("fully_optimized")
def test_a_decode_step_copies_no_digests():
  """SmolLM2's heads, one layer of them; nothing of the size of its digests beside what is kept."""
  config = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=1)
  policy = make_policy("quest", budget_tokens=64, dense_layers=0, digest_dtype="int8")
  runner = prepare(build(config), policy, "resident", CacheConfig(1, 131_072, base_tokens=131_072))
  state = jax.eval_shape(lambda: steps.empty_cache(runner))
  token, key = jax.ShapeDtypeStruct((1,), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
  keys = jax.ShapeDtypeStruct((1,), key.dtype)
  step = steps.next_token.lower(runner, Sampling(), param_shapes(config), state, token, keys)
  step = step.compile()
  memory, digests = step.memory_analysis(), runner.decode_bytes.metadata
  assert memory.alias_size_in_bytes >= runner.decode_bytes.total
  assert memory.temp_size_in_bytes < digests / 2, f"{memory.temp_size_in_bytes} of {digests}"
  assert not aot.big_copies(step.as_text(), digests // 8)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"digest_dtype": "int4"}, "unknown digest_dtype 'int4'; expected 'int8', or None"),
    (
      {"digest_dtype": "int8", "score": "exact"},
      "digest_dtype 'int8' with score 'exact', which keeps no digests; leave it out",
    ),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy("quest", **options)
  assert "\n" not in str(caught.value)
