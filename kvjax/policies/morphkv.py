"""MorphKV (Ghadia et al., ICML 2025): recent tokens, and what their queries attend to now.

A head holds a window of recent tokens and, of the older ones, those that the window's queries
attend to most: per query the softmax over the older tokens alone, of which the sum or the maximum
over the window counts. As the window moves, so does what it wants; what it does not want now is
lost. The query of the new token itself has no say in what is dropped for it.

A dropped token makes room for the next one, so the paper's capacity C, to which a step adds the
current token, is a budget of C + 1 here.

Departures: the original keeps a ring of attention scores; here a ring of queries, from which the
scores are made anew, since it is small and asks nothing of where a token lies. The G query heads of
a KV head enter by the sum of their scores before the softmax, as in the original, which is the
score of the sum of their queries. There, under grouped queries, scores are pruned by another choice
than keys and may come to stand for other tokens; here there is one choice. The original may drop in
bursts (`evict_after`); here one token goes for each that comes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies._attention import (
  attention_weights,
  empty_ring,
  grouped,
  held_keys,
  remember,
  ring_positions,
)
from kvjax.policies._dropping import (
  NO_POSITION,
  best_and_newest,
  everything_held,
  least,
  position_in,
  slot_of,
  tokens_in_sight,
  with_layer,
)
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State

FUSES = ("max", "sum")


class _Layer(NamedTuple):
  """Of a layer.

  Attributes:
    ring: f[B, K, W, 1, D], the newest queries, each the sum over its group.
    goes_next: i32[B, K], position of the token that is dropped for the next one.
  """

  ring: jax.Array
  goes_next: jax.Array


def morphkv(
  budget_tokens: int = 2048, page_size: int = 16, *, window: int = 32, fuse: str = "max"
) -> Policy:
  """MorphKV's constant cache.

  Args:
    budget_tokens: tokens that a step attends to, the new one included; a head never holds more.
    page_size: C.
    window: tokens before the new one that stay, and whose queries choose among the older ones.
    fuse: how the window's queries become one score: "max" or "sum".

  Raises:
    ValueError: an argument outside these ranges.
  """
  if window < 1 or budget_tokens < window + 2:
    raise ValueError(
      f"morphkv keeps a window of {window} tokens, at least 1, the new one and an older one, and "
      f"budget_tokens is {budget_tokens}; give a budget of at least window + 2"
    )
  if fuse not in FUSES:
    raise ValueError(f"morphkv fuse {fuse!r} is not one of {', '.join(FUSES)}")

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    b, heads = cache.batch_size, model.num_kv_heads
    ring = empty_ring(b, heads, window, 1, model.head_dim, cache.dtype)
    nobody = jnp.full((b, heads), -1, jnp.int32)
    state = tuple(_Layer(ring, nobody) for _ in range(model.num_layers))
    return LayerPlan((SELECT,) * model.num_layers), state

  def preprocess(state: State, inputs: Inputs) -> State:
    layer = state[inputs.row]
    q = grouped(inputs.q, inputs).astype(jnp.float32).sum(axis=3, keepdims=True)
    return with_layer(state, inputs, layer._replace(ring=remember(layer.ring, q, inputs)))

  def keep(state: State, inputs: Inputs) -> tuple[jax.Array, State]:
    scores = _fused(state[inputs.row].ring, inputs, fuse)
    return best_and_newest(scores, inputs, budget_tokens - 1 - window, window), state

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    layer = state[inputs.row]
    slots = least(_fused(layer.ring, inputs, fuse), inputs, inputs.lengths - window)
    layer = layer._replace(goes_next=position_in(slots, inputs))
    known = layer.goes_next[..., None] >= NO_POSITION
    return everything_held(inputs, page_size, known), with_layer(state, inputs, layer)

  return Policy(
    name="morphkv",
    budget_tokens=budget_tokens,
    stores=("compact",),
    register=register,
    preprocess=preprocess,
    select=select,
    keep=keep,
    evict=lambda state, inputs: slot_of(state[inputs.row].goes_next, inputs),
    page_size=page_size,
  )


def _fused(ring: jax.Array, inputs: Inputs, fuse: str) -> jax.Array:
  """f32[B, K, T]: what the older tokens, those before the window, get from the window's queries."""
  window = ring.shape[2]
  older = inputs.slot_positions < (inputs.lengths - window)[:, None, None]
  older = (older & tokens_in_sight(inputs))[:, :, None]
  queries = (ring_positions(ring, inputs.lengths) >= 0)[:, None, :, None]
  weights = attention_weights(ring, held_keys(inputs), older & queries)[:, :, :, 0]
  return weights.max(axis=2) if fuse == "max" else weights.sum(axis=2)
