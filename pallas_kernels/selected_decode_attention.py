"""Sparse paged decode attention: one query token a row, the pages that were selected for it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.control import unless_finite
from pallas_kernels.mosaic import decode_attention as mosaic
from pallas_kernels.page_copies import copies_of_pages
from pallas_kernels.page_ids import check_ids, is_known
from pallas_kernels.page_pools import Scales, check_pools, product_dtype, slot_scales
from pallas_kernels.softmax import NEG, Parts, empty_parts, none_where_empty, output, parts_of

Turn = Callable[[jax.Array], jax.Array]


def selected_decode_attention(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  pages: jax.Array | None,
  mask: jax.Array,
  *,
  scales: Scales | None = None,
  slots: jax.Array | None = None,
  turn: Turn | None = None,
  implementation: str | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Attention of one token a row and head list over its own pages, or over single slots of them.

  Args:
    q: f[B, K, G, D]; 1/sqrt(D) is applied here. Where every query head has pages of its own, K
      stands for H and G is 1.
    keys: f[N, C, D], the whole pool; or i8 with scales.
    values: f[N, C, D], the whole pool; or i8 with scales.
    pages: i32[B, K, M], rows of the pool; anything outside [0, N) must be masked. None where the
      lists have all pages of the pool, one list after another: then XLA copies nothing.
    mask: bool[B, K, M, C], slots that count. Others may hold anything; none at all gives zeros.
    scales: for i8 pools, f32[N] of the keys and f32[N] of the values: a page holds its numbers
      divided by its scale. The products are then in the dtype of q.
    slots: None for whole pages, or i32[B, K, M], the one slot of each page that counts; the mask is
      then [B, K, M, 1].
    turn: applied to the gathered keys, f[B, K, M, C, D] -> the same shape: the rotation of caches
      that keep keys without it. C is 1 with slots. It must be linear, for scales come after it.
    implementation: "xla", "mosaic" (Hopper: bf16 and f16, whole pages that are not turned), or None
      for the best that can run.
    interpret: run the kernel's own code on a CPU, slowly, for tests.

  Returns:
    f[B, K, G, D] in the dtype of q.

  Raises:
    ValueError: shapes, dtypes or (where they are not traced) page ids that do not fit, or a named
      implementation that cannot run.
  """
  parts = selected_decode_parts(
    *(q, keys, values, pages, mask),
    scales=scales,
    slots=slots,
    turn=turn,
    implementation=implementation,
    interpret=interpret,
  )
  return output(parts).astype(q.dtype)


def selected_decode_parts(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  pages: jax.Array | None,
  mask: jax.Array,
  *,
  scales: Scales | None = None,
  slots: jax.Array | None = None,
  turn: Turn | None = None,
  implementation: str | None = None,
  interpret: bool = False,
) -> Parts:
  """`selected_decode_attention` before normalisation, to merge with attention over other keys.

  Returns:
    `softmax.Parts` of [B, K, G] and D; m is -1e30, l and o are 0 where no slot counts.
  """
  ids = _one_after_another(keys, mask) if pages is None else pages
  _check(q, keys, values, ids, mask, slots, scales)
  refusals = {"xla": None, "mosaic": _why_not_mosaic(q, keys, slots, turn)}
  chosen = dispatch.choose(
    "selected_decode_attention", implementation, refusals, interpret=interpret
  )
  if 0 in (q.size, ids.size, keys.size):
    return empty_parts(q.shape)
  if chosen == "mosaic":
    return mosaic.selected_parts(q, keys, values, ids, mask, scales, interpret=interpret)
  return _parts(q, keys, values, pages, mask, scales, slots, turn)


def _one_after_another(pool, mask):
  """i32[B, K, M]: the pages of each list where they are all pages of the pool, in order."""
  n, lists = pool.shape[0], mask.shape[:2]
  if n != lists[0] * lists[1] * mask.shape[2]:
    raise ValueError(
      f"a pool {pool.shape} is not made of {lists[0]} x {lists[1]} lists of {mask.shape[2]} pages, "
      f"as the mask {mask.shape} says; give pages"
    )
  return jnp.arange(n, dtype=jnp.int32).reshape(mask.shape[:3])


def _why_not_mosaic(q, keys, slots, turn) -> str | None:
  if slots is not None:
    return "it copies whole pages, not single slots"
  if turn is not None:
    return "it has no turn of keys"
  return mosaic.why_not(q, keys)


