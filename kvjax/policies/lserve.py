"""LServe (Yang et al., MLSys 2025): large pages scored by small ones, and lists that are reused.

A page is scored by the largest of Quest's bounds of its parts ("logical pages"): large pages are
fast to read and small ones are sharp. The list is made anew where the length of the row is a
multiple of `period` and reused in between. Heads of a given pattern (DuoAttention's) are streaming:
they see the first tokens and the last ones only. The last page is always attended to.

Departures: a length counts the new token, which the original's step count does not, and a row's
first decode step makes a list whatever its length. The original attends to 3 pages at least, here
the budget is kept. A page that begins between two listings takes the place of the worst one of the
list. Keys and values are not quantised, and prefill is dense for streaming heads too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _lists as lists
from kvjax.policies import _pages as pages
from kvjax.policies._digests import DIGESTS
from kvjax.policies._lists import Listed
from kvjax.policies._stores import recalling_pages
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State


def lserve(
  budget_tokens: int = 4096,
  page_size: int = 64,
  *,
  logical: int = 16,
  period: int = 4,
  group: str = "none",
  streaming_heads: Collection[Sequence[int]] = (),
  sink_tokens: int = 128,
  local_tokens: int = 256,
  score: str = "minmax",
) -> Policy:
  """LServe's hierarchical page selection.

  Args:
    budget_tokens: tokens of the pages that are attended to, the last one included.
    page_size: C; 64 in the original.
    logical: tokens of a part of a page that is scored on its own; divides C.
    period: a list is made where the row's length is a multiple of it; no longer than a page.
    group: how the query heads of a KV head agree, see `quest`; "none", a list for each, in the
      original, which reads up to G times as much.
    streaming_heads: pairs of layer and KV head that see the ends of the text only.
    sink_tokens: first tokens that streaming heads see, in whole pages.
    local_tokens: last tokens that streaming heads see, in whole pages.
    score: what is kept of a logical page's keys and scored, see `quest`.

  Raises:
    ValueError: an argument outside these ranges; at `register`, a head that the model lacks.
  """
  if logical < 1 or page_size % logical:
    raise ValueError(f"logical {logical} does not divide the page_size {page_size}; give a divisor")
  if not 1 <= period <= page_size:
    raise ValueError(f"period {period} must be from 1 to the page_size {page_size}")
  if min(sink_tokens, local_tokens) < 0:
    raise ValueError(
      f"sink_tokens {sink_tokens} and local_tokens {local_tokens} must be at least 0"
    )
  streaming_pairs = lists.heads_of(streaming_heads)
  sinks, local = -(-sink_tokens // page_size), -(-local_tokens // page_size) + 1
  protected = sinks + local + 1 if streaming_pairs else 1  # one for a page that begins later
  width = pages.pages_of_budget(budget_tokens, page_size, protected)
  pages.check_option("group", group, pages.GROUPS)
  pages.check_option("score", score, DIGESTS)
  digest = DIGESTS[score]

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    lists.check_heads("lserve", "streaming_heads", streaming_pairs, model)
    heads = model.num_heads if group == "none" else model.num_kv_heads
    plan = LayerPlan((SELECT,) * model.num_layers)
    return plan, lists.no_lists(digest, model, cache, logical, heads, width)

  def preprocess(state: Listed, inputs: Inputs) -> Listed:
    return lists.with_keys(digest, state, inputs, logical)

  def select(state: Listed, inputs: Inputs) -> tuple[Selection, Listed]:
    listed, lengths = state.lists[inputs.row], inputs.lengths
    total = inputs.slot_positions.shape[-1] // page_size
    there = pages.pages_there(inputs, total, page_size)
    if total <= width and not streaming_pairs:
      return pages.all_pages(there, listed.shape[1]), state
    due = (lengths % period == 0) | (lengths == state.prompt + 1)
    listed = lists.where_due(due, lambda: rank(state, inputs, there), listed)
    known = jnp.maximum(lengths // period * period, state.prompt + 1)  # when it was listed
    known, pages_now = -(-known // page_size), -(-lengths // page_size)
    now = lists.with_born(listed, known[:, None], pages_now)
    return pages.selection_of(now, there), lists.with_list(state, inputs, listed)

  def rank(state: Listed, inputs: Inputs, there: jax.Array) -> jax.Array:
    parts = pages.scores_of(digest, state.digests[inputs.row], inputs, logical)
    seen = pages.pages_there(inputs, parts.shape[-1], logical)
    parts = jnp.where(seen[:, :, None], parts, -jnp.inf)
    b, k, g, _ = parts.shape
    whole = parts.reshape(b, k, g, there.shape[-1], -1).max(axis=-1)
    scores = pages.combine(whole, there, group, inputs.q.shape[-1])
    total, most = there.shape[-1], state.lists[inputs.row].shape[-1]
    forced = pages.ends(inputs, total, page_size)
    if not streaming_pairs:
      return pages.best_pages(scores, forced, most)
    streaming = jnp.asarray(lists.heads_in_layer(streaming_pairs, inputs.layer, k))
    streaming = jnp.repeat(streaming, scores.shape[1] // k)[None, :, None]
    own = streaming & pages.ends(inputs, total, page_size, sinks, local)
    scores = jnp.where(streaming & ~own, -jnp.inf, scores)
    return pages.best_pages(scores, own | forced, most)

  return Policy(
    name="lserve",
    budget_tokens=budget_tokens,
    stores=recalling_pages(group),
    register=register,
    preprocess=preprocess,
    select=select,
    page_size=page_size,
    joins_heads=bool(streaming_pairs),
  )
