"""H2O (Zhang et al., NeurIPS 2023): the most recent tokens and the heavy hitters.

Every token's attention is added up: over all queries of the prompt, then at every decode step. A
head holds its most recent tokens and, of the others, those with the largest sums, the heavy
hitters; when a new token comes, the one with the least goes, for good.

Departures: the authors' code handles one row without grouped queries; here the probabilities of the
G query heads of a KV head are added up. Of its three public versions one only masks, so that no
memory is saved, and one lets queries of the future choose; here tokens are dropped, and all sums
are causal. Its budgets are shares of the prompt, ours is a number of tokens. Asking for no recent
tokens keeps none, where the original keeps all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies._attention import attention_received, grouped
from kvjax.policies._dropping import best_and_newest, everything_held, least, with_layer
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State


def h2o(budget_tokens: int = 2048, page_size: int = 16, *, recent: int | None = None) -> Policy:
  """Heavy hitters and a recent window.

  Args:
    budget_tokens: tokens that a step attends to, the new one included; a head never holds more.
    page_size: C.
    recent: tokens before the new one that stay whatever their sums; half of the budget by default,
      as in the paper.

  Raises:
    ValueError: a budget with no room for the new token and the recent ones.
  """
  recent = (budget_tokens - 1) // 2 if recent is None else recent
  if recent < 0 or budget_tokens < recent + 2:
    raise ValueError(
      f"h2o keeps recent {recent} tokens, the new one and a heavy hitter, and budget_tokens is "
      f"{budget_tokens}; give a budget of at least recent + 2"
    )

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    """Sums by position, f32[B, K, T] a layer."""
    tokens = cache.pages_per_row * cache.page_size
    shape = (cache.batch_size, model.num_kv_heads, tokens)
    sums = tuple(jnp.zeros(shape, jnp.float32) for _ in range(model.num_layers))
    return LayerPlan((SELECT,) * model.num_layers), sums

  def preprocess(state: State, inputs: Inputs) -> State:
    sums = _add_up(state[inputs.row], inputs)
    return with_layer(state, inputs, sums)

  def keep(state: State, inputs: Inputs) -> tuple[jax.Array, State]:
    heavy = budget_tokens - 1 - recent
    return best_and_newest(_by_slot(state[inputs.row], inputs), inputs, heavy, recent), state

  def evict(state: State, inputs: Inputs) -> jax.Array:
    before = inputs.lengths - 1 - recent
    return least(_by_slot(state[inputs.row], inputs), inputs, before)

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    known = _by_slot(state[inputs.row], inputs) >= 0
    return everything_held(inputs, page_size, known), state

  return Policy(
    name="h2o",
    budget_tokens=budget_tokens,
    stores=("compact",),
    register=register,
    preprocess=preprocess,
    select=select,
    keep=keep,
    evict=evict,
    page_size=page_size,
  )


def _add_up(sums: jax.Array, inputs: Inputs) -> jax.Array:
  """Sums f32[B, K, N] by position, after the queries of this call; its own tokens begin with 0."""
  b, k, n = sums.shape
  span = (inputs.lengths - inputs.first)[:, None]  # tokens that a query sees
  queries = jnp.where(inputs.valid, inputs.positions, -1)
  oldest = inputs.positions + 1 - span
  q = grouped(inputs.q, inputs).swapaxes(1, 2)
  received = attention_received(q, queries, oldest, inputs).sum(axis=2)
  seen = jnp.arange(n)[None, None] < inputs.positions[:, None, :1]
  at = jnp.where(inputs.slot_positions < 0, n, inputs.slot_positions)
  rows, heads = jnp.arange(b)[:, None, None], jnp.arange(k)[None, :, None]
  return jnp.where(seen, sums, 0.0).at[rows, heads, at].add(received, mode="drop")


def _by_slot(sums: jax.Array, inputs: Inputs) -> jax.Array:
  """f32[B, K, T] of sums f32[B, K, N] by position."""
  return jnp.take_along_axis(sums, inputs.slot_positions, axis=-1, mode="clip")
