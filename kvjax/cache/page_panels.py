"""A few numbers of every page, in panels of 64 pages, as products with a few queries read them.

A digest of a page is Z numbers. Panels f[B, K, C, Z, 64] hold the digests of 64 C pages: an array
f[Z, 64] is multiplied as it lies, where f[Z, pages] would first be copied by XLA's libraries for a
CPU (160 us for 330, for 4 x 3 lists of 512 pages of 128 numbers and three queries each), and on a
GPU it is what a program fetches at once. They grow in segments, as `segments` do; pages that do not
fill a panel have a narrower one of their own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.cache.segments import Segments, segment_sizes
from pallas_kernels.control import run_if
from pallas_kernels.page_scores import PANEL

FIRST_SEGMENT_PAGES = 512


def no_panels(lists: tuple[int, int], numbers: int, pages: int, dtype: str) -> Segments:
  """Zeros [B, K, C, Z, W] of so many pages in all, lists (B, K) and Z numbers of a page."""
  panels = []
  for size in segment_sizes(pages, FIRST_SEGMENT_PAGES):
    panels += [(size // PANEL, PANEL)] if size >= PANEL else []
    panels += [(1, size % PANEL)] if size % PANEL else []
  return tuple(jnp.zeros((*lists, count, numbers, width), dtype) for count, width in panels)


def num_pages(segment: jax.Array) -> int:
  """C * W."""
  return segment.shape[2] * segment.shape[4]


def read_page(segments: Segments, page: jax.Array) -> jax.Array:
  """[B, K, Z] of page i32[B] of each row."""
  found, offset = None, 0
  for segment in segments:
    place = jnp.clip(page - offset, 0, num_pages(segment) - 1)
    here = segment[_at(segment, place[:, None])][:, :, 0]
    inside = (page >= offset)[:, None, None]
    found = here if found is None else jnp.where(inside, here, found)
    offset += num_pages(segment)
  assert found is not None
  return found


def write_page(segments: Segments, page: jax.Array, digest: jax.Array) -> Segments:
  """With digest [B, K, Z] of page i32[B] of each row; beyond the end nothing is written."""
  written, offset = [], 0
  for segment in segments:
    written.append(_written(segment, (page - offset)[:, None], digest[:, :, None]))
    offset += num_pages(segment)
  return tuple(written)


def write_pages(
  segments: Segments, digests: jax.Array, start: jax.Array, valid: jax.Array
) -> Segments:
  """With digests [B, K, S, Z] of the pages from start i32[] on, where valid bool[B, S]."""
  s = digests.shape[2]
  written, offset = [], 0
  for segment in segments:
    pages = jnp.where(valid, start - offset + jnp.arange(s), -1)

    def write(segment, pages=pages):
      return _written(segment, pages, digests)

    touched = (start < offset + num_pages(segment)) & (start + s > offset)
    written.append(run_if(touched, write, segment))
    offset += num_pages(segment)
  return tuple(written)


def _written(segment: jax.Array, pages: jax.Array, digests: jax.Array) -> jax.Array:
  """With digests [B, K, S, Z] in its pages i32[B, S]; outside of it nothing is written."""
  pages = jnp.where(pages < 0, num_pages(segment), pages)  # a negative index would wrap around
  there = segment.at[_at(segment, pages)]
  return there.set(digests.astype(segment.dtype), mode="drop", unique_indices=True)


def _at(segment: jax.Array, pages: jax.Array):
  """The index of pages i32[B, S] in a segment, which gives [B, K, S, Z]."""
  (b, k), width = segment.shape[:2], segment.shape[4]
  rows, heads = jnp.arange(b)[:, None, None], jnp.arange(k)[None, :, None]
  return rows, heads, (pages // width)[:, None], slice(None), (pages % width)[:, None]
