"""DuoAttention: heads of different size in one layer, exact bytes, and what each of them sees."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.policies.duo import retrieval_heads
from tests.kvjax import masked, matrix
from tests.kvjax.matrix import LENGTHS, NUM_STEPS, PAGE, ROWS

SHAPE = matrix.SHAPES[0]
MODEL, PARAMS = matrix.tiny_model(SHAPE)
FULL = ((0, 1), (2, 0))
CAPACITY = 160


def _runner(**options):
  policy = make_policy("duo", **{"budget_tokens": 48, "sinks": 5, "full_heads": FULL} | options)
  return prepare(
    MODEL, policy, "compact", CacheConfig(len(LENGTHS), CAPACITY, PAGE), chunk_tokens=64
  )


def test_full_heads_see_everything_and_others_sinks_and_window():
  runner = _runner()
  run = matrix.teacher_forced(runner, PARAMS, ROWS, LENGTHS)
  for layer, seen in run.attended.items():
    for step, row in np.ndindex(*seen.shape[:2]):
      newest = LENGTHS[row] + step
      positions = np.arange(seen.shape[-1])
      told = positions <= newest
      near = told & ((positions < 5) | (positions > newest - 43))
      for head in range(MODEL.config.num_heads):
        whole = (layer, head // SHAPE.group) in FULL
        np.testing.assert_array_equal(seen[step, row, head], told if whole else near)
  total = max(map(len, ROWS))
  visible = masked.visibility(MODEL.config, LENGTHS, total, run.attended)
  positions = masked.true_positions(len(LENGTHS), total)
  found = masked.logits(MODEL, PARAMS, matrix.padded(ROWS), visible, *positions)
  expected = matrix.aligned(found, LENGTHS, NUM_STEPS)
  np.testing.assert_allclose(run.logits, expected, rtol=1e-5, atol=1e-5)


def test_bytes_are_those_of_the_pages_that_exist():
  page = 2 * 4 * PAGE * SHAPE.head_dim
  for full in ((), FULL, ((0, 0), (0, 1), (1, 0))):
    heads = MODEL.config.num_layers * SHAPE.kv_heads
    pages = len(full) * CAPACITY // PAGE + (heads - len(full)) * 48 // PAGE
    runner = _runner(full_heads=full)
    assert runner.decode_bytes.keys_values == len(LENGTHS) * pages * page
    assert runner.prefill_bytes.keys_values == len(LENGTHS) * heads * CAPACITY // PAGE * page


def test_bad_patterns():
  with pytest.raises(ValueError, match="KV head 2 of layer 0; the model has 2 heads in 3 layers"):
    _runner(full_heads=((0, 2),))
  with pytest.raises(ValueError, match="duo sinks 64 must be at least 0 and under the budget 48"):
    _runner(sinks=64)
  for sparsity in (-0.1, 1.5, float("nan")):  # refused where it would not be looked at, too
    with pytest.raises(ValueError, match=f"sparsity {sparsity} must be between 0 and 1"):
      _runner(sparsity=sparsity)


def test_a_pattern_has_the_share_of_heads_that_was_asked_for():
  gates = np.array([[0.9, 0.1], [0.2, 0.8], [0.0, 0.0]])
  assert retrieval_heads(gates, 2 / 3) == ((0, 0), (1, 1))
  assert len(retrieval_heads(np.zeros((4, 4)), 0.5)) == 8
  assert retrieval_heads(gates, 1.0) == () and len(retrieval_heads(gates, 0.0)) == 6
  with pytest.raises(ValueError, match="must be between 0 and 1"):
    retrieval_heads(gates, 1.5)
