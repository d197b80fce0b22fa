"""Decode attention over a contiguous cache: one query token a row, all of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.control import run_if, unless_finite
from pallas_kernels.softmax import NEG, Parts, empty_parts, merge_parts, normalise, parts_of

Segments = Sequence[jax.Array]
_CAREFUL_BLOCK = 512  # key slots; bounds what masking the values copies


def contiguous_decode_attention(
  q: jax.Array, keys: Segments, values: Segments, lengths: jax.Array
) -> jax.Array:
  """Attention of one token a row over slots [0, length) of its segments.

  A segment that lies beyond the longest row is not read, so time follows the lengths and not the
  capacity.

  Args:
    q: f[B, K, G, D], scaled by no one yet: 1/sqrt(D) is applied here.
    keys: f[B, K, D, Ti] each, slots along the last axis, which XLA on CPU reads 1.5 times as fast
      as [B, K, Ti, D].
    values: f[B, K, Ti, D] each.
    lengths: i32[B], valid slots of each row; 0 gives zeros. Other slots may hold anything.

  Returns:
    f[B, K, G, D] in the dtype of q.
  """
  _check(q, keys, values, lengths)
  scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(keys[0].dtype)
  args = (scaled, tuple(keys), tuple(values), lengths)
  out = jax.lax.platform_dependent(*args, cpu=_by_segments, default=_by_blocks)
  return out.astype(q.dtype)


def _by_segments(q, keys, values, lengths):
  """Whole segments: nothing is sliced, so nothing is copied."""
  longest = lengths.max()
  parts, offset = empty_parts(q.shape), 0
  for k, v in zip(keys, values, strict=True):
    attend = partial(_segment, q, k, v, offset, lengths)
    if offset == 0:
      parts = attend()
    else:
      parts = run_if(longest > offset, lambda p, attend=attend: merge_parts(p, attend()), parts)
    offset += v.shape[2]
  out = normalise(parts, _nonempty(lengths))
  return unless_finite(out, lambda: _by_blocks(q, keys, values, lengths))


def _segment(q, k, v, offset: int, lengths) -> Parts:
  scores = jnp.einsum("bkgd,bkdt->bkgt", q, k, preferred_element_type=jnp.float32)
  valid = offset + jnp.arange(v.shape[2])[None] < lengths[:, None]
  return parts_of(jnp.where(valid[:, None, None], scores, NEG), v)


def _by_blocks(q, keys, values, lengths):
  """Blocks of slots with masked values, a static number of them: no host round trip on a GPU."""
  parts, offset = empty_parts(q.shape), 0
  for k, v in zip(keys, values, strict=True):
    slots = v.shape[2]
    block = min(_CAREFUL_BLOCK, slots)

    def body(i, parts, k=k, v=v, slots=slots, block=block, offset=offset):
      # The last block begins earlier where it does not fit; what it repeats is masked.
      start = jnp.minimum(i * block, slots - block)
      slot = start + jnp.arange(block)
      valid = (slot >= i * block)[None] & (offset + slot[None] < lengths[:, None])  # [B, block]
      kb = jax.lax.dynamic_slice_in_dim(k, start, block, axis=3)
      vb = jax.lax.dynamic_slice_in_dim(v, start, block, axis=2)
      scores = jnp.einsum("bkgd,bkdt->bkgt", q, kb, preferred_element_type=jnp.float32)
      scores = jnp.where(valid[:, None, None], scores, NEG)
      vb = jnp.where(valid[:, None, :, None], vb, jnp.zeros_like(vb))
      return merge_parts(parts, parts_of(scores, vb))

    parts = jax.lax.fori_loop(0, -(-slots // block), body, parts)
    offset += slots
  return normalise(parts, _nonempty(lengths))


def _nonempty(lengths):
  return (lengths > 0)[:, None, None, None]


def _check(q, keys, values, lengths):
  b, k, _, d = q.shape
  for key, value in zip(keys, values, strict=True):
    slots = value.shape[2]
    if key.shape != (b, k, d, slots) or value.shape != (b, k, slots, d):
      raise ValueError(
        f"keys {key.shape} and values {value.shape} do not fit q {q.shape}: "
        "expected [B, K, D, T] and [B, K, T, D]"
      )
  if lengths.shape != (b,):
    raise ValueError(f"lengths {lengths.shape} does not fit q {q.shape}: expected [B]")


def contiguous_decode_attention_reference(q, keys, values, lengths):
  """The same in four lines, everything in f32."""
  k = jnp.concatenate([x.swapaxes(2, 3) for x in keys], axis=2).astype(jnp.float32)
  v = jnp.concatenate(list(values), axis=2).astype(jnp.float32)
  valid = (jnp.arange(k.shape[2])[None] < lengths[:, None])[:, None, :, None]
  scores = jnp.einsum("bkgd,bktd->bkgt", q.astype(jnp.float32), jnp.where(valid, k, 0.0))
  scores = jnp.where(valid.swapaxes(2, 3), scores * q.shape[-1] ** -0.5, -jnp.inf)
  weights = jnp.where(_nonempty(lengths), jax.nn.softmax(scores, axis=-1), 0.0)
  return jnp.einsum("bkgt,bktd->bkgd", weights, jnp.where(valid, v, 0.0)).astype(q.dtype)
