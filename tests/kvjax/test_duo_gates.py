"""Training DuoAttention's gates: what the loss wants."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.profiling.duo_gates import train_gates
from tests.kvjax import matrix

MODEL, PARAMS = matrix.tiny_model(matrix.Shape(2, 2, 16))


@pytest.fixture(autouse=True)
def _standard_promotion():
  """Optax computes with Python numbers and step counts."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def _batches(step):
  rng = np.random.default_rng(step)
  tokens = rng.integers(0, 160, (2, 48)).astype(np.int32)
  return tokens, np.arange(48)[None].repeat(2, axis=0) >= 40


def test_gates_fall_where_streaming_loses_nothing():
  gates = train_gates(MODEL, PARAMS, _batches, steps=30, recent=48, learning_rate=0.1)
  assert gates.shape == (3, 2) and gates.max() < 0.1  # the window holds the whole text


def test_gates_stay_where_the_far_context_counts():
  losses = []
  gates = train_gates(
    MODEL,
    PARAMS,
    _batches,
    steps=30,
    sinks=0,
    recent=4,
    penalty=1e-4,
    learning_rate=0.1,
    progress=lambda step, loss: losses.append(loss),
  )
  assert gates.min() >= 0 and gates.max() <= 1 and gates.mean() > 0.7
  assert losses[0] == pytest.approx(1e-4)  # all gates open are the full model
