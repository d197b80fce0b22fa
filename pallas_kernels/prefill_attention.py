"""Causal attention of one prefill chunk: over the chunk itself and over blocks of earlier keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.softmax import NEG, merge_parts, parts_of


class PastBlocks(NamedTuple):
  """Earlier keys and values, block by block.

  Attributes:
    first: i32[], block to begin with.
    end: i32[], block to end before; dynamic, so that only what is there is read.
    read: `read(i) -> keys f[B, K, D, T], values f[B, K, T, D]`. Every slot of every block read must
      be visible to every valid query; with a window, block i holds positions from i * T on, and the
      window says what is visible.
  """

  first: jax.Array | int
  end: jax.Array
  read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def first_block(start: jax.Array, block: int, window: int) -> jax.Array:
  """Index i32[] of the first block of which a token from start on sees anything."""
  return jnp.maximum(start - window + 1, 0) // block


def prefill_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  past: Sequence[PastBlocks],
  *,
  start: jax.Array | int = 0,
  window: int | None = None,
) -> jax.Array:
  """Flash-style attention of S tokens a row over everything before them and themselves.

  The G query heads of a KV head are folded with the tokens into one matrix, so that each block is
  one large product. Tokens beyond the end of a row come last and are seen by no valid query; their
  own results mean nothing.

  Args:
    q: f[B, S, H, D]; 1/sqrt(D) is applied here.
    k: f[B, S, K, D].
    v: f[B, S, K, D].
    past: where earlier keys are; may be empty.
    start: i32[], position of the chunk's first token; only needed with a window.
    window: tokens that a query sees, itself included; None for all.

  Returns:
    f[B, S, H, D] in the dtype of q.
  """
  if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[2] % k.shape[2]:
    raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
  b, s, h, d = q.shape
  rows = _fold((q.astype(jnp.float32) * d**-0.5).astype(k.dtype), k.shape[2])
  scores = jnp.einsum("bkrd,btkd->bkrt", rows, k, preferred_element_type=jnp.float32)
  queries = jnp.tile(jnp.arange(s), h // k.shape[2])[:, None]  # of the rows, which are (g, s)
  seen = _within(queries - jnp.arange(s)[None, :], window)
  parts = parts_of(jnp.where(seen[None, None], scores, NEG), v.swapaxes(1, 2))
  for blocks in past:

    def body(i, parts, blocks=blocks):
      kb, vb = blocks.read(i)
      scores = jnp.einsum("bkrd,bkdt->bkrt", rows, kb, preferred_element_type=jnp.float32)
      if window is not None:
        t = vb.shape[2]
        seen = _within(start + queries - (i * t + jnp.arange(t))[None, :], window)
        scores = jnp.where(seen[None, None], scores, NEG)
      return merge_parts(parts, parts_of(scores, vb))

    parts = jax.lax.fori_loop(blocks.first, blocks.end, body, parts)
  out = parts.o / parts.l[..., None]
  return out.reshape(b, h, s, d).swapaxes(1, 2).astype(q.dtype)


def _within(age: jax.Array, window: int | None) -> jax.Array:
  """Whether a query sees a key that came age tokens before it."""
  return (age >= 0) if window is None else (age >= 0) & (age < window)


def _fold(q: jax.Array, kv_heads: int) -> jax.Array:
  """f[B, S, H, D] -> f[B, K, G*S, D]."""
  b, s, h, d = q.shape
  return q.swapaxes(1, 2).reshape(b, kv_heads, h // kv_heads * s, d)


def prefill_attention_reference(q, k, v, past_k, past_v, window=None):
  """The same over past f[B, T, K, D], all scores at once, in f32."""
  k = jnp.concatenate([past_k, k], axis=1).astype(jnp.float32)
  v = jnp.concatenate([past_v, v], axis=1).astype(jnp.float32)
  groups = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
  scores = jnp.einsum("bshd,bthd->bhst", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
  age = past_k.shape[1] + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
  visible = (age >= 0) & (age < (k.shape[1] if window is None else window))
  weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bhst,bthd->bshd", weights, v).astype(q.dtype)
