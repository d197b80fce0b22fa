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


def attend_with(
  rotate: Rotate,
  repeat_heads: bool = False,
  window: int | None = None,
  valid: jax.Array | None = None,
) -> Attend:
  """Causal softmax attention in f32 over everything seen so far.

  `repeat_heads` copies each KV head G times; otherwise the query heads are grouped. `window` is the
  number of tokens that a query sees. `valid` bool[B, T] says which of all tokens so far are not
  padding, which may stand on either side; by default all are.
  """

  def attend(layer, q, k, v, cache, hidden, /):
    del hidden
    past_k, past_v = cache[layer]
    total = past_k.shape[1] + q.shape[1]
    real = jnp.ones((len(q), total), bool) if valid is None else valid
    positions = positions_of(real)[:, past_k.shape[1] :]
    keys = jnp.concatenate([past_k, rotate(k, positions)], axis=1)
    values = jnp.concatenate([past_v, v], axis=1)
    # Between two tokens that are not padding, slots are as far apart as positions.
    distance = jnp.arange(total)[past_k.shape[1] :, None] - jnp.arange(total)[None]  # [S, T]
    seen = (distance >= 0) & (distance < (total if window is None else window))
    attention = _repeated if repeat_heads else _grouped
    f32 = [x.astype(jnp.float32) for x in (rotate(q, positions), keys, values)]
    out = attention(*f32, seen[None] & real[:, None])
    return out.astype(q.dtype), (*cache[:layer], (keys, values), *cache[layer + 1 :])

  return attend


def positions_of(valid: jax.Array) -> jax.Array:
  """i32[B, T]: how many tokens that are not padding stand before each; valid is bool[B, T]."""
  return (jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1).clip(0)


@partial(jax.jit, static_argnums=0)
def hidden(
  model: Model, params: Params, tokens: jax.Array, valid: jax.Array | None = None
) -> jax.Array:
  """f[B, S, E] of one whole pass over tokens i32[B, S]; valid bool[B, S] is False for padding."""
  config = model.config
  positions = positions_of(jnp.ones(tokens.shape, bool) if valid is None else valid)
  cache = empty_cache(config, tokens.shape[0], params["embed"].dtype.name)
  attend = attend_with(model.rotate, window=config.window_tokens, valid=valid)
  return model.forward(params, tokens, positions, cache, attend)[0]


def logits(
  model: Model, params: Params, tokens: jax.Array, valid: jax.Array | None = None
) -> jax.Array:
  """f32[B, S, V] of one whole pass; see `hidden`."""
  x = hidden(model, params, tokens, valid)
  return jax.vmap(model.unembed, in_axes=(None, 1), out_axes=1)(params, x)


def _grouped(q, k, v, seen):
  batch, length, heads, head_dim = q.shape
  q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
  weights = _softmax(jnp.einsum("bskgd,btkd->bkgst", q, k), seen[:, None, None], head_dim)
  return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(batch, length, heads, head_dim)


def _repeated(q, k, v, seen):
  group = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
  weights = _softmax(jnp.einsum("bshd,bthd->bhst", q, k), seen[:, None], q.shape[-1])
  return jnp.einsum("bhst,bthd->bshd", weights, v)


def _softmax(scores, seen, head_dim):
  # Not -inf: padding on the left sees nothing, and its NaN would reach what sees it with weight 0.
  return jax.nn.softmax(jnp.where(seen, scores / math.sqrt(head_dim), -1e30), axis=-1)