def _parts(q, keys, values, pages, mask, scales, slots, turn) -> Parts:
  lists = mask.shape[:2]
  scores = _scores(q, keys, pages, slots, turn, lists)
  valid, v_scales = _in_list(mask), None
  if scales is not None:
    ids = _one_after_another(keys, mask) if pages is None else pages
    k_scales, v_scales = (_in_list(slot_scales(x, ids, mask.shape[-1])) for x in scales)
    scores, v_scales = scores * k_scales[:, :, None], jnp.where(valid, v_scales, 0.0)
  scores = jnp.where(valid[:, :, None], scores, NEG)

  def masked(scores, valid, v_scales, values, pages, slots):
    gathered = _in_a_row(_gather(values, pages, slots, lists)).astype(product_dtype(q, values))
    gathered = jnp.where(valid[..., None], gathered, jnp.zeros_like(gathered))
    return _parts_of(scores, gathered, v_scales, valid)

  def direct(*args):
    scores, valid, v_scales, values, pages, slots = args
    gathered = _in_a_row(_gather(values, pages, slots, lists)).astype(product_dtype(q, values))
    parts = _parts_of(scores, gathered, v_scales, valid)
    return unless_finite(parts, lambda: masked(*args))

  args = (scores, valid, v_scales, values, pages, slots)
  return jax.lax.platform_dependent(*args, cpu=direct, default=masked)


def _parts_of(scores, gathered, scales, valid) -> Parts:
  return none_where_empty(parts_of(scores, gathered, scales), valid.any(axis=-1)[..., None])


def _scores(q, keys, pages, slots, turn, lists):
  """f32[B, K, G, M*C], of int8 keys before their scales."""
  dtype = product_dtype(q, keys)
  scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(dtype)
  gathered = _gather(keys, pages, slots, lists).astype(dtype)
  gathered = _in_a_row(gathered if turn is None else turn(gathered))
  # Keys first: a CPU would otherwise transpose them, and they are what is large here.
  scores = jnp.einsum("bktd,bkgd->bktg", gathered, scaled, preferred_element_type=jnp.float32)
  return scores.swapaxes(2, 3)


def _gather(pool, pages, slots, lists):
  """f[B, K, M, C, D] of pages, one copy of C*D numbers each; or f[B, K, M, 1, D] of slots."""
  if pages is None:
    return pool.reshape(*lists, -1, *pool.shape[1:])
  if slots is None:
    return copies_of_pages(pool, pages)
  return pool.at[pages, slots].get(mode="clip")[..., None, :]


def _in_a_row(gathered):
  """f[B, K, M, C, D] -> f[B, K, M*C, D]."""
  b, k, _, _, d = gathered.shape
  return gathered.reshape(b, k, -1, d)


def _in_list(of_slots):
  """[B, K, M, C] -> [B, K, M*C]."""
  return of_slots.reshape(*of_slots.shape[:2], -1)


def _check(q, keys, values, pages, mask, slots, scales):
  check_pools(q, keys, values, scales)
  b, k, _, _ = q.shape
  read = values.shape[1] if slots is None else 1
  if pages.ndim != 3 or pages.shape[:2] != (b, k) or mask.shape != (*pages.shape, read):
    raise ValueError(
      f"pages {pages.shape} and mask {mask.shape} do not fit q {q.shape} and pool {values.shape}: "
      f"expected [B, K, M] and [B, K, M, {'C' if slots is None else 1}]"
    )
  if slots is not None and slots.shape != pages.shape:
    raise ValueError(f"slots {slots.shape} do not fit pages {pages.shape}: expected the same")
  if mask.dtype != np.bool:
    raise ValueError(f"mask is {mask.dtype}: expected bool")
  used = np.asarray(mask).any(axis=-1) if is_known(mask) else mask
  check_ids("selected_decode_attention: pages", pages, keys.shape[0], used=used)
  if slots is not None:
    check_ids("selected_decode_attention: slots", slots, keys.shape[1], used=used)


def selected_decode_attention_reference(
  q, keys, values, pages, mask, *, scales=None, slots=None, turn=None
):
  """The same without tricks, everything in f32, values masked before the product."""
  valid = mask.reshape(*mask.shape[:2], -1)[..., None]
  k, v = (pool.at[pages].get(mode="clip").astype(jnp.float32) for pool in (keys, values))
  if slots is not None:
    k, v = (jnp.take_along_axis(x, slots[..., None, None, None], axis=3) for x in (k, v))
  if scales is not None:
    k, v = (x * slot_scales(s, pages, 1)[..., None] for x, s in zip((k, v), scales, strict=True))
  k = jnp.where(valid, _in_a_row(k if turn is None else turn(k)), 0.0)
  v = jnp.where(valid, _in_a_row(v), 0.0)
  scores = jnp.einsum("bkgd,bktd->bkgt", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
  scores = jnp.where(valid.swapaxes(2, 3), scores, -jnp.inf)
  weights = jnp.where(valid.any(axis=2, keepdims=True), jax.nn.softmax(scores, axis=-1), 0.0)
  return jnp.einsum("bkgt,bktd->bkgd", weights, v).astype(q.dtype)
