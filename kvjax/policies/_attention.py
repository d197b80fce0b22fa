"""Attention weights that policies look at, and the newest queries, which they keep to make them.

The attention of the engine gives no weights away; here they are made again from queries and keys,
in f32.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kvjax.types import Inputs
from pallas_kernels.softmax import NEG

QUERY_BLOCK = 32  # queries at a time, so that no intermediate has the size of prompt x keys


def empty_ring(batch: int, heads: int, tokens: int, group: int, head_dim: int, dtype) -> jax.Array:
  """f[B, K, W, G, D]: room for the W newest queries of a row, the one at position p in p % W."""
  return jnp.zeros((batch, heads, tokens, group, head_dim), dtype)


def remember(ring: jax.Array, q: jax.Array, inputs: Inputs) -> jax.Array:
  """The ring f[B, K, W, G, D] after this call's queries q f[B, S, K, G, D]; padding does not enter.

  A row's newest queries may have come in several calls.
  """
  at = ring_positions(ring, inputs.lengths) - inputs.positions[:, :1]  # within this call
  places = jnp.clip(at, 0, q.shape[1] - 1)[:, :, None, None, None]
  rows = jnp.take_along_axis(q, places, axis=1).swapaxes(1, 2).astype(ring.dtype)
  return jnp.where((at >= 0)[:, None, :, None, None], rows, ring)


def ring_positions(ring: jax.Array, lengths: jax.Array) -> jax.Array:
  """i32[B, W], positions of the queries in the ring of rows of lengths i32[B]; negative if none."""
  newest, tokens = lengths[:, None] - 1, ring.shape[2]
  return newest - (newest - jnp.arange(tokens)[None]) % tokens


def grouped(q: jax.Array, inputs: Inputs) -> jax.Array:
  """f[B, S, K, G, D] of q f[B, S, H, D]."""
  return q.reshape(*q.shape[:2], inputs.slot_positions.shape[1], -1, q.shape[3])


def held_keys(inputs: Inputs) -> jax.Array:
  """f[B, K, T, D], zeros where there is no token."""
  keys = inputs.keys()
  return jnp.where((inputs.slot_positions >= 0)[..., None], keys, jnp.zeros_like(keys))


def attention_weights(q: jax.Array, keys: jax.Array, visible: jax.Array) -> jax.Array:
  """Softmax of q f[B, K, R, G, D] over keys f[B, K, T, D] where visible bool[B, K, R, T].

  Returns:
    f32[B, K, R, G, T], zeros where nothing is visible
  """
  scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(keys.dtype)
  scores = jnp.einsum("bkrgd,bktd->bkrgt", scaled, keys, preferred_element_type=jnp.float32)
  visible = visible[:, :, :, None]
  weights = jax.nn.softmax(jnp.where(visible, scores, NEG), axis=-1)
  return jnp.where(visible, weights, 0.0)


def attention_received(
  q: jax.Array, positions: jax.Array, oldest: jax.Array, inputs: Inputs
) -> jax.Array:
  """Attention that each slot's token gets from some queries, summed over them.

  Args:
    q: f[B, K, R, G, D], after the position rule.
    positions: i32[B, R], of the queries; a negative one counts for nothing.
    oldest: i32[B, R], first position that each of them sees.
    inputs: for the keys.

  Returns:
    f32[B, K, G, T]
  """
  keys, slots = held_keys(inputs), inputs.slot_positions
  block = math.gcd(q.shape[2], QUERY_BLOCK)

  def body(i, total):
    part = jax.lax.dynamic_slice_in_dim(q, i * block, block, axis=2)
    newest, first = (
      jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=1)[:, None, :, None]
      for x in (positions, jnp.maximum(oldest, 0))
    )
    visible = (slots[:, :, None] >= first) & (slots[:, :, None] <= newest)
    return total + attention_weights(part, keys, visible).sum(axis=2)

  b, k, r, g, _ = q.shape
  empty = jnp.zeros((b, k, g, keys.shape[2]), jnp.float32)
  return jax.lax.fori_loop(0, r // block, body, empty)


def received_from_ring(ring: jax.Array, inputs: Inputs) -> jax.Array:
  """f32[B, K, G, T]: attention from the queries of the ring f[B, K, W, G, D].

  All of them look no further back than the newest one does: what it does not see is gone where a
  model has a window.
  """
  positions = ring_positions(ring, inputs.lengths)
  oldest = jnp.broadcast_to(inputs.first[:, None], positions.shape)
  return attention_received(ring, positions, oldest, inputs)


def token_scores(queries, inputs: Inputs, candidates, selector: str) -> jax.Array:
  """What OmniKV ranks the tokens of a prompt by, the maximum over all heads.

  Args:
    queries: f[B, K, W, G, D], a ring of the newest ones.
    inputs: of the layer that they belong to.
    candidates: bool[B, 1, T].
    selector: the logits of the newest query ("last") or their softmax over the candidates
      ("softmax_before_last", W is 1), or the sum of the W queries' softmax, alike ("uniform") or
      with half the weight for each step back ("exp").

  Returns:
    f32[B, 1, T].
  """
  if selector == "last":
    q, keys = queries[:, :, 0], inputs.keys()
    logits = jnp.einsum("bkgd,bktd->bkgt", q, keys, preferred_element_type=jnp.float32)
    return logits.max(axis=(1, 2))[:, None]
  own = ring_positions(queries, inputs.lengths)[:, None, :, None]
  visible = candidates[:, :, None] & (inputs.slot_positions[:, :1, None] <= own)
  weights = attention_weights(queries, inputs.keys(), visible).max(axis=(1, 3))
  if selector == "exp":
    age = inputs.lengths[:, None, None] - 1 - own[:, 0]
    weights *= jnp.exp2(-age.astype(jnp.float32))
  return weights.sum(axis=1, keepdims=True)
