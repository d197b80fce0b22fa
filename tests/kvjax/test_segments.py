"""Arrays in segments behave as the one array that they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache.segments import segment_sizes, write_at, write_chunk

B, K, X = 2, 2, 3
SIZES = (4, 4, 8, 3)
TOTAL = sum(SIZES)


@given(st.integers(1, 10**7), st.integers(1, 5000))
def test_sizes_double_and_add_up(total, first):
  sizes = segment_sizes(total, first)
  assert sum(sizes) == total and min(sizes) > 0
  before = 0
  for size in sizes[:-1]:
    assert size == (before or first)
    before += size
  assert sizes[-1] <= (before or first)
  assert len(sizes) <= 2 + max(0, total // first).bit_length()


def _arrays(axis: int):
  shape = (B, K, X, TOTAL) if axis == 3 else (B, K, TOTAL, X)
  whole = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  return whole, tuple(map(jnp.asarray, np.split(whole, np.cumsum(SIZES)[:-1], axis=axis)))


def _same(segments, whole, axis):
  assert tuple(segment.shape[axis] for segment in segments) == SIZES
  np.testing.assert_array_equal(np.concatenate(segments, axis=axis), whole)


indices = st.lists(st.integers(0, TOTAL + 9), min_size=B, max_size=B)
_write_at = jax.jit(write_at, static_argnames="axis")
_write_chunk = jax.jit(write_chunk, static_argnames="axis")


@pytest.mark.parametrize("axis", [2, 3])
@settings(deadline=None, max_examples=40)
@given(index=indices)
def test_write_at(axis, index):
  whole, segments = _arrays(axis)
  update = np.random.default_rng(1).standard_normal((B, K, X)).astype(np.float32)
  found = _write_at(segments, jnp.asarray(index), jnp.asarray(update), axis=axis)
  for row, at in enumerate(index):
    if at < TOTAL:
      np.moveaxis(whole, axis, 1)[row, at] = update[row]
  _same(found, whole, axis)


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("length", [1, 4, 6, 16, 25])
@settings(deadline=None, max_examples=40)
@given(data=st.data(), start=st.integers(0, TOTAL + 5))
def test_write_chunk(axis, length, data, start):
  """Any start, any holes, chunks longer than a segment or than all, and over the end."""
  row = st.lists(st.booleans(), min_size=length, max_size=length)
  valid = np.array(data.draw(st.lists(row, min_size=B, max_size=B)))
  whole, segments = _arrays(axis)
  shape = (B, K, X, length) if axis == 3 else (B, K, length, X)
  chunk = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
  found = _write_chunk(
    segments, jnp.asarray(chunk), jnp.int32(start), jnp.asarray(valid), axis=axis
  )
  target, source = np.moveaxis(whole, axis, 1), np.moveaxis(chunk, axis, 1)
  for b, at in np.ndindex(B, length):
    if valid[b, at] and start + at < TOTAL:
      target[b, start + at] = source[b, at]
  _same(found, whole, axis)


def test_writes_take_the_dtype_of_the_cache():
  segments = (jnp.zeros((B, K, X, 4), jnp.bfloat16),)
  index, valid = jnp.zeros(B, jnp.int32), jnp.ones((B, 2), bool)
  assert write_at(segments, index, jnp.ones((B, K, X)), axis=3)[0].dtype == jnp.bfloat16
  chunk = jnp.ones((B, K, X, 2))
  assert write_chunk(segments, chunk, jnp.int32(1), valid, axis=3)[0].dtype == jnp.bfloat16
