"""Attention as the formula says it, so that models are tested without cache, policy or engine."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from kvjax.config import ModelConfig
from kvjax.types import Attend, Model, Params, Rotate

Cache = tuple[tuple[jax.Array, jax.Array], ...]  # of L layers: rotated k and v, f[B, T, K, D]


def empty_cache(config: ModelConfig, batch_size: int, dtype: str = "float32") -> Cache:
  empty = jnp.zeros((batch_size, 0, config.num_kv_heads, config.head_dim), dtype)
  return ((empty, empty),) * config.num_layers


def attend_with(rotate: Rotate, repeat_heads: bool = False) -> Attend:
  """Full causal softmax attention in f32 over everything seen so far, rows without padding.

  `repeat_heads` copies each KV head G times; otherwise the query heads are grouped.
  """

  def attend(layer, q, k, v, cache, hidden, /):
    del hidden
    past_k, past_v = cache[layer]
    past = past_k.shape[1]
    positions = jnp.broadcast_to(past + jnp.arange(q.shape[1]), q.shape[:2])
    keys = jnp.concatenate([past_k, rotate(k, positions)], axis=1)
    values = jnp.concatenate([past_v, v], axis=1)
    seen = jnp.arange(keys.shape[1])[None, :] <= positions[0][:, None]  # bool[S, T]
    attention = _repeated if repeat_heads else _grouped
    f32 = [x.astype(jnp.float32) for x in (rotate(q, positions), keys, values)]
    out = attention(*f32, seen)
    return out.astype(q.dtype), (*cache[:layer], (keys, values), *cache[layer + 1 :])

  return attend


@partial(jax.jit, static_argnums=0)
def hidden(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
  """f[B, S, E] of one whole pass over tokens i32[B, S]."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  cache = empty_cache(model.config, tokens.shape[0], params["embed"].dtype.name)
  return model.forward(params, tokens, positions, cache, attend_with(model.rotate))[0]


def logits(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
  """f32[B, S, V] of one whole pass over tokens i32[B, S]."""
  x = hidden(model, params, tokens)
  return jax.vmap(model.unembed, in_axes=(None, 1), out_axes=1)(params, x)


def _grouped(q, k, v, seen):
  batch, length, heads, head_dim = q.shape
  q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
  scores = jnp.einsum("bskgd,btkd->bkgst", q, k) / math.sqrt(head_dim)
  weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(batch, length, heads, head_dim)


def _repeated(q, k, v, seen):
  group = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
  scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
  weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bhst,bthd->bshd", weights, v)
