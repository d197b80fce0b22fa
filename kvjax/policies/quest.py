"""Quest (Tang et al., ICML 2024): the pages whose keys promise the largest scores.

Per page and channel the minimum and the maximum of the keys are kept. The score of a page is
sum_c max(q_c min_c, q_c max_c), the paper's upper bound of q . k over its keys; the pages with the
largest scores are attended to, anew at every decode step. Prefill is dense.

As the authors' end-to-end path and unlike their accuracy path: the last page is always attended to
and counts within the budget, the others compete for the rest of it.

Departures: the original handles one row and, in its kernels, no grouped queries; here rows are
independent and the G query heads of a KV head are combined by `group`. Bounds belong to the KV
head, so `none` (each query head picks its own pages, as the original) reads up to G times as much.
Other digests of a page than its bounds may be had by `score`.
"""

from __future__ import annotations

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _pages as pages
from kvjax.policies._digests import DIGESTS
from kvjax.policies._kept import check_digest_dtype, no_digests, with_keys
from kvjax.policies._pages import GROUPS
from kvjax.policies._stores import recalling_pages
from kvjax.types import DENSE, SELECT, Inputs, LayerPlan, Policy, Selection, State


def quest(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  dense_layers: int = 2,
  group: str = "max",
  force_last: bool = True,
  score: str = "minmax",
  candidates: int = 1,
  digest_dtype: str | None = None,
) -> Policy:
  """Quest's page selection.

  Args:
    budget_tokens: tokens of the pages that are attended to; at least one page. The knob that
      matters: bytes read and accuracy both grow with it.
    page_size: C.
    dense_layers: layers at the bottom that attend to everything; 2 in the original.
    group: how the scores of the G query heads of a KV head become one: their "max", "mean",
      "sum_probs" (sum of the softmax over pages, with 1/sqrt(D)), or "none".
    force_last: always attend to the page of the newest token; with False it competes like any
      other, as in the original's accuracy path, whose floor of three pages is not here.
    score: what is kept of a page's keys and scored: "minmax", the original's bound; "cuboid",
      ArkVale's smaller box; "mean"; "mean_std", the mean and 1.5 standard deviations of q . k above
      it; "outlier", the larger of the q . k of the key least like the others and of a guess at
      theirs; "exact", the largest q . k itself, which reads all keys and is there for study. All
      but "mean" (half) and "exact" (nothing) take the bytes of two keys a page.
    candidates: with 2 or more, the best pages of so many budgets are looked at again, and the
      largest q . k of their keys decides; not for the group "none".
    digest_dtype: of what is kept of a page, None for the dtype of keys. "int8" keeps it in a
      quarter of the bytes of f32, with one scale a page and the keys of the newest page. Numbers
      are rounded to the nearest, so that "minmax" is no bound any more. Rounded outwards it stays
      one, but scores were several times as far off and found no more of the best pages.

  Raises:
    ValueError: an argument outside these ranges.
  """
  width = pages.pages_of_budget(budget_tokens, page_size)
  pages.check_option("group", group, GROUPS)
  pages.check_option("score", score, DIGESTS)
  if candidates < 1 or (candidates > 1 and group == "none"):
    raise ValueError(
      f"candidates {candidates} with group {group!r}: expected 1, or more and another group"
    )
  pages.check_dense_layers(dense_layers)
  check_digest_dtype(digest_dtype, score)
  digest = DIGESTS[score]

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    roles = (DENSE if layer < dense_layers else SELECT for layer in range(model.num_layers))
    plan = LayerPlan(tuple(roles))
    layers = len(plan.select_layers)
    return plan, no_digests(digest, model, cache, layers, page_size, digest_dtype)

  def preprocess(state: State, inputs: Inputs) -> State:
    kept = with_keys(digest, state[inputs.row], inputs, page_size)
    return pages.replaced(state, inputs.row, kept)

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    scores = pages.scores_of(digest, state[inputs.row], inputs, page_size)
    total = scores.shape[-1]
    there = pages.pages_there(inputs, total, page_size)
    scores = pages.combine(scores, there, group, inputs.q.shape[-1])
    if total <= width:
      return pages.all_pages(there, scores.shape[1]), state
    forced = pages.ends(inputs, total, page_size) if force_last else None
    if candidates > 1:
      looked_at = min(candidates * width, total)
      scores = pages.looked_at_again(scores, forced, inputs, looked_at, group)
    return pages.selection_of(pages.best_pages(scores, forced, width), there), state

  return Policy(
    name="quest",
    budget_tokens=budget_tokens,
    stores=recalling_pages(group) if candidates == 1 else ("resident",),
    register=register,
    preprocess=preprocess,
    select=select,
    page_size=page_size,
  )
