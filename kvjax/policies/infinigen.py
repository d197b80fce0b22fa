"""InfiniGen (Lee et al., OSDI 2024): tokens speculated one layer ahead, from a few channels of q.

While layer i runs, the queries of layer i + 1 are made of layer i's input, and the tokens that they
will want are chosen: the inputs of neighbouring layers are alike. Scores are made of partial keys,
the few channels in which a skew A has gathered the energy of the queries; attention itself is
exact, over the chosen tokens. How many they are is decided at each step: per head those within
alpha of the best score, the same number for all heads of a row, their mean, within the budget.

`kvjax.profiling.skewing` makes A, which is applied to q and k after the position rule; where a
model has none (OPT) it may be folded into the weights instead. Without a profile A is the identity.

Departures. The original takes one mean over heads and batch rows; here over the heads of a row, so
that batch mates do not matter. Its channels come from the first row's whole prompt; here each row
has its own, from its first 64 tokens, so that partial keys are written as the keys come. It has no
grouped queries: here A and the channels belong to the KV head, and the scores of its G query heads
become one by their maximum. The channels are those with the largest |q| + |k|, as in the paper, |q|
the mean of the group; the speed code ranks by |q| alone, the accuracy code by each and takes both.
A token counts with a score above best - alpha (`>`), as in the speed code. A row within the budget
attends to everything. The authors' accuracy code for Llama takes the threshold of head 0 for all
heads; here, as in its code for OPT, each head has its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _partial_keys, _profile, _tokens
from kvjax.policies._partial_keys import PartialKeys, skew_of
from kvjax.policies._stores import recalling
from kvjax.types import DENSE, SELECT, Inputs, LayerPlan, Policy, Selection, State


class _State(NamedTuple):
  """Partial keys of each selecting layer; and within a step what the next one attends to, tokens
  bool[B, K or H, T]."""

  partial: tuple[PartialKeys, ...]
  ahead: jax.Array | None


def infinigen(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  dense_layers: int = 2,
  alpha: float = 5.0,
  partial_ratio: float = 0.2,
  profile: _profile.Source = None,
  group: str = "max",
) -> Policy:
  """InfiniGen's speculation.

  Args:
    budget_tokens: most tokens attended to, the new one included; at least 2.
    page_size: C.
    dense_layers: layers at the bottom that attend to everything, of which the last looks ahead; at
      least 1, and 2 in the original.
    alpha: how far below the best score (with 1/sqrt(D)) a token still counts; 4 for OPT and 5 for
      Llama in the original.
    partial_ratio: share of the D channels that scores are made of.
    profile: of this very model by `kvjax.profiling.skewing`, which has the skew, or the path of
      one; None for the identity.
    group: the G query heads of a KV head share the list of their largest scores ("max"), or have
      one each ("none"), which reads up to G times as much.

  Raises:
    ValueError: an argument outside these ranges; in `register`, a profile of another model, or a
      model with no layer to look ahead from.
  """
  if budget_tokens < 2:
    raise ValueError(f"budget_tokens {budget_tokens} must be at least 2: the new token and another")
  if dense_layers < 1 or not alpha >= 0 or not 0 < partial_ratio <= 1:
    raise ValueError(
      f"dense_layers {dense_layers} must be at least 1, alpha {alpha} at least 0, and "
      f"partial_ratio {partial_ratio} within (0, 1]"
    )
  _tokens.check_group(group)
  measured = _profile.read("infinigen", profile, "skewing")
  skew = None if measured is None else measured.arrays["skew"]  # f32[L, K, D, D]

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    if model.num_layers < 2:
      raise ValueError("policy 'infinigen' looks one layer ahead and the model has only one")
    _profile.check("infinigen", measured, model)
    dense = min(dense_layers, model.num_layers)
    rows = model.num_layers - dense
    partial = tuple(_partial_keys.empty(model, cache, partial_ratio) for _ in range(rows))
    plan = LayerPlan((DENSE,) * dense + (SELECT,) * rows, watched=(dense - 1,) if rows else ())
    return plan, _State(partial, None)

  def preprocess(state: _State, inputs: Inputs) -> _State:
    row = inputs.row
    if row < 0:  # the last dense layer
      return look_ahead(state, inputs) if inputs.q.shape[1] == 1 else state
    own_skew = skew_of(skew, inputs.layer, inputs)
    return _with_layer(state, row, _partial_keys.extend(state.partial[row], inputs, own_skew))

  def look_ahead(state: _State, inputs: Inputs) -> _State:
    """What the next layer will attend to."""
    layer, row, longest = inputs.layer + 1, inputs.row + 1, inputs.lengths.max()
    q, its_skew = inputs.project(layer), skew_of(skew, layer, inputs)
    scores = _partial_keys.scores(state.partial[row], q, its_skew, longest)
    # That layer will write to its partial keys: not before they have been read, or XLA copies them.
    scores, partial = jax.lax.optimization_barrier((scores, state.partial[row]))
    state, scores = _with_layer(state, row, partial), _tokens.combine(scores, group)
    width = min(budget_tokens, scores.shape[-1])
    places = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
    seen = _tokens.tokens_seen(places, inputs)
    newest = places == inputs.lengths[:, None, None] - 1  # has no partial key yet
    fits = seen.sum(axis=-1, keepdims=True) <= width
    others = _mean_count(scores, seen & ~newest, alpha)
    count = jnp.where(fits, width, jnp.minimum(others + 1, width))
    return state._replace(ahead=_tokens.best_tokens(scores, newest, seen, width, count))

  def select(state: _State, inputs: Inputs) -> tuple[Selection, _State]:
    assert state.ahead is not None
    selection = _tokens.select_tokens(state.ahead, budget_tokens, page_size)
    is_last = inputs.row + 1 == len(state.partial)
    return selection, state._replace(ahead=None) if is_last else look_ahead(state, inputs)

  def ahead(state: _State, _row: int) -> Selection | None:
    chosen = state.ahead
    return None if chosen is None else _tokens.select_tokens(chosen, budget_tokens, page_size)

  return Policy(
    name="infinigen",
    budget_tokens=budget_tokens,
    stores=recalling(group),
    register=register,
    preprocess=preprocess,
    select=select,
    ahead=ahead,
    page_size=page_size,
    joins_heads=True,
  )


def _with_layer(state: _State, row: int, partial: PartialKeys) -> _State:
  return state._replace(partial=(*state.partial[:row], partial, *state.partial[row + 1 :]))


def _mean_count(scores: jax.Array, past: jax.Array, alpha: float) -> jax.Array:
  """i32[B, 1, 1]: the tokens of a head within alpha of its best one, on average over heads."""
  best = jnp.where(past, scores, -jnp.inf).max(axis=-1, keepdims=True)
  counts = (past & (scores > best - alpha)).sum(axis=(1, 2), keepdims=True, dtype=jnp.int32)
  return counts // scores.shape[1]
