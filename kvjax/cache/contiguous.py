"""Contiguous layout: all of a layer's keys and values in order, for layers that read everything."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.segments import Segments, segment_sizes, write_at, write_chunk
from kvjax.config import CacheConfig, ModelConfig
from pallas_kernels.prefill_attention import PastBlocks

SEGMENT_TOKENS = 1024  # segments begin at its multiples; a multiple of every prefill chunk


class Contiguous(NamedTuple):
  """One layer.

  Attributes:
    keys: f[B, K, D, Ti] each; slots last, the order that a decode step on CPU reads fastest.
    values: f[B, K, Ti, D] each.
  """

  keys: Segments
  values: Segments


def zeros(model: ModelConfig, cache: CacheConfig) -> Contiguous:
  """An empty layer."""
  b, k, d = cache.batch_size, model.num_kv_heads, model.head_dim
  first = -(-cache.base_tokens // SEGMENT_TOKENS) * SEGMENT_TOKENS
  sizes = segment_sizes(cache.capacity_tokens, first)
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


def past_blocks(layer: Contiguous, start: jax.Array, block: int) -> list[PastBlocks]:
  """Everything before start i32[], which must be a multiple of block; one source a segment."""
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

    count = jnp.clip(start - offset, 0, size) // block
    sources.append(PastBlocks(count, read))
    offset += size
  return sources
