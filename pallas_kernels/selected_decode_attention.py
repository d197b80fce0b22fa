"""Sparse paged decode attention: one query token a row, the pages that were selected for it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.control import unless_finite
from pallas_kernels.softmax import NEG, normalise, parts_of


def selected_decode_attention(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  pages: jax.Array,
  mask: jax.Array,
  *,
  slots: jax.Array | None = None,
  turn: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
  """Attention of one token a row and head list over its own pages, or over single slots of them.

  Args:
    q: f[B, K, G, D]; 1/sqrt(D) is applied here. Where every query head has pages of its own, K
      stands for H and G is 1.
    keys: f[N, C, D], the whole pool.
    values: f[N, C, D], the whole pool.
    pages: i32[B, K, M], rows of the pool; anything outside [0, N) must be masked.
    mask: bool[B, K, M, C], slots that count. Others may hold anything; none at all gives zeros.
    slots: None for whole pages, or i32[B, K, M], the one slot of each page that counts; the mask is
      then [B, K, M, 1].
    turn: applied to the gathered keys, f[B, K, M, C, D] -> the same shape: the rotation of caches
      that keep keys without it. C is 1 with slots.

  Returns:
    f[B, K, G, D] in the dtype of q.
  """
  _check(q, keys, values, pages, mask, slots)
  scores = _scores(q, keys, pages, slots, turn)
  valid = mask.reshape(*mask.shape[:2], -1)
  scores = jnp.where(valid[:, :, None], scores, NEG)
  nonempty = valid.any(axis=-1)[..., None, None]

  def masked(scores, valid, nonempty, values, pages, slots):
    gathered = _in_a_row(_gather(values, pages, slots))
    gathered = jnp.where(valid[..., None], gathered, jnp.zeros_like(gathered))
    return normalise(parts_of(scores, gathered), nonempty)

  def direct(*args):
    scores, _, nonempty, values, pages, slots = args
    out = normalise(parts_of(scores, _in_a_row(_gather(values, pages, slots))), nonempty)
    return unless_finite(out, lambda: masked(*args))

  args = (scores, valid, nonempty, values, pages, slots)
  return jax.lax.platform_dependent(*args, cpu=direct, default=masked).astype(q.dtype)


def _scores(q, keys, pages, slots, turn):
  """f32[B, K, G, M*C]."""
  scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(keys.dtype)
  gathered = _gather(keys, pages, slots)
  gathered = _in_a_row(gathered if turn is None else turn(gathered))
  return jnp.einsum("bkgd,bktd->bkgt", scaled, gathered, preferred_element_type=jnp.float32)


def _gather(pool, pages, slots):
  """f[B, K, M, C, D] of pages, one copy of C*D numbers each; or f[B, K, M, 1, D] of slots."""
  if slots is None:
    return pool.at[pages].get(mode="clip")
  return pool.at[pages, slots].get(mode="clip")[..., None, :]


def _in_a_row(gathered):
  """f[B, K, M, C, D] -> f[B, K, M*C, D]."""
  b, k, _, _, d = gathered.shape
  return gathered.reshape(b, k, -1, d)


def _check(q, keys, values, pages, mask, slots):
  b, k, _, d = q.shape
  _, c, width = values.shape
  if width != d or keys.shape != values.shape:
    raise ValueError(
      f"pools {keys.shape} and {values.shape} do not fit q {q.shape}: expected [N, C, D] of both"
    )
  read = c if slots is None else 1
  if pages.shape[:2] != (b, k) or mask.shape != (*pages.shape, read):
    raise ValueError(
      f"pages {pages.shape} and mask {mask.shape} do not fit q {q.shape} and pool {values.shape}: "
      f"expected [B, K, M] and [B, K, M, {'C' if slots is None else 1}]"
    )
  if slots is not None and slots.shape != pages.shape:
    raise ValueError(f"slots {slots.shape} do not fit pages {pages.shape}: expected the same")


def selected_decode_attention_reference(q, keys, values, pages, mask, *, slots=None, turn=None):
  """The same without tricks, everything in f32, values masked before the product."""
  valid = mask.reshape(*mask.shape[:2], -1)[..., None]
  k = _gather(keys, pages, slots).astype(jnp.float32)
  k = jnp.where(valid, _in_a_row(k if turn is None else turn(k)), 0.0)
  v = jnp.where(valid, _in_a_row(_gather(values, pages, slots)).astype(jnp.float32), 0.0)
  scores = jnp.einsum("bkgd,bktd->bkgt", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
  scores = jnp.where(valid.swapaxes(2, 3), scores, -jnp.inf)
  weights = jnp.where(valid.any(axis=2, keepdims=True), jax.nn.softmax(scores, axis=-1), 0.0)
  return jnp.einsum("bkgt,bktd->bkgd", weights, v).astype(q.dtype)
