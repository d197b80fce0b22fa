"""OmniKV (Hao et al., ICLR 2025): a few filter layers choose tokens for the lazy layers above them.

What matters to one layer mostly matters to the next ones. Filter layers attend to everything and
score the tokens of the prompt with their own queries; the lazy layers up to the next filter layer
attend to the best of them, the same ones in all heads, and to what has been generated. The layers
below the first filter layer are dense, and so are the `wait_layers` after each: in them the
original hides the load of the chosen tokens.

Departures. The original has one row and no limit on what is generated: here generated tokens take
their room out of the budget, and where they fill more than half of it the older ones compete with
the prompt. A query of the window is scored at its own position; the original turns them all to the
newest one. (The authors' serving path reads an index table of zeros, and is no reference.)
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _attention, _pages, _profile, _tokens
from kvjax.policies._stores import recalling
from kvjax.types import DENSE, SELECT, Inputs, LayerPlan, Policy, Selection, State

SELECTORS = ("last", "softmax_before_last", "uniform", "exp")


class _State(flax.struct.PyTreeNode):
  """Tokens of the prompt i32[B]; newest queries of each filter layer, f[B, K, W, G, D]; and within
  a step what lazy layers attend to, tokens bool[B, K, T]."""

  prompt: jax.Array
  rings: dict[int, jax.Array]
  shared: tuple[int, ...] = flax.struct.field(pytree_node=False)
  ring_of: int | None = flax.struct.field(pytree_node=False)  # positions of a filter layer's ring
  chosen: jax.Array | None = None


def omnikv(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  filter_layers: tuple[int, ...] | None = None,
  profile: _profile.Source = None,
  wait_layers: int = 1,
  selector: str = "softmax_before_last",
  window: int = 16,
) -> Policy:
  """OmniKV's filter and lazy layers.

  Args:
    budget_tokens: most tokens that a lazy layer attends to, generated ones included.
    page_size: C.
    filter_layers: in ascending order; None for layer 2 and those at 1/4 and 9/16 of the depth, the
      authors' 2, 8 and 18 for Llama-3-8B. Below 8 layers the one at 1/4 alone: of 4 layers the
      second filters, the third waits and the last is lazy.
    profile: `kvjax.profiling.filter_layers` of this very model, or its path; instead of the above.
    wait_layers: dense layers behind each filter layer; 1 in the authors' example.
    selector: what scores a token, always the maximum over all H heads: the logits of the newest
      query ("last") or their softmax ("softmax_before_last"), or the softmax of the newest `window`
      queries, as a sum ("uniform") or with half the weight for each step back ("exp").
    window: W of the last two selectors, which also keep the last W tokens of the prompt.

  Raises:
    ValueError: an argument outside these ranges; in `register`, layers or profile of another model.
  """
  _pages.check_option("selector", selector, SELECTORS)
  kept = window if selector in ("uniform", "exp") else 0
  if wait_layers < 0 or window < 1 or budget_tokens < max(1, 2 * kept):
    raise ValueError(
      f"budget_tokens {budget_tokens} must be at least {max(1, 2 * kept)}, window {window} at "
      f"least 1, wait_layers {wait_layers} at least 0"
    )
  measured = _profile.read("omnikv", profile, "filter_layers", filter_layers=filter_layers)
  filters = filter_layers if measured is None else tuple(measured.arrays["filters"].tolist())

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    _profile.check("omnikv", measured, model)
    plan = _plan(model, filters, wait_layers)
    b, k = cache.batch_size, model.num_kv_heads
    shape = (b, k, max(kept, 1), model.group_size, model.head_dim)
    ring_of = None if cache.ring_tokens is None else cache.capacity_tokens
    rings = {layer: _attention.empty_ring(*shape, cache.dtype) for layer in plan.watched}
    return plan, _State(jnp.zeros(b, jnp.int32), rings, plan.shared, ring_of)

  def preprocess(state: _State, inputs: Inputs) -> _State:
    if inputs.row >= 0:  # a lazy layer
      return state
    queries = _attention.grouped(inputs.q, inputs)
    ring = _attention.remember(state.rings[inputs.layer], queries, inputs)
    state = state.replace(rings=state.rings | {inputs.layer: ring})
    if inputs.q.shape[1] > 1:
      return state.replace(prompt=inputs.lengths)
    return choose(state, ring, inputs)

  def choose(state: _State, queries: jax.Array, inputs: Inputs) -> _State:
    positions, prompt = inputs.slot_positions[:, :1], state.prompt[:, None, None]
    seen = _tokens.tokens_seen(positions, inputs)
    forced = _tokens.newest_generated(positions, state.prompt, inputs, budget_tokens)
    forced |= (positions >= prompt - kept) & (positions < prompt)
    scores = _attention.token_scores(queries, inputs, seen & ~forced, selector)
    best = _tokens.best_tokens(scores, forced, seen, budget_tokens)
    best = best if state.ring_of is None else _tokens.by_position(best, positions, state.ring_of)
    lists = (*inputs.slot_positions.shape[:2], best.shape[-1])
    return state.replace(chosen=jnp.broadcast_to(best, lists))

  def select(state: _State, inputs: Inputs) -> tuple[Selection, _State]:
    assert state.chosen is not None
    selection = _tokens.select_tokens(state.chosen, budget_tokens, page_size)
    later = state.shared[inputs.row + 1 : inputs.row + 2]
    is_last = later != state.shared[inputs.row : inputs.row + 1]  # before the next filter layer
    return selection, state.replace(chosen=None) if is_last else state

  def ahead(state: _State, row: int) -> Selection | None:
    del row
    chosen = state.chosen
    return None if chosen is None else _tokens.select_tokens(chosen, budget_tokens, page_size)

  return Policy(
    name="omnikv",
    budget_tokens=budget_tokens,
    stores=recalling(),
    register=register,
    preprocess=preprocess,
    select=select,
    ahead=ahead,
    page_size=page_size,
    joins_heads=True,
  )


def _plan(model: ModelConfig, filters: tuple[int, ...] | None, wait_layers: int) -> LayerPlan:
  layers = range(depth := model.num_layers)
  if filters is None:
    filters = tuple(sorted({2, depth // 4, 9 * depth // 16})) if depth >= 8 else (depth // 4,)
  if not filters or sorted({*filters} & {*layers}) != list(filters):
    raise ValueError(
      f"policy 'omnikv': filter_layers {filters} must ascend within the {depth} of the model"
    )
  since = [layer - max((f for f in filters if f <= layer), default=layer) for layer in layers]
  roles = tuple(SELECT if distance > wait_layers else DENSE for distance in since)
  ends = (*filters[1:], depth)
  watched = tuple(f for f, end in zip(filters, ends, strict=True) if SELECT in roles[f:end])
  choosers = [max(f for f in filters if f <= layer) for layer in layers if roles[layer] == SELECT]
  return LayerPlan(roles, watched, shared=tuple(map(choosers.index, choosers)))
