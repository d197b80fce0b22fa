"""Panels of pages behave as the one array that they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import page_panels
from kvjax.cache.page_panels import no_panels, read_page, write_page, write_pages
from pallas_kernels.page_scores import PANEL
from tests.panels import in_order

B, K, Z = 2, 2, 3
TOTAL = 512 + PANEL + 10  # a segment of eight panels, one of one, and one of ten pages


def _some():
  """The panels of numbers f[B, K, TOTAL, Z], and these."""
  whole = np.random.default_rng(0).standard_normal((B, K, TOTAL, Z)).astype(np.float32)
  panels, offset = [], 0
  for segment in no_panels((B, K), Z, TOTAL, "float32"):
    _, _, count, _, width = segment.shape
    part = whole[:, :, offset : offset + count * width]
    panels.append(jnp.asarray(part.reshape(B, K, count, width, Z).swapaxes(3, 4)))
    offset += count * width
  assert offset == TOTAL
  return tuple(panels), whole


@given(pages=st.integers(1, 5000))
@settings(deadline=None, max_examples=30)
def test_panels_add_up(pages):
  shapes = [x.shape for x in no_panels((1, 1), 1, pages, "float32")]
  assert sum(shape[2] * shape[4] for shape in shapes) == pages
  assert all(shape[4] == PANEL or shape[2] == 1 for shape in shapes)
  narrow = [shape[4] < PANEL for shape in shapes]
  assert not any(narrow[:-1]), "only what is left over is narrower"
  assert len(shapes) <= 3 + (pages // page_panels.FIRST_SEGMENT_PAGES).bit_length()


def test_panels_in_order():
  panels, whole = _some()
  np.testing.assert_array_equal(in_order(panels), whole)
  assert [x.shape[2:] for x in panels] == [(8, Z, PANEL), (1, Z, PANEL), (1, Z, 10)]


EDGES = (0, 63, 64, 511, 512, 575, 576, TOTAL - 1)
pages = st.one_of(st.sampled_from(EDGES), st.integers(0, TOTAL - 1))
_read, _write, _write_many = map(jax.jit, (read_page, write_page, write_pages))


@settings(deadline=None, max_examples=30)
@given(page=st.lists(pages, min_size=B, max_size=B))
def test_read_page(page):
  panels, whole = _some()
  found = _read(panels, jnp.asarray(page))
  for row, at in enumerate(page):
    np.testing.assert_array_equal(found[row], whole[row, :, at])


@settings(deadline=None, max_examples=30)
@given(page=st.lists(st.one_of(pages, st.integers(TOTAL, TOTAL + 99)), min_size=B, max_size=B))
def test_write_page(page):
  """One page a row; beyond the end, none."""
  panels, whole = _some()
  update = np.random.default_rng(1).standard_normal((B, K, Z)).astype(np.float32)
  found = _write(panels, jnp.asarray(page), jnp.asarray(update))
  for row, at in enumerate(page):
    if at < TOTAL:
      whole[row, :, at] = update[row]
  np.testing.assert_array_equal(in_order(found), whole)


@pytest.mark.parametrize("length", [1, 6, 65, TOTAL + 3])
@settings(deadline=None, max_examples=30)
@given(data=st.data(), start=st.one_of(pages, st.integers(TOTAL, TOTAL + 5)))
def test_write_pages(length, data, start):
  """Any start, any holes, more pages than a panel or than all, and over the end."""
  seed = data.draw(st.integers(0, 9))
  valid = np.random.default_rng(seed).random((B, length)) < 0.7
  panels, whole = _some()
  update = np.random.default_rng(1).standard_normal((B, K, length, Z)).astype(np.float32)
  found = _write_many(panels, jnp.asarray(update), jnp.int32(start), jnp.asarray(valid))
  for b, at in np.ndindex(B, length):
    if valid[b, at] and start + at < TOTAL:
      whole[b, :, start + at] = update[b, :, at]
  np.testing.assert_array_equal(in_order(found), whole)


def test_writes_take_the_dtype_of_the_cache():
  panels = no_panels((B, K), Z, 4, "bfloat16")
  page, valid = jnp.zeros(B, jnp.int32), jnp.ones((B, 2), bool)
  assert write_page(panels, page, jnp.ones((B, K, Z)))[0].dtype == jnp.bfloat16
  many = write_pages(panels, jnp.ones((B, K, 2, Z)), jnp.int32(1), valid)
  assert many[0].dtype == jnp.bfloat16
