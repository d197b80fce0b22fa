"""PyramidKV (Cai et al., 2024): SnapKV with more tokens in the lower layers and fewer in the upper.

Lower layers spread their attention widely and upper ones gather it on few tokens, so the budget is
no longer the same for all layers: it falls by the same number from each to the next, and the mean
over the layers is the budget. See `snapkv` for which tokens a layer keeps.

How many a layer keeps depends on the prompt: a short one is cut as SnapKV would, a longer one more
steeply. A cache is made before its prompts are known, so each layer has slots for the prompt that
needs the most: its upper half as many as SnapKV's, and in all about a quarter more than long
prompts fill.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.policies._snap import snap_policy
from kvjax.types import Policy


def pyramidkv(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  window: int = 32,
  beta: int = 20,
  kernel: int = 5,
  pool: str = "mean",
  group: str = "mean",
  new_tokens: int = 512,
) -> Policy:
  """PyramidKV's choice of prompt tokens.

  Args:
    budget_tokens: prompt tokens that a layer keeps on average, the window included; a shorter
      prompt is kept whole.
    page_size: C.
    window: tokens at the end of the prompt whose queries choose, and which all layers keep; under
      the budget.
    beta: how steep: the top layer keeps 1/beta of the budget (besides the window).
    kernel: see `snapkv`, as for the options below.
    pool: how neighbours share their scores.
    group: how the scores of query heads become one.
    new_tokens: room for generated tokens.

  Raises:
    ValueError: an argument outside these ranges.
  """
  if beta < 1:
    raise ValueError(f"pyramidkv beta {beta} must be at least 1; 20 is the original's")
  even = budget_tokens - window

  def capacity(lengths: jax.Array, row: int, rows: int) -> jax.Array:
    if rows == 1:
      return jnp.full_like(lengths, budget_tokens)
    bottom = jnp.minimum(2 * even - even // beta, lengths - window)
    top = 2 * even - bottom
    steep = bottom - row * ((bottom - top) // (rows - 1))
    short = lengths < max(2 * even, budget_tokens)
    return jnp.where(short, even, steep) + window

  return snap_policy(
    "pyramidkv",
    budget_tokens,
    page_size,
    capacity=capacity,
    most_tokens=2 * even - even // beta + window,
    window=window,
    kernel=kernel,
    pool=pool,
    group=group,
    new_tokens=new_tokens,
  )
