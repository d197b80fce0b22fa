"""StreamingLLM (Xiao et al., ICLR 2024): the first tokens and the most recent ones.

The sinks and a window of recent tokens are attended to, the same in all layers and heads. Positions
are those inside the cache: keys are kept before the rotary embedding and turned by their place
among the kept tokens, the query by the place of the newest one, so that distances never exceed the
budget however long the text (section 3.2 of the paper).

Prefill is plain causal attention over the whole prompt, as in the authors' code when a prompt is
given in one piece; eviction comes after it and does not depend on how prefill was cut into chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State


def streaming(budget_tokens: int = 2048, page_size: int = 16, *, sinks: int = 4) -> Policy:
  """Sinks and a recent window.

  Args:
    budget_tokens: tokens kept in all, sinks included; rounded down to whole pages, at least one.
    page_size: C.
    sinks: first tokens that are never dropped; 4 in the original.

  Raises:
    ValueError: a budget under one page, or no larger than the sinks.
  """
  if budget_tokens < page_size:
    raise ValueError(
      f"budget_tokens {budget_tokens} is under one page of {page_size} tokens; give at least one"
    )
  budget = budget_tokens // page_size * page_size
  if not 0 <= sinks < budget:
    raise ValueError(f"sinks {sinks} must be at least 0 and under the budget of {budget} tokens")
  window = budget - sinks

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    del cache
    return LayerPlan((SELECT,) * model.num_layers), ()

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    b, heads, slots = inputs.slot_positions.shape
    pages = _pages(inputs.lengths, b, slots // page_size)
    shape = (b, heads, -1, page_size)
    slot_positions = inputs.slot_positions.reshape(shape)
    positions = jnp.take_along_axis(slot_positions, pages[:, None, :, None], axis=2)
    oldest = (inputs.lengths - window)[:, None, None, None]
    kept = (positions >= 0) & ((positions < sinks) | (positions >= oldest))
    return Selection(jnp.broadcast_to(pages[:, None], kept.shape[:3]), kept), state

  def _pages(lengths: jax.Array, b: int, total: int) -> jax.Array:
    """i32[B, M]: pages with sinks, then pages with the window; all of them where those are few."""
    sink_pages = -(-sinks // page_size)
    window_pages = -(-window // page_size) + 1
    if total <= sink_pages + window_pages:
      return jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (b, total))
    first = jnp.maximum((lengths - window) // page_size, sink_pages)
    first = jnp.minimum(first, total - window_pages)[:, None]
    recent = first + jnp.arange(window_pages)[None]
    front = jnp.broadcast_to(jnp.arange(sink_pages, dtype=jnp.int32), (b, sink_pages))
    return jnp.concatenate([front, recent], axis=1)

  def keep(state: State, inputs: Inputs) -> tuple[jax.Array, State]:
    positions = inputs.slot_positions
    oldest = (inputs.lengths - window)[:, None, None]
    return (positions < sinks) | (positions >= oldest), state

  def evict(state: State, inputs: Inputs) -> jax.Array:
    """The oldest token that is not a sink."""
    del state
    positions = inputs.slot_positions
    return jnp.argmin(jnp.where(positions < sinks, jnp.iinfo(jnp.int32).max, positions), axis=-1)

  def cache_positions(positions: jax.Array, lengths: jax.Array) -> jax.Array:
    dropped = jnp.maximum(lengths - budget, 0)
    return jnp.where(positions < sinks, positions, positions - dropped)

  return Policy(
    name="streaming",
    budget_tokens=budget,
    stores=("compact", "resident"),
    register=register,
    preprocess=lambda state, inputs: state,
    select=select,
    keep=keep,
    evict=evict,
    cache_positions=cache_positions,
    page_size=page_size,
  )
