"""Contiguous layout: all of a layer's keys and values in order, for layers that read everything.

Where a model sees only a window, a layer is a ring: position p lies in slot p modulo the number of
slots, of which there are enough for the window of every token of a prefill chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.segments import Segments, segment_sizes, write_at, write_chunk
from kvjax.config import CacheConfig, ModelConfig
from pallas_kernels.prefill_attention import PastBlocks, first_block

SEGMENT_TOKENS = 1024  # segments begin at its multiples; a multiple of every prefill chunk


class Contiguous(NamedTuple):
  """One layer.

  Attributes:
    keys: f[B, K, D, Ti] each; slots last, the order that a decode step on CPU reads fastest.
    values: f[B, K, Ti, D] each.
  """

  keys: Segments
  values: Segments


def slot_segments(cache: CacheConfig) -> tuple[int, ...]:
  """Tokens of each segment of a row; a step reads those that the longest row has reached."""
  if cache.window_tokens is not None:  # what is read at most is one piece
    return (cache.slots_per_row,)
  first = -(-cache.base_tokens // SEGMENT_TOKENS) * SEGMENT_TOKENS
  return segment_sizes(cache.slots_per_row, first)


def zeros(model: ModelConfig, cache: CacheConfig) -> Contiguous:
  """An empty layer."""
  b, k, d = cache.batch_size, model.num_kv_heads, model.head_dim
  sizes = slot_segments(cache)
  return Contiguous(
    tuple(jnp.zeros((b, k, d, size), cache.dtype) for size in sizes),
    tuple(jnp.zeros((b, k, size, d), cache.dtype) for size in sizes),
  )


def append_token(layer: Contiguous, k: jax.Array, v: jax.Array, position: jax.Array) -> Contiguous:
  """Writes k, v f[B, K, D] at position i32[B]; beyond the capacity nothing is written."""
  return Contiguous(
    write_at(layer.keys, position, k, axis=3), write_at(layer.values, position, v, axis=2)
  )


def append_chunk(
  layer: Contiguous, k: jax.Array, v: jax.Array, start: jax.Array, valid: jax.Array
) -> Contiguous:
  """Writes k, v f[B, S, K, D] from position start i32[] where valid bool[B, S]."""
  keys, values = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
  return Contiguous(
    write_chunk(layer.keys, keys, start, valid, axis=3),
    write_chunk(layer.values, values, start, valid, axis=2),
  )


def all_keys(layer: Contiguous) -> jax.Array:
  """f[B, K, T, D]: a copy of all keys."""
  return jnp.concatenate(layer.keys, axis=3).swapaxes(2, 3)


def slot_positions(layer: Contiguous, lengths: jax.Array, ring: bool) -> jax.Array:
  """i32[B, K, T]: position of the token in each slot, negative where there is none."""
  heads, slots = layer.values[0].shape[1], sum(values.shape[2] for values in layer.values)
  slot, newest = jnp.arange(slots)[None], lengths[:, None] - 1
  positions = newest - (newest - slot) % slots if ring else jnp.where(slot <= newest, slot, -1)
  return jnp.broadcast_to(positions[:, None], (lengths.shape[0], heads, slots))


def past_blocks(
  layer: Contiguous, start: jax.Array, block: int, window: int | None = None
) -> list[PastBlocks]:
  """What a chunk of block tokens from start i32[], a multiple of block, may see before itself.

  One source a segment; a layer of a model with a window has one segment.
  """
  if window is not None:
    return [_windowed_blocks(layer, start, block, window)]
  sources, offset = [], 0
  for keys, values in zip(layer.keys, layer.values, strict=True):
    size = values.shape[2]
    if size < block:  # a cut last segment; a whole block before start cannot lie in it
      break

    def read(i, keys=keys, values=values):
      return (
        jax.lax.dynamic_slice_in_dim(keys, i * block, block, axis=3),
        jax.lax.dynamic_slice_in_dim(values, i * block, block, axis=2),
      )

    sources.append(PastBlocks(0, jnp.clip(start - offset, 0, size) // block, read))
    offset += size
  return sources


def _windowed_blocks(layer: Contiguous, start, block: int, window: int) -> PastBlocks:
  (keys,), (values,) = layer
  slots = values.shape[2]

  def read(i):
    at = i * block % slots
    return (
      jax.lax.dynamic_slice_in_dim(keys, at, block, axis=3),
      jax.lax.dynamic_slice_in_dim(values, at, block, axis=2),
    )

  return PastBlocks(first_block(start, block, window), start // block, read)
