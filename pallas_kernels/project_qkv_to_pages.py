"""Projection of activations to queries, and of keys and values straight into pages of the pools."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.mosaic import project_qkv_to_pages as mosaic
from pallas_kernels.page_ids import check_ids


def project_qkv_to_pages(
  x: jax.Array,
  weights: tuple[jax.Array, jax.Array, jax.Array],
  keys: jax.Array,
  values: jax.Array,
  pages: jax.Array,
  slots: jax.Array,
  *,
  biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
  rotation: tuple[jax.Array, jax.Array] | None = None,
  implementation: str | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries of some tokens; their keys and values are written where they belong.

  The idea is that of virtual tensor contexts: what is written to a page anyway needs no tensor
  of its own first. With the Mosaic kernel, one launch takes the place of two products, the rotation
  and two scatters, and keys and values are rounded once, to the dtype of the pools. In decode that
  saves launches, some microseconds of a layer, and hardly any bytes: of Llama-3.1-8B at batch 8 the
  weights are 16.8 MB of a layer and the keys and values 32 kB. It does not pay where launches are
  hidden (a CUDA graph of the whole step), nor in prefill, where a plain product's better use of the
  tensor cores is worth more than the traffic: more than 64 tokens go the XLA way. Nobody has timed
  it yet.

  Args:
    x: f[B, S, E], or f[B, E] in decode; then the axis S is missing below too.
    weights: f[E, H*D], f[E, K*D] and f[E, K*D], of queries, keys and values.
    keys: f[N, C, D], the whole pool; written in place where the caller gives it up.
    values: f[N, C, D].
    pages: i32[B, S, K], the page of each token; one outside [0, N) is not written, as of padding.
    slots: i32[B, S, K], the slot within the page, in [0, C). No two tokens share one.
    biases: f[H*D], f[K*D] and f[K*D]; None for none.
    rotation: cosines and sines f32[B, S, D/2] by which queries and keys are turned (coordinate i
      with i + D/2); None where positions are not in the attention, or keys are kept unturned.
    implementation: "xla" or "mosaic"; None for the best that works.
    interpret: run the Mosaic kernel's code on a CPU.

  Returns:
    f[B, S, H, D] in the dtype of x, and the two pools.

  Raises:
    ValueError: shapes that do not fit, or an implementation that cannot run.
  """
  _check(x, weights, keys, values, pages, slots, biases, rotation)
  refusals = {"xla": None, "mosaic": mosaic.why_not(x, weights, keys, values)}
  chosen = dispatch.choose("project_qkv_to_pages", implementation, refusals, interpret=interpret)
  bq, bk, bv = biases or (None, None, None)
  q = _project(x, weights[0], bq, rotation, keys.shape[-1]).astype(x.dtype)
  if chosen == "mosaic":
    keys, values = mosaic.project_to_pages(
      x, weights[1:], (bk, bv), rotation, keys, values, pages, slots, interpret=interpret
    )
    return q, keys, values
  k = _project(x, weights[1], bk, rotation, keys.shape[-1])
  v = _project(x, weights[2], bv, None, keys.shape[-1])
  return q, _write(keys, pages, slots, k), _write(values, pages, slots, v)


def _project(x, weight, bias, rotation, head_dim):
  """f32[B, S, heads, D]."""
  out = jnp.einsum("...e,ef->...f", x, weight, preferred_element_type=jnp.float32)
  if bias is not None:
    out = _add(out, bias)
  out = out.reshape(*x.shape[:-1], weight.shape[1] // head_dim, head_dim)
  return out if rotation is None else _turn(out, *rotation)


def _add(x, bias):
  return x + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(x.ndim - 1)))


def _turn(x, cos, sin):
  cos, sin = cos[..., None, :].astype(jnp.float32), sin[..., None, :].astype(jnp.float32)
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _write(pool, pages, slots, x):
  return pool.at[pages, slots].set(
    x.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
  )


def _check(x, weights, keys, values, pages, slots, biases, rotation):
  if x.ndim not in (2, 3) or keys.ndim != 3 or keys.shape != values.shape:
    raise ValueError(
      f"x {x.shape}, keys {keys.shape} and values {values.shape}: expected [B, S, E] or [B, E], "
      "and the same [N, C, D] twice"
    )
  *tokens, e = x.shape
  d = keys.shape[-1]
  if pages.shape[:-1] != tuple(tokens) or slots.shape != pages.shape or 0 in pages.shape[-1:]:
    raise ValueError(
      f"pages {pages.shape} and slots {slots.shape} do not fit x {x.shape}: expected the axes of x "
      "with K in place of E, of both"
    )
  if pages.dtype != np.int32:
    raise ValueError(f"pages are {pages.dtype}, expected int32")
  check_ids("project_qkv_to_pages: slots", slots, keys.shape[1])
  k = pages.shape[-1]
  heads = weights[0].shape[-1] // d
  if [w.shape for w in weights] != [(e, heads * d), (e, k * d), (e, k * d)] or heads % k:
    raise ValueError(
      f"weights {[w.shape for w in weights]} do not fit x {x.shape}, pools {keys.shape} and pages "
      f"{pages.shape}: expected [E, H*D] and twice [E, K*D] with E={e}, K={k}, D={d}, H a multiple "
      "of K"
    )
  if biases is not None and [b.shape for b in biases] != [w.shape[1:] for w in weights]:
    raise ValueError(
      f"biases {[b.shape for b in biases]} do not fit weights {[w.shape for w in weights]}: "
      "expected [H*D], [K*D], [K*D]"
    )
  if rotation is not None and any(t.shape != (*tokens, d // 2) for t in rotation):
    raise ValueError(
      f"rotation {[t.shape for t in rotation]} does not fit x {x.shape} and pools {keys.shape}: "
      f"expected {(*tokens, d // 2)} twice"
    )


def project_qkv_to_pages_reference(
  x, weights, keys, values, pages, slots, biases=None, rotation=None
):
  """One token and head at a time, in f32: slow, and not for jit."""
  d = keys.shape[-1]
  out = [x.astype(jnp.float32) @ w.astype(jnp.float32) for w in weights]
  if biases is not None:
    out = [_add(y, b) for y, b in zip(out, biases, strict=True)]
  q, k, v = (y.reshape(*x.shape[:-1], -1, d) for y in out)
  if rotation is not None:
    q, k = (_turn(y, *rotation) for y in (q, k))
  for token in np.ndindex(pages.shape):
    page, slot = int(pages[token]), int(slots[token])
    if 0 <= page < keys.shape[0]:
      keys = keys.at[page, slot].set(k[token].astype(keys.dtype))
      values = values.at[page, slot].set(v[token].astype(values.dtype))
  return q.astype(x.dtype), keys, values
