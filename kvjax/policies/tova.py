"""TOVA (Oren et al., EMNLP 2024): the token that the newest query attends to least goes.

A layer holds the same tokens in all heads. After each step the softmax of the newest query is
averaged over all query heads, and the token with the least is dropped, be it the first, the newest
or any other. After the prompt the same rule is applied as often as needed, with the attention of
its last query.

A dropped token makes room for the next one, so the original's cache of n tokens, to which a step
adds its own, is a budget of n + 1 here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies._attention import (
  empty_ring,
  grouped,
  received_from_ring,
  remember,
)
from kvjax.policies._dropping import (
  NO_POSITION,
  best_and_newest,
  everything_held,
  least,
  position_in,
  slot_of,
  with_layer,
)
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State


def tova(budget_tokens: int = 2048, page_size: int = 16) -> Policy:
  """Token omission via attention.

  Args:
    budget_tokens: tokens that a step attends to, the new one included; at least 2.
    page_size: C.

  Raises:
    ValueError: a budget under 2 tokens.
  """
  if budget_tokens < 2:
    raise ValueError(
      f"tova budget_tokens {budget_tokens} has no room for a token beside the new one; give at "
      "least 2"
    )

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    """A layer's newest query; once the prompt has been read, the position that goes next."""
    shape = (cache.batch_size, model.num_kv_heads, 1, model.group_size, model.head_dim)
    rings = tuple(empty_ring(*shape, cache.dtype) for _ in range(model.num_layers))
    return LayerPlan((SELECT,) * model.num_layers), rings

  def preprocess(state: State, inputs: Inputs) -> State:
    if inputs.q.shape[1] == 1:
      return state
    ring = remember(state[inputs.row], grouped(inputs.q, inputs), inputs)
    return with_layer(state, inputs, ring)

  def keep(state: State, inputs: Inputs) -> tuple[jax.Array, State]:
    scores = _mean_over_heads(state[inputs.row], inputs)
    kept = best_and_newest(scores, inputs, budget_tokens - 1, 0)
    nobody = jnp.full(kept.shape[:2], -1, jnp.int32)  # the first new token has a free slot
    return kept, with_layer(state, inputs, nobody)

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    newest = grouped(inputs.q, inputs).swapaxes(1, 2)
    scores = _mean_over_heads(newest, inputs)
    goes_next = position_in(least(scores, inputs, inputs.lengths), inputs)
    known = goes_next[..., None] >= NO_POSITION
    return everything_held(inputs, page_size, known), with_layer(state, inputs, goes_next)

  return Policy(
    name="tova",
    budget_tokens=budget_tokens,
    stores=("compact",),
    register=register,
    preprocess=preprocess,
    select=select,
    keep=keep,
    evict=lambda state, inputs: slot_of(state[inputs.row], inputs),
    page_size=page_size,
    joins_heads=True,
  )


def _mean_over_heads(newest: jax.Array, inputs: Inputs) -> jax.Array:
  """f32[B, K, T], the same for all K, whose slots hold the same tokens."""
  received = received_from_ring(newest, inputs)
  return jnp.broadcast_to(received.mean(axis=(1, 2))[:, None], inputs.slot_positions.shape)
