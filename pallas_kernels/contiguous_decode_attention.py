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
  q: jax.Array,
  keys: Segments,
  values: Segments,
  lengths: jax.Array,
  *,
  window: int | None = None,
) -> jax.Array:
  """Attention of one token a row over slots [0, length) of its segments, or the newest of them.

  A segment that lies beyond the longest row is not read, so time follows the lengths and not the
  capacity.

  Args:
    q: f[B, K, G, D], scaled by no one yet: 1/sqrt(D) is applied here.
    keys: f[B, K, D, Ti] each, slots along the last axis, which XLA on CPU reads 1.5 times as fast
      as [B, K, Ti, D].
    values: f[B, K, Ti, D] each.
    lengths: i32[B], tokens of each row; 0 gives zeros. Slots without one may hold anything.
    window: newest tokens that count; None for all. With a window the slots form a ring: position p
      lies in slot p modulo their number, which must be at least the window.

  Returns:
    f[B, K, G, D] in the dtype of q.
  """
  _check(q, keys, values, lengths, window)
  scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(keys[0].dtype)
  args = (scaled, tuple(keys), tuple(values), lengths)
  cpu, default = (partial(form, window=window) for form in (_by_segments, _by_blocks))
  out = jax.lax.platform_dependent(*args, cpu=cpu, default=default)
  return out.astype(q.dtype)


def _by_segments(q, keys, values, lengths, window):
  """Whole segments: nothing is sliced, so nothing is copied."""
  longest = lengths.max()
  parts, offset = empty_parts(q.shape), 0
  for k, v in zip(keys, values, strict=True):
    valid = _valid(offset + jnp.arange(v.shape[2]), lengths, window, _total(values))
    attend = partial(_segment, q, k, v, valid)
    if offset == 0:
      parts = attend()
    else:
      parts = run_if(longest > offset, lambda p, attend=attend: merge_parts(p, attend()), parts)
    offset += v.shape[2]
  out = normalise(parts, _nonempty(lengths))
  return unless_finite(out, lambda: _by_blocks(q, keys, values, lengths, window))


def _segment(q, k, v, valid) -> Parts:
  scores = jnp.einsum("bkgd,bkdt->bkgt", q, k, preferred_element_type=jnp.float32)
  return parts_of(jnp.where(valid[:, None, None], scores, NEG), v)


def _by_blocks(q, keys, values, lengths, window):
  """Blocks of slots with masked values, a static number of them: no host round trip on a GPU."""
  parts, offset = empty_parts(q.shape), 0
  for k, v in zip(keys, values, strict=True):
    slots = v.shape[2]
    block = min(_CAREFUL_BLOCK, slots)

    def body(i, parts, k=k, v=v, slots=slots, block=block, offset=offset):
      # The last block begins earlier where it does not fit; what it repeats is masked.
      start = jnp.minimum(i * block, slots - block)
      slot = start + jnp.arange(block)
      valid = _valid(offset + slot, lengths, window, _total(values)) & (slot >= i * block)[None]
      kb = jax.lax.dynamic_slice_in_dim(k, start, block, axis=3)
      vb = jax.lax.dynamic_slice_in_dim(v, start, block, axis=2)
      scores = jnp.einsum("bkgd,bkdt->bkgt", q, kb, preferred_element_type=jnp.float32)
      scores = jnp.where(valid[:, None, None], scores, NEG)
      vb = jnp.where(valid[:, None, :, None], vb, jnp.zeros_like(vb))
      return merge_parts(parts, parts_of(scores, vb))

    parts = jax.lax.fori_loop(0, -(-slots // block), body, parts)
    offset += slots
  return normalise(parts, _nonempty(lengths))


def _valid(slots, lengths, window: int | None, total: int):
  """bool[B, T]: which of the slots i32[T] count."""
  if window is None:
    return slots[None] < lengths[:, None]
  age = (lengths[:, None] - 1 - slots[None]) % total  # of the token in the slot, the newest has 0
  return age < jnp.minimum(lengths, window)[:, None]


def _total(values) -> int:
  return sum(v.shape[2] for v in values)


def _nonempty(lengths):
  return (lengths > 0)[:, None, None, None]


def _check(q, keys, values, lengths, window):
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
  if window is not None and window < 1:
    raise ValueError(f"window {window} must be positive, or None for no window")


def contiguous_decode_attention_reference(q, keys, values, lengths, window=None):
  """The same over all slots at once, everything in f32."""
  k = jnp.concatenate([x.swapaxes(2, 3) for x in keys], axis=2).astype(jnp.float32)
  v = jnp.concatenate(list(values), axis=2).astype(jnp.float32)
  slots, newest = jnp.arange(k.shape[2])[None], lengths[:, None] - 1
  if window is None:
    valid = slots <= newest
  else:
    position = newest - (newest - slots) % k.shape[2]
    valid = (position >= 0) & (position > newest - window)
  valid = valid[:, None, :, None]
  scores = jnp.einsum("bkgd,bktd->bkgt", q.astype(jnp.float32), jnp.where(valid, k, 0.0))
  scores = jnp.where(valid.swapaxes(2, 3), scores * q.shape[-1] ** -0.5, -jnp.inf)
  weights = jnp.where(_nonempty(lengths), jax.nn.softmax(scores, axis=-1), 0.0)
  return jnp.einsum("bkgt,bktd->bkgd", weights, jnp.where(valid, v, 0.0)).astype(q.dtype)
