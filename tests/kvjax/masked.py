"""Dense attention under a mask, in the plainest terms: what every method must equal."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.types import Model


@partial(jax.jit, static_argnums=0)
def logits(model: Model, params, tokens, visible, query_positions, key_positions) -> jax.Array:
  """f32[B, S, V] of one pass.

  Args:
    model: static.
    params: its weights.
    tokens: i32[B, S].
    visible: for each of the L layers bool[B, H, S, S], which keys (last axis) a query sees.
    query_positions: i32[B, S], by which queries are turned.
    key_positions: i32[B, S, S], by which a query (second axis) sees each key turned.
  """
  b, s = tokens.shape

  def attend(layer, q, k, v, cache, hidden, /):
    del hidden
    group = q.shape[2] // k.shape[2]
    q = model.rotate(q, query_positions)
    keys = jnp.broadcast_to(k[:, None], (b, s, *k.shape[1:])).reshape(b * s, *k.shape[1:])
    keys = model.rotate(keys, key_positions.reshape(b * s, s)).reshape(b, s, *k.shape[1:])
    keys, values = jnp.repeat(keys, group, axis=3), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bshd,bsthd->bhst", q, keys) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(visible[layer], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhst,bthd->bshd", weights, values), cache

  positions = jnp.broadcast_to(jnp.arange(s), (b, s))
  x, _ = model.forward(params, tokens, positions, (), attend)
  return jax.vmap(model.unembed, in_axes=(None, 1), out_axes=1)(params, x)


def visibility(config, lengths, total: int, attended: dict[int, np.ndarray]) -> list[np.ndarray]:
  """Causal masks of all layers, with what decode steps attended to ([n, B, H, T]) laid in."""
  causal = np.tri(total, dtype=bool)
  shape = (len(lengths), config.num_heads, total, total)
  masks = [np.broadcast_to(causal, shape).copy() for _ in range(config.num_layers)]
  for layer, seen in attended.items():
    for step, row in np.ndindex(*seen.shape[:2]):
      masks[layer][row, :, lengths[row] + step] = seen[step, row]
  return masks


def true_positions(b: int, total: int) -> tuple[np.ndarray, np.ndarray]:
  """Queries and keys at their positions in the text."""
  positions = np.arange(total, dtype=np.int32)
  return np.broadcast_to(positions, (b, total)), np.broadcast_to(positions, (b, total, total))


def cache_positions(lengths, total: int, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """In decode, queries and keys at their rank among the attended; seen is bool[n, B, T]."""
  queries, keys = (x.copy() for x in true_positions(len(lengths), total))
  for step, row in np.ndindex(*seen.shape[:2]):
    ranks = np.maximum(np.cumsum(seen[step, row]) - 1, 0)
    queries[row, lengths[row] + step] = ranks[-1]
    keys[row, lengths[row] + step] = ranks
  return queries, keys
