"""FlexiCache without a profile: each KV head finds out by itself how rarely it may be ranked.

Our own, beyond the paper. As in `flexicache`, Quest's bound ranks the pages of a KV head and a list
serves for a while; but instead of unstable heads that a profile names and one period for the
others, every head of every row has a period of its own, between `shortest` and `longest` steps.

Where a head is ranked, the new list is held against the one that served until then: the attention
that the page scores promise to the new list, less what they promise to the old one, is what the old
one missed at the end of its time. Promised is the softmax over the scores of all pages, the mean
over the query heads. Up to `missed_mass` of it, the period doubles; beyond, it halves. How many
pages the lists share is not asked: those that change are the last ones, which hardly matter.

A head is ranked where the length of its row is a multiple of its period, so that the heads of a
layer often are at the same steps. A period that has just grown may begin in its midst; it grows
again only when a list has served all of it.

Departures from `flexicache`: a new list is used at the step that makes it. No head has all its
pages on the device: what a restless head chooses is brought there as it changes its mind.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _kept
from kvjax.policies import _lists as lists
from kvjax.policies import _pages as pages
from kvjax.policies._digests import DIGESTS
from kvjax.policies._stores import recalling_pages
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State


class Renewed(NamedTuple):
  """The lists of a layer: pages i32[B, K, M], best first, P where there is none; the period
  i32[B, K], steps that a list serves, 0 before the first; tokens of the row when it was made."""

  pages: jax.Array
  period: jax.Array
  length: jax.Array


class Adapting(NamedTuple):
  """What each layer keeps of its pages, and its lists."""

  digests: tuple[_kept.Kept, ...]
  lists: tuple[Renewed, ...]


def flexicache_adaptive(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  missed_mass: float = 0.01,
  shortest: int = 1,
  longest: int = 64,
  score: str = "minmax",
) -> Policy:
  """FlexiCache's page selection with periods that follow each head.

  Args:
    budget_tokens: tokens of the pages that are attended to, the last one included.
    page_size: C.
    missed_mass: share of attention that a list may miss, by the page scores, at the end of its
      time; over 0 and up to 1.
    shortest: steps between two rankings of a head that keeps changing its mind.
    longest: of one that does not.
    score: what is kept of a page's keys and scored, see `quest`.

  Raises:
    ValueError: an argument outside these ranges.
  """
  if not 1 <= shortest <= longest:
    raise ValueError(f"shortest {shortest} must be at least 1 and at most longest {longest}")
  if not 0 < missed_mass <= 1:
    raise ValueError(f"missed_mass {missed_mass} must be over 0 and at most 1")
  # The last page, and those that begin until the list is replaced.
  width = pages.pages_of_budget(budget_tokens, page_size, 1 + -(-longest // page_size))
  pages.check_option("score", score, DIGESTS)
  digest = DIGESTS[score]

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    layers, heads = model.num_layers, (cache.batch_size, model.num_kv_heads)
    listed, number = (*heads, min(width, cache.pages_per_row)), jnp.zeros(heads, jnp.int32)
    none = Renewed(jnp.zeros(listed, jnp.int32), number, number)
    digests = _kept.no_digests(digest, model, cache, layers, page_size)
    return LayerPlan((SELECT,) * layers), Adapting(digests, (none,) * layers)

  def preprocess(state: Adapting, inputs: Inputs) -> Adapting:
    kept = _kept.with_keys(digest, state.digests[inputs.row], inputs, page_size)
    return state._replace(digests=pages.replaced(state.digests, inputs.row, kept))

  def select(state: Adapting, inputs: Inputs) -> tuple[Selection, Adapting]:
    old, lengths = state.lists[inputs.row], inputs.lengths[:, None]
    total, d = inputs.slot_positions.shape[-1] // page_size, inputs.q.shape[-1]
    there = pages.pages_there(inputs, total, page_size)
    if total <= width:
      return pages.all_pages(there, old.pages.shape[1]), state
    known, by_now = -(-old.length // page_size), -(-inputs.lengths // page_size)
    older = lists.with_born(old.pages, known, by_now)

    def rank() -> Renewed:
      scores = pages.scores_of(digest, state.digests[inputs.row], inputs, page_size)
      best = pages.combine(scores, there, "max", d)
      best = pages.best_pages(best, pages.ends(inputs, total, page_size), width)
      promised = lists.promised(scores, there, d)
      missed = lists.on(promised, best) - lists.on(promised, older)
      age = lengths - old.length
      period = next_period(old.period, age, missed <= missed_mass, shortest, longest)
      return Renewed(best, period, jnp.broadcast_to(lengths, period.shape))

    due = inputs.valid & (lengths % jnp.maximum(old.period, 1) == 0)  # bool[B, K]
    new = lists.where_due(due, rank, old)
    now = jnp.where(due[..., None], new.pages, older)
    listed = pages.replaced(state.lists, inputs.row, new)
    return pages.selection_of(now, there), state._replace(lists=listed)

  return Policy(
    name="flexicache_adaptive",
    budget_tokens=budget_tokens,
    stores=recalling_pages(),
    register=register,
    preprocess=preprocess,
    select=select,
    page_size=page_size,
  )


def next_period(
  period: jax.Array, age: jax.Array, good: jax.Array, shortest: int, longest: int
) -> jax.Array:
  """i32[...]: steps that the next list serves.

  Args:
    period: i32[...], those of the last one; 0 if there was none.
    age: i32[...], steps that it did serve: fewer where its period had just grown.
    good: bool[...], it missed no more than it may.
    shortest: the least.
    longest: the most.
  """
  grown = jnp.where(age < period, period, jnp.minimum(2 * period, longest))
  found = jnp.where(good, grown, jnp.maximum(period // 2, shortest))
  return jnp.where(period == 0, shortest, found)
