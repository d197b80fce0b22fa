"""Dense paged decode attention: one query token a row, all of its pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.mosaic import decode_attention as mosaic
from pallas_kernels.page_ids import check_ids, is_known
from pallas_kernels.page_pools import Scales, check_pools, product_dtype, slot_scales
from pallas_kernels.selected_decode_attention import selected_decode_attention_reference
from pallas_kernels.softmax import (
  NEG,
  Parts,
  empty_parts,
  merge_parts,
  none_where_empty,
  output,
  parts_of,
)

_BLOCK = 512  # key slots gathered at a time


def paged_decode_attention(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  table: jax.Array,
  lengths: jax.Array,
  *,
  scales: Scales | None = None,
  implementation: str | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Attention of one token a row over slots [0, length) of its pages, in the order of its table.

  Args:
    q: f[B, K, G, D]; 1/sqrt(D) is applied here.
    keys: f[N, C, D], the whole pool; or i8 with scales.
    values: f[N, C, D], the whole pool; or i8 with scales.
    table: i32[B, K, P], pages of each row and KV head; those beyond the length may be any numbers.
    lengths: i32[B], tokens of each row, at most P*C; 0 gives zeros. Slots without one may hold
      anything.
    scales: for i8 pools, f32[N] of the keys and f32[N] of the values: a page holds its numbers
      divided by its scale. The products are then in the dtype of q.
    implementation: "xla", "mosaic" (Hopper: bf16 and f16), or None for the best that can run.
    interpret: run the kernel's own code on a CPU, slowly, for tests.

  Returns:
    f[B, K, G, D] in the dtype of q.

  Raises:
    ValueError: shapes, dtypes or (where they are not traced) lengths and page ids that do not fit,
      or a named implementation that cannot run.
  """
  parts = paged_decode_parts(
    *(q, keys, values, table, lengths),
    scales=scales,
    implementation=implementation,
    interpret=interpret,
  )
  return output(parts).astype(q.dtype)


def paged_decode_parts(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  table: jax.Array,
  lengths: jax.Array,
  *,
  scales: Scales | None = None,
  implementation: str | None = None,
  interpret: bool = False,
) -> Parts:
  """`paged_decode_attention` before normalisation, to merge with attention over other keys.

  Returns:
    `softmax.Parts` of [B, K, G] and D; m is -1e30, l and o are 0 for rows of length 0.
  """
  _check(q, keys, values, table, lengths, scales)
  refusals = {"xla": None, "mosaic": mosaic.why_not(q, keys)}
  chosen = dispatch.choose("paged_decode_attention", implementation, refusals, interpret=interpret)
  if 0 in (q.size, table.size, keys.size):
    return empty_parts(q.shape)
  if chosen == "mosaic":
    return mosaic.paged_parts(q, keys, values, table, lengths, scales, interpret=interpret)
  return _parts(q, keys, values, table, lengths, scales)


def _parts(q, keys, values, table, lengths, scales) -> Parts:
  """Blocks of pages, with values masked: whole contexts would be copied to be gathered."""
  c, width, dtype = keys.shape[1], table.shape[2], product_dtype(q, keys)
  block = min(max(_BLOCK // c, 1), width)  # pages
  scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(dtype)

  def body(i, parts):
    # The last block begins earlier where it does not fit; what it repeats is masked.
    start = jnp.minimum(i * block, width - block)
    pages = jax.lax.dynamic_slice_in_dim(table, start, block, axis=2)
    slot = (start * c + jnp.arange(block * c))[None]
    valid = ((slot < lengths[:, None]) & (slot >= i * block * c))[:, None]
    k, v = (_rows(pool, pages).astype(dtype) for pool in (keys, values))
    v, v_scales = jnp.where(valid[..., None], v, jnp.zeros_like(v)), None
    scores = jnp.einsum("bkgd,bktd->bkgt", scaled, k, preferred_element_type=jnp.float32)
    if scales is not None:
      k_scales, v_scales = (slot_scales(x, pages, c).reshape(*v.shape[:3]) for x in scales)
      scores, v_scales = scores * k_scales[:, :, None], jnp.where(valid, v_scales, 0.0)
    return merge_parts(parts, parts_of(jnp.where(valid[:, :, None], scores, NEG), v, v_scales))

  # A CPU stops at the longest row; a GPU would have to ask the host after every block.
  trips = jax.lax.platform_dependent(
    lengths,
    cpu=lambda lengths: jnp.minimum(-(-lengths.max() // (block * c)), -(-width // block)),
    default=lambda lengths: jnp.full_like(lengths[0], -(-width // block)),
  )
  parts = jax.lax.fori_loop(0, trips, body, empty_parts(q.shape))
  return none_where_empty(parts, (lengths > 0)[:, None, None])


def _rows(pool, pages):
  """f[B, K, M*C, D]."""
  gathered = pool.at[pages].get(mode="clip")
  return gathered.reshape(*pages.shape[:2], -1, pool.shape[2])


def _check(q, keys, values, table, lengths, scales):
  check_pools(q, keys, values, scales)
  if table.ndim != 3 or table.shape[:2] != q.shape[:2] or lengths.shape != q.shape[:1]:
    raise ValueError(
      f"table {table.shape} and lengths {lengths.shape} do not fit q {q.shape}: "
      "expected [B, K, P] and [B]"
    )
  if lengths.dtype != np.int32:
    raise ValueError(f"lengths are {lengths.dtype}: expected int32")
  (pages, c), used = (table.shape[2], keys.shape[1]), lengths
  if is_known(lengths):
    tokens = np.asarray(lengths)[:, None]
    wrong = tokens[(tokens < 0) | (tokens > pages * c)]
    if wrong.size:
      raise ValueError(
        f"length {wrong[0]} does not fit tables of {pages} pages of {c} tokens: "
        f"expected 0 to {pages * c}"
      )
    used = np.broadcast_to((np.arange(pages) * c < tokens)[:, None], table.shape)
  check_ids("paged_decode_attention: table", table, keys.shape[0], used=used)


def paged_decode_attention_reference(q, keys, values, table, lengths, *, scales=None):
  """The same over all slots at once, everything in f32."""
  slots = jnp.arange(table.shape[2] * keys.shape[1]).reshape(1, 1, -1, keys.shape[1])
  mask = jnp.broadcast_to(slots < lengths[:, None, None, None], (*table.shape, keys.shape[1]))
  return selected_decode_attention_reference(q, keys, values, table, mask, scales=scales)
