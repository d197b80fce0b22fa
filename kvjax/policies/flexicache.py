"""FlexiCache (MLSys 2026): most KV heads keep their best pages for a while, so rank them rarely.

Quest's bound ranks the pages of a KV head, with the maximum over its query heads, and the last page
first. Unstable heads, which a profile names, are ranked at every step; the others at their row's
first step and then in every `period`th, whose list is used from the next step on. Pages that begin
in between are attended to at once. No layer is dense.

This is the method's ranking. Where pages lie is a store's matter: on `head_tiered` unstable heads
have all of theirs on the device and the others what they attend to, as in the original; on every
other store the tokens are the same.

Departures: the budget is strict. A page that begins after the ranking takes the place of the worst
one of the list, where in the original it comes on top of the list, one page in 16 steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _lists as lists
from kvjax.policies import _pages as pages
from kvjax.policies import _profile
from kvjax.policies._digests import DIGESTS
from kvjax.policies._lists import Listed
from kvjax.policies._stores import recalling_pages
from kvjax.profiling.head_stability import METHOD
from kvjax.profiling.unstable_heads import check_pages, load_heads
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State


def flexicache(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  unstable_heads: Collection[Sequence[int]] = (),
  profile: _profile.Source = None,
  period: int = 16,
  score: str = "minmax",
) -> Policy:
  """FlexiCache's page selection.

  Args:
    budget_tokens: tokens of the pages that are attended to, the last one included.
    page_size: C.
    unstable_heads: pairs of layer and KV head that are ranked at every step; a quarter of all heads
      in the original, by a profile of the model.
    profile: `scripts.profile_heads` of this very model and budget, or its path, or that of a set
      that the authors published (`kvjax.profiling.unstable_heads`); instead of the above.
    period: steps between two rankings of the others.
    score: what is kept of a page's keys and scored, see `quest`.

  Raises:
    ValueError: an argument outside these ranges, a profile of another number of pages; at
      `register`, a head that the model lacks, a profile of another model.
  """
  if period < 1:
    raise ValueError(f"period {period} must be at least 1")
  # The last page, and those that begin until the list is replaced.
  width = pages.pages_of_budget(budget_tokens, page_size, 1 + -(-period // page_size))
  pages.check_option("score", score, DIGESTS)
  load = partial(load_heads, pages=width, page_size=page_size)
  measured = _profile.read("flexicache", profile, METHOD, load, unstable_heads=unstable_heads)
  if measured is not None:
    check_pages(measured, width, page_size)
    unstable_heads = measured.arrays["unstable_heads"].tolist()
  digest, unstable_pairs = DIGESTS[score], lists.heads_of(unstable_heads)

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    _profile.check("flexicache", measured, model)
    lists.check_heads("flexicache", "unstable_heads", unstable_pairs, model)
    plan = LayerPlan(
      (SELECT,) * model.num_layers, on_device=lists.heads_by_layer(unstable_pairs, model.num_layers)
    )
    return plan, lists.no_lists(digest, model, cache, page_size, model.num_kv_heads, width)

  def preprocess(state: Listed, inputs: Inputs) -> Listed:
    return lists.with_keys(digest, state, inputs, page_size)

  def select(state: Listed, inputs: Inputs) -> tuple[Selection, Listed]:
    listed, lengths = state.lists[inputs.row], inputs.lengths
    heads, total = listed.shape[1], inputs.slot_positions.shape[-1] // page_size
    there = pages.pages_there(inputs, total, page_size)
    if total <= width:
      return pages.all_pages(there, heads), state

    def rank() -> jax.Array:
      scores = pages.scores_of(digest, state.digests[inputs.row], inputs, page_size)
      scores = pages.combine(scores, there, "max", inputs.q.shape[-1])
      return pages.best_pages(scores, pages.ends(inputs, total, page_size), width)

    unstable = lists.heads_in_layer(unstable_pairs, inputs.layer, heads)
    step = lengths - state.prompt  # i32[B], from 1
    due = (step == 1) | (step % period == 0)
    ranked = lists.where_due(due | unstable.any(), rank, listed)
    at_once = unstable[None] | ((step == 1) | (period == 1))[:, None]  # bool[B, K]
    known = state.prompt + jnp.maximum((step - 1) // period * period, 1)  # when it was listed
    known, now = -(-known // page_size), -(-lengths // page_size)
    older = lists.with_born(listed, known[:, None], now)
    now = jnp.where(at_once[..., None], ranked, older)
    listed = jnp.where(due[:, None, None], ranked, listed)
    return pages.selection_of(now, there), lists.with_list(state, inputs, listed)

  return Policy(
    name="flexicache",
    budget_tokens=budget_tokens,
    stores=recalling_pages(),
    register=register,
    preprocess=preprocess,
    select=select,
    page_size=page_size,
    joins_heads=bool(unstable_pairs),
  )
