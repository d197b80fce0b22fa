"""Rotary positions: a rotation, its formulas, and what all kinds of scaling have in common."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import RopeScaling
from models.rope import rotary
from tests.models import tiny

SCALINGS = {
  "default": RopeScaling(),
  "linear": RopeScaling("linear", 4.0),
  "dynamic": RopeScaling("dynamic", 4.0, original_tokens=64),
  "llama3": RopeScaling("llama3", 8.0, original_tokens=64),
  "yarn": RopeScaling("yarn", 4.0, original_tokens=64, beta_fast=4.0),
}
every_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)


def _rotary(scaling=SCALINGS["default"], theta=10_000.0, head_dim=8):
  changes = {"rope_scaling": scaling, "rope_theta": theta, "head_dim": head_dim}
  return rotary(dataclasses.replace(tiny.CONFIG, **changes))


def _angles(scaling, positions, head_dim=16):
  """Angle f32[S, D/2] by which each pair is turned, in (-pi, pi], and the length it ends with."""
  x = jnp.zeros((1, len(positions), 1, head_dim)).at[..., : head_dim // 2].set(1)
  turned = _rotary(scaling, head_dim=head_dim)(x, jnp.asarray(positions)[None])[0, :, 0]
  first, second = np.split(np.asarray(turned), 2, axis=-1)
  return np.arctan2(second, first), np.hypot(first, second)


def test_rotary_is_a_rotation_that_pairs_the_halves():
  rotate = _rotary(theta=100.0)
  q = jax.random.normal(jax.random.key(0), (1, 1, 3, 8))
  turned = rotate(q, jnp.array([[5]]))
  # Component i is paired with i + 4; the last pair turns slowest.
  angle = 5 * 100.0 ** (-3 / 4)
  expected = q[0, 0, 0, 3] * np.cos(angle) - q[0, 0, 0, 7] * np.sin(angle)
  np.testing.assert_allclose(turned[0, 0, 0, 3], expected, rtol=1e-5)
  np.testing.assert_array_equal(rotate(q, jnp.array([[0]])), q)
  with pytest.raises(ValueError, match="head_dim 8"):
    rotate(q[..., :6], jnp.array([[0]]))


@every_scaling
def test_scores_see_only_distance(scaling):
  rotate = _rotary(scaling, head_dim=16)
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 3, 16))

  def score(i, j):
    return (rotate(q, jnp.array([[i]])) * rotate(k, jnp.array([[j]]))).sum(-1)

  np.testing.assert_allclose(score(9, 2), score(57, 50), atol=1e-4)
  same = np.allclose(score(209, 202), score(9, 2), atol=1e-4)
  assert same == (scaling.kind != "dynamic")  # whose frequencies change beyond 64 tokens


@every_scaling
def test_what_a_row_gets_does_not_depend_on_its_mates(scaling):
  rotate = _rotary(scaling, head_dim=16)
  x = jax.random.normal(jax.random.key(0), (2, 4, 3, 16))
  positions = jnp.array([[0, 1, 2, 3], [100, 200, 300, 400]])
  both = rotate(x, positions)
  for row in (0, 1):
    for at in range(4):
      alone = rotate(x[row : row + 1, at : at + 1], positions[row : row + 1, at : at + 1])
      np.testing.assert_allclose(both[row, at], alone[0, 0], atol=1e-6)


def test_linear_divides_positions():
  np.testing.assert_allclose(
    _angles(SCALINGS["linear"], [4, 40])[0], _angles(SCALINGS["default"], [1, 10])[0], atol=1e-6
  )


def test_llama3_and_yarn_keep_fast_pairs_and_divide_slow_ones():
  plain, _ = _angles(SCALINGS["default"], [1])
  for kind, factor in (("llama3", 8.0), ("yarn", 4.0)):
    angles, length = _angles(SCALINGS[kind], [1])
    ratio = (plain / angles)[0]
    np.testing.assert_allclose(ratio[[0, -1]], [1, factor], rtol=1e-4)
    assert (np.diff(ratio) >= -1e-4).all()
    np.testing.assert_allclose(length, 1.0 if kind == "llama3" else 0.1 * np.log(4) + 1, rtol=1e-5)


def test_dynamic_is_plain_within_the_original_context_and_slower_beyond():
  plain, _ = _angles(SCALINGS["default"], [3, 63, 300])
  angles, _ = _angles(SCALINGS["dynamic"], [3, 63, 300])
  np.testing.assert_allclose(angles[:2], plain[:2], atol=1e-5)
  # The slowest pair, which does not wrap around: theta grows by (4 * 301 / 64 - 3)^(16 / 14).
  theta = 10_000.0 * (4 * 301 / 64 - 3) ** (16 / 14)
  np.testing.assert_allclose(angles[2, -1], 300 * theta ** (-14 / 16), rtol=1e-4)
  assert plain[2, -1] > 1.5 * angles[2, -1]


def test_rotary_of_bf16_keeps_f32_angles():
  rotate = _rotary()
  x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
  exact = rotate(x.astype(jnp.float32), jnp.array([[8001]]))
  turned = rotate(x, jnp.array([[8001]]))
  assert turned.dtype == jnp.bfloat16
  np.testing.assert_allclose(turned.astype(jnp.float32), exact, atol=1e-2)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"kind": "su"}, "unknown rope type 'su', expected one of default, linear"),
    ({"kind": "linear", "factor": 0.5}, "factor 0.5 must be at least 1"),
    ({"kind": "yarn", "factor": 2.0}, "'yarn' needs the context of the first training"),
  ],
)
def test_bad_scaling(fields, words):
  with pytest.raises(ValueError, match=words):
    RopeScaling(**fields)
