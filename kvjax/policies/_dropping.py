"""What policies share that drop tokens for good: which ones stay, and which one goes next.

Heads of one layer hold different tokens, so everything here goes by slot, and what a policy
remembers of a token by its position, which stays its own when slots change.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvjax.types import Inputs, Selection, State

NO_POSITION = -2  # the least that a store which drops says of a slot


def everything_held(inputs: Inputs, page_size: int, known: jax.Array | bool = True) -> Selection:
  """All pages that the row has, and in them the slots that hold a token.

  A policy whose statistics read the keys gives something that follows from them as known,
  bool[B, K, T or 1], true wherever there is a token. It puts them before the attention, and so
  before the next layer's writing. Without that order XLA copies the whole pool to read the copy.
  """
  held = (inputs.slot_positions >= 0) & known
  held = held.reshape(*held.shape[:2], -1, page_size)
  pages = jnp.arange(held.shape[2], dtype=jnp.int32)
  return Selection(jnp.broadcast_to(pages, held.shape[:3]), held)


def tokens_in_sight(inputs: Inputs) -> jax.Array:
  """bool[B, K, T]: slots whose token the newest one sees, and so may later ones."""
  return inputs.slot_positions >= _by_row(jnp.maximum(inputs.first, 0))


def best_and_newest(
  scores: jax.Array, inputs: Inputs, count: jax.Array | int, newest: int
) -> jax.Array:
  """What a row keeps after its prompt.

  Args:
    scores: f32[B, K, T]; of equal ones the later is kept. Anything where no token is in sight.
    inputs: of the prompt.
    count: tokens that are kept for their scores, i32[B] or the same for all rows.
    newest: tokens at the end that are kept besides.

  Returns:
    bool[B, K, T]
  """
  there = tokens_in_sight(inputs)
  recent = there & (inputs.slot_positions >= _by_row(inputs.lengths - newest))
  ranked = jnp.where(there & ~recent, scores, -jnp.inf)
  rank = jnp.argsort(jnp.argsort(ranked, axis=-1, stable=True), axis=-1)
  count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), inputs.lengths.shape)
  return recent | ((rank >= scores.shape[-1] - _by_row(count)) & (ranked > -jnp.inf))


def least(scores: jax.Array, inputs: Inputs, before: jax.Array) -> jax.Array:
  """The slot that a row gives up.

  A token that has left the model's window goes before all others; else, of those before a position,
  the one with the lowest score, and of equal ones the oldest.

  Args:
    scores: f32[B, K, T], not negative; anything where there is no token.
    inputs: of a decode step.
    before: i32[B], the first position that stays whatever its score.

  Returns:
    i32[B, K]; anything where a row holds no token before that position.
  """
  positions, first = inputs.slot_positions, _by_row(inputs.first)
  may_go = (positions >= 0) & (positions < jnp.maximum(_by_row(before), first))
  ranked = jnp.where(may_go, jnp.where(positions < first, -1.0, scores), jnp.inf)
  lowest = ranked == ranked.min(axis=-1, keepdims=True)
  return jnp.argmin(jnp.where(lowest, positions, jnp.iinfo(jnp.int32).max), axis=-1)


def position_in(slots: jax.Array, inputs: Inputs) -> jax.Array:
  """i32[B, K], positions of the tokens in slots i32[B, K]."""
  return jnp.take_along_axis(inputs.slot_positions, slots[..., None], axis=-1)[..., 0]


def slot_of(positions: jax.Array, inputs: Inputs) -> jax.Array:
  """i32[B, K], slots of the tokens at positions i32[B, K], or of any that has left the window."""
  others = (inputs.slot_positions != positions[..., None]).astype(jnp.float32)
  return least(others, inputs, inputs.lengths)


def with_layer(state: State, inputs: Inputs, layer: State) -> State:
  """The state of all selecting layers with this one's, arrays [B, ...], replaced; rows that sit a
  decode step out keep theirs."""
  if inputs.q is not None and inputs.q.shape[1] == 1:
    takes_part = inputs.valid[:, 0]
    layer = jax.tree.map(partial(_where_row, takes_part), layer, state[inputs.row])
  return (*state[: inputs.row], layer, *state[inputs.row + 1 :])


def _where_row(chosen: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
  return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _by_row(x: jax.Array) -> jax.Array:
  return x[:, None, None]
