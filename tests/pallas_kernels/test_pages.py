"""Bounds and scores of pages, and control flow that does nothing where nothing is to be done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_bounds as bounds
from pallas_kernels.control import run_if, unless_finite
from pallas_kernels.page_scores import page_products, page_scores, page_scores_reference
from tests.panels import in_panels

RELATIVE = {"float32": 1e-5, "bfloat16": 2e-2}
COUNTS = (1, 2, 7, 8)


def _normal(seed, shape, dtype="float32"):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("poison", [0.0, jnp.nan, jnp.inf], ids=str)
@pytest.mark.parametrize("d", [16, 128])
def test_bounds_of_partly_filled_pages(d, poison, dtype):
  keys = np.array(_normal(0, (2, len(COUNTS), 8, d), dtype))
  valid = np.broadcast_to(np.arange(8) < np.array(COUNTS)[:, None], keys.shape[:-1])
  keys[~valid] = poison
  found = jax.jit(bounds.page_bounds)(keys, valid)
  assert found.dtype == jnp.dtype(dtype) and found.shape == (2, len(COUNTS), 2 * d)
  for page in np.ndindex(2, len(COUNTS)):
    expected = bounds.page_bounds_reference(keys[page], valid[page])
    expected = np.asarray(expected, np.float32)
    np.testing.assert_array_equal(np.asarray(found, np.float32)[page], expected)


def test_bounds_grow_key_by_key():
  keys = _normal(0, (3, 8, 16))
  grown = jnp.full((3, 32), jnp.nan)  # of whoever had the page before
  for slot in range(8):
    grown = bounds.extend_bounds(grown, keys[:, slot], jnp.full(3, slot == 0))
    valid = jnp.broadcast_to(jnp.arange(8)[None] <= slot, (3, 8))
    np.testing.assert_array_equal(grown, bounds.page_bounds(keys, valid))


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("d", [16, 64, 128])
def test_scores(d, group, dtype):
  q = _normal(0, (2, 2, group, d), dtype)
  lower, upper = np.sort(np.random.default_rng(1).standard_normal((2, 2, 2, d, 14)), axis=0)
  whole = np.asarray(jnp.asarray(np.concatenate([upper, lower], axis=2), dtype))
  expected = np.asarray(jax.jit(page_scores_reference)(q, whole.swapaxes(2, 3)))
  segments = tuple(in_panels(jnp.asarray(x)) for x in np.split(whole, [4, 8], axis=-1))
  tolerance = {"rtol": RELATIVE[dtype], "atol": RELATIVE[dtype] * np.abs(expected).max()}
  score = jax.jit(page_scores)
  for num_pages, read in ((1, 4), (4, 4), (5, 8), (8, 8), (9, 14), (14, 14)):
    found = np.asarray(score(q, segments, jnp.int32(num_pages)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[..., :read], expected[..., :read], **tolerance)
    assert np.isneginf(found[..., read:]).all()


@pytest.mark.parametrize("dtype", RELATIVE)
def test_products_with_int8(dtype):
  """Segments of fewer pages than a panel, of one panel, of two, and of one with more pages."""
  queries = _normal(0, (2, 2, 3, 33), dtype)
  rng = np.random.default_rng(1)
  numbers = rng.integers(-127, 128, (2, 2, 33, 302)).astype(np.int8)
  scales = rng.uniform(0.1, 2, (2, 2, 1, 302)).astype(np.float32)
  products = np.einsum("bkgz,bkzp->bkgp", np.asarray(queries, np.float64), numbers.astype(float))
  expected = products * scales
  tolerance = {"rtol": RELATIVE[dtype], "atol": RELATIVE[dtype] * np.abs(expected).max()}
  places = [10, 74, 202]  # segments of 10, 64, 128 and 100 pages
  segments = [
    tuple(in_panels(jnp.asarray(one)) for one in np.split(x, places, axis=-1))
    for x in (numbers, scales)
  ]
  product = jax.jit(lambda q, digests, count, scales: page_products(q, digests, count, scales))
  for num_pages, read in ((1, 10), (10, 10), (11, 74), (75, 202), (302, 302)):
    found = product(queries, segments[0], jnp.int32(num_pages), segments[1])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[..., :read], expected[..., :read], **tolerance)
    assert np.isneginf(found[..., read:]).all()


def test_scores_of_real_pages_keep_to_themselves():
  """NaN in the bounds of one page is no other page's concern."""
  whole = _normal(1, (1, 1, 32, 6)).at[..., 4:].set(jnp.nan)
  found = page_scores(_normal(0, (1, 1, 2, 16)), (in_panels(whole),), jnp.int32(4))
  assert np.isfinite(found[..., :4]).all()


def test_score_is_an_upper_bound_and_exact_for_pages_of_one_key():
  q, keys = _normal(0, (1, 1, 4, 16)), _normal(1, (1, 1, 6, 8, 16))
  products = jnp.einsum("bkgd,bkpcd->bkgpc", q, keys)
  of_pages = bounds.page_bounds(keys, jnp.ones(keys.shape[:-1], bool)).swapaxes(2, 3)
  found = page_scores(q, (in_panels(of_pages),), jnp.int32(6))
  assert (found >= products.max(axis=-1) - 1e-5).all()
  of_keys = bounds.page_bounds(keys.reshape(1, 1, 48, 1, 16), jnp.ones((1, 1, 48, 1), bool))
  found = page_scores(q, (in_panels(of_keys.swapaxes(2, 3)),), jnp.int32(48))
  np.testing.assert_allclose(found, products.reshape(1, 1, 4, 48), atol=1e-5)


@pytest.mark.parametrize("flag", [True, False])
def test_run_if(flag):
  ran = []

  @jax.jit
  def program(flag, x, y):
    def work(x):
      jax.debug.callback(lambda _: ran.append(1), y)
      return x + y

    return run_if(flag, work, x)

  out = program(jnp.asarray(flag), jnp.ones(3), jnp.full(3, 2.0))
  jax.effects_barrier()
  np.testing.assert_array_equal(out, np.full(3, 3.0 if flag else 1.0))
  assert len(ran) == flag


@pytest.mark.usefixtures("fully_optimized")
def test_run_if_keeps_what_it_computes_inside():
  """XLA moves what is the same in every trip out of a loop; the product must stay in the branch."""

  def program(flag, x, y, big):
    return run_if(flag, lambda x: x + y @ big, x)

  args = (jnp.asarray(False), jnp.ones((4, 64)), jnp.ones((4, 64)), jnp.ones((64, 64)))
  text = jax.jit(program).lower(*args).compile().as_text()
  entry = text[text.index("ENTRY") :]
  assert " conditional(" in entry
  assert "dot" in text and " dot(" not in entry and "matmul" not in entry


def test_unless_finite():
  for value, expected in ((1.0, 1.0), (jnp.nan, 0.0), (jnp.inf, 0.0), (-jnp.inf, 0.0)):
    out = unless_finite(jnp.array([1.0, value]), lambda: jnp.zeros(2))
    assert out[0] == (1.0 if value == 1.0 else 0.0) and out[1] == expected
