"""SnapKV (Li et al., NeurIPS 2024): what the end of a prompt attends to, chosen once.

After prefill each KV head keeps the last tokens of the prompt, the window, and those that the
window's queries attend to most: the softmax of each query over all that it sees, summed over the
window, averaged over neighbours (so that what surrounds a wanted token stays with it) and over the
query heads of the KV head. All that is generated afterwards is kept. What the window did not ask
for is lost, so it matters whether the question stands at the end of the prompt.

Departures: the original gives every query head keys and values of its own, G times the memory; here
a KV head keeps one set of tokens for its query heads. The averages take zeros beyond both ends, as
in the original, which puts the very ends at a small disadvantage. Where a model sees only a window
of its own, tokens that the newest one does not see do not enter the softmax of the earlier ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.policies._snap import snap_policy
from kvjax.types import Policy


def snapkv(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  window: int = 32,
  kernel: int = 5,
  pool: str = "mean",
  group: str = "mean",
  new_tokens: int = 512,
) -> Policy:
  """SnapKV's choice of prompt tokens.

  Args:
    budget_tokens: prompt tokens that are kept, the window included; a shorter prompt is kept whole.
    page_size: C.
    window: tokens at the end of the prompt whose queries choose, and which are kept; under the
      budget.
    kernel: neighbours that share their scores; odd, 1 for none.
    pool: how they share them: "mean", as the original does, or "max".
    group: how the scores of the G query heads of a KV head become one: "mean" or "max".
    new_tokens: room for generated tokens. A row that makes more overflows, as the store says.

  Raises:
    ValueError: an argument outside these ranges.
  """

  def capacity(lengths: jax.Array, row: int, rows: int) -> jax.Array:
    del row, rows
    return jnp.full_like(lengths, budget_tokens)

  return snap_policy(
    "snapkv",
    budget_tokens,
    page_size,
    capacity=capacity,
    most_tokens=budget_tokens,
    window=window,
    kernel=kernel,
    pool=pool,
    group=group,
    new_tokens=new_tokens,
  )
