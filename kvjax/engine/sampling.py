"""From logits to tokens."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is chosen.

  Attributes:
    temperature: 0 for the most likely token, else the logits are divided by it; at least 0.
    top_p: sample among the most likely tokens that together hold this probability; in (0, 1].
    not_first: ids that an answer does not begin with: its stop tokens, if it may not be empty.
  """

  temperature: float = 0.0
  top_p: float = 1.0
  not_first: tuple[int, ...] = ()

  def __post_init__(self):
    if not 0 <= self.temperature < math.inf:
      raise ValueError(
        f"temperature {self.temperature} must be finite and not negative; 0 is greedy decoding"
      )
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1")


def sample(
  logits: jax.Array, sampling: Sampling, key: jax.Array, positions: jax.Array
) -> jax.Array:
  """The next token of each row.

  The randomness of a row depends on its key and the position of the token alone, so that batch
  mates do not change what it says.

  Args:
    logits: f32[B, V].
    sampling: static.
    key: key[B].
    positions: i32[B], of the token that is chosen.

  Returns:
    i32[B].
  """
  if sampling.temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / sampling.temperature
  if sampling.top_p < 1:
    logits = _within_top_p(logits, sampling.top_p)
  keys = jax.vmap(jax.random.fold_in)(key, positions)
  return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _within_top_p(logits: jax.Array, top_p: float) -> jax.Array:
  """-inf for tokens beyond the smallest set of the most likely ones whose mass reaches top_p."""
  descending = jnp.sort(logits, axis=-1, descending=True)
  probabilities = jax.nn.softmax(descending, axis=-1)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  count = (before < top_p).sum(axis=-1, keepdims=True)
  lowest = jnp.take_along_axis(descending, count - 1, axis=-1)
  return jnp.where(logits < lowest, -jnp.inf, logits)
