"""Arrays that are kept in segments along one axis, each about as long as all before it.

A step may read whole arrays at full speed, but on CPU a slice of one is a copy. So what grows with
the context is kept as a tuple of arrays of doubling size: a step reads those that it has reached
and skips the others, and its time follows the length (to within a factor of two) and not the
capacity, without copies and without compiling again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.control import run_if

Segments = tuple[jax.Array, ...]


def segment_sizes(total: int, first: int) -> tuple[int, ...]:
  """Sizes (first, first, 2 first, 4 first, ...), the last one cut so that they add up to total.

  >>> segment_sizes(5000, 1024)
  (1024, 1024, 2048, 904)
  """
  sizes = [min(first, total)]
  while sum(sizes) < total:
    sizes.append(min(sum(sizes), total - sum(sizes)))
  return tuple(sizes)


def write_at(segments: Segments, index: jax.Array, update: jax.Array, axis: int) -> Segments:
  """One place a row: segments f[B, K, ...] get update at index i32[B] of their axis.

  Args:
    segments: f[B, K, X, Ti] with axis 3, or f[B, K, Ti, X] with axis 2.
    index: i32[B], counted over all segments; beyond the end nothing is written.
    update: f[B, K, X].
    axis: 2 or 3.
  """
  b, k = update.shape[:2]
  rows, heads = jnp.arange(b)[:, None], jnp.arange(k)[None, :]
  written, offset = [], 0
  for segment in segments:
    size = segment.shape[axis]
    place = index - offset
    place = jnp.where(place < 0, size, place)[:, None]  # a negative index would wrap around
    at = segment.at[rows, heads, place] if axis == 2 else segment.at[rows, heads, :, place]
    written.append(at.set(update.astype(segment.dtype), mode="drop", unique_indices=True))
    offset += size
  return tuple(written)


def write_chunk(
  segments: Segments, chunk: jax.Array, start: jax.Array, valid: jax.Array, axis: int
) -> Segments:
  """S places of every row from the same start: what is not valid leaves its slot as it was.

  Args:
    segments: f[B, K, X, Ti] with axis 3, or f[B, K, Ti, X] with axis 2.
    chunk: f[B, K, X, S] or f[B, K, S, X].
    start: i32[], counted over all segments.
    valid: bool[B, S].
    axis: 2 or 3.
  """
  length = chunk.shape[axis]
  written, offset = [], 0
  for segment in segments:
    size = segment.shape[axis]

    def write(segment, offset=offset):
      return _write_window(segment, chunk, start - offset, valid, axis)

    touched = (start < offset + size) & (start + length > offset)
    written.append(run_if(touched, write, segment))
    offset += size
  return tuple(written)


def _write_window(segment, chunk, start, valid, axis):
  """`write_chunk` on one segment; start may lie before it or run over its end."""
  length, size = chunk.shape[axis], segment.shape[axis]
  window = min(length, size)
  first = jnp.clip(start, 0, size - window)
  shift = jnp.clip(first - start, -window, length)  # place in the chunk of the window's first slot
  source = jax.lax.dynamic_slice_in_dim(_pad(chunk, window, axis), shift + window, window, axis)
  take = jax.lax.dynamic_slice_in_dim(_pad(valid, window, 1), shift + window, window, 1)
  take = jnp.expand_dims(take, (1, 2) if axis == 3 else (1, 3))
  old = jax.lax.dynamic_slice_in_dim(segment, first, window, axis)
  new = jnp.where(take, source.astype(segment.dtype), old)
  return jax.lax.dynamic_update_slice_in_dim(segment, new, first, axis)


def _pad(x, amount, axis):
  return jnp.pad(x, [(amount, amount) if i == axis else (0, 0) for i in range(x.ndim)])
