"""ArkVale (Chen et al., NeurIPS 2024): pages scored by a box around the bulk of their keys.

The digest of a page is, per channel, the middle of its minimum and maximum, plus and minus the mean
distance of its keys from there ("cuboid-mean"): smaller than Quest's box and no upper bound, but a
better guess. Scores are averaged over the query heads, and one list of pages serves the whole
layer. The first pages (sinks) and the last ones (a window) are always attended to.

Departures: the original keeps the pages of the budget on the device, attends to all of them, and
replaces at most half of them a step by better ones of the host; which pages lie where is a store's
matter here, and the budget is spent on the best pages. A page that is not full has a digest too,
of the keys that it has.
"""

from __future__ import annotations

import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _pages as pages
from kvjax.policies._digests import DIGESTS
from kvjax.policies._kept import no_digests, with_keys
from kvjax.policies._stores import recalling_pages
from kvjax.types import DENSE, SELECT, Inputs, LayerPlan, Policy, Selection, State


def arkvale(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  dense_layers: int = 2,
  sink_pages: int = 2,
  window_pages: int = 2,
  lists: int = 1,
  score: str = "cuboid",
) -> Policy:
  """ArkVale's page selection.

  Args:
    budget_tokens: tokens of the pages that are attended to, sinks and window included.
    page_size: C; 32 in the original.
    dense_layers: layers at the bottom that attend to everything; 2 in the original's evaluation.
    sink_pages: first pages, always attended to; 2 in the original.
    window_pages: last pages, always attended to, at least 1; 2 in the original.
    lists: lists of pages in a layer, each shared by as many KV heads; 1 in the original. Must
      divide K.
    score: what is kept of a page's keys and scored, see `quest`.

  Raises:
    ValueError: an argument outside these ranges; at `register`, lists that do not divide K.
  """
  if window_pages < 1 or sink_pages < 0 or lists < 1:
    raise ValueError(
      f"sink_pages {sink_pages}, window_pages {window_pages} and lists {lists} must be at least "
      "0, 1 and 1"
    )
  pages.check_dense_layers(dense_layers)
  width = pages.pages_of_budget(budget_tokens, page_size, sink_pages + window_pages)
  pages.check_option("score", score, DIGESTS)
  digest = DIGESTS[score]

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    if model.num_kv_heads % lists:
      raise ValueError(
        f"arkvale's {lists} lists do not divide the {model.num_kv_heads} KV heads of the model; "
        "give a divisor of them"
      )
    roles = (DENSE if layer < dense_layers else SELECT for layer in range(model.num_layers))
    plan = LayerPlan(tuple(roles))
    return plan, no_digests(digest, model, cache, len(plan.select_layers), page_size)

  def preprocess(state: State, inputs: Inputs) -> State:
    kept = with_keys(digest, state[inputs.row], inputs, page_size)
    return pages.replaced(state, inputs.row, kept)

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    scores = pages.scores_of(digest, state[inputs.row], inputs, page_size)
    b, k, _, total = scores.shape
    there = pages.pages_there(inputs, total, page_size)
    if total <= width:
      return pages.all_pages(there, k), state
    shared = scores.reshape(b, lists, -1, total).mean(axis=2)
    shared = jnp.where(there, shared, -jnp.inf)
    forced = pages.ends(inputs, total, page_size, sink_pages, window_pages)
    best = pages.best_pages(shared, forced, width)
    return pages.selection_of(jnp.repeat(best, k // lists, axis=1), there), state

  return Policy(
    name="arkvale",
    budget_tokens=budget_tokens,
    stores=recalling_pages(),
    register=register,
    preprocess=preprocess,
    select=select,
    page_size=page_size,
    joins_heads=True,
  )
