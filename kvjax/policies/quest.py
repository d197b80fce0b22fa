"""Quest (Tang et al., ICML 2024): the pages whose key bounds promise the largest scores.

Per page and channel the minimum and the maximum of the keys are kept. The score of a page is
sum_c max(q_c min_c, q_c max_c), the paper's upper bound of q . k over its keys; the pages with the
largest scores are attended to, anew at every decode step. Prefill is dense.

As the authors' end-to-end path and unlike their accuracy path: the last page is always attended to
and counts within the budget, the others compete for the rest of it.

Departures: the original handles one row and, in its kernels, no grouped queries; here rows are
independent and the G query heads of a KV head are combined by `group`. Bounds belong to the KV
head, so `none` (each query head picks its own pages, as the original) reads up to G times as much.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.cache.segments import read_at, segment_sizes, write_at, write_chunk
from kvjax.config import CacheConfig, ModelConfig
from kvjax.types import DENSE, SELECT, Inputs, LayerPlan, Policy, Selection, State
from pallas_kernels.page_bounds import extend_bounds, page_bounds
from pallas_kernels.page_scores import page_scores

GROUPS = ("max", "mean", "sum_probs", "none")
FIRST_SEGMENT_PAGES = 512


def quest(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  dense_layers: int = 2,
  group: str = "max",
  force_last: bool = True,
) -> Policy:
  """Quest's page selection.

  Args:
    budget_tokens: tokens of the pages that are attended to; at least one page. The knob that
      matters: bytes read and accuracy both grow with it.
    page_size: C.
    dense_layers: layers at the bottom that attend to everything; 2 in the original.
    group: how the scores of the G query heads of a KV head become one: their "max", "mean",
      "sum_probs" (sum of the softmax over pages), or "none".
    force_last: always attend to the page of the newest token; False is the original's accuracy
      path, where it competes like any other.

  Raises:
    ValueError: an argument outside these ranges.
  """
  if budget_tokens < page_size:
    raise ValueError(
      f"budget_tokens {budget_tokens} is under one page of {page_size} tokens; give at least one"
    )
  if group not in GROUPS:
    raise ValueError(f"unknown group {group!r}; expected one of {', '.join(GROUPS)}")
  width = budget_tokens // page_size

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    roles = [DENSE if layer < dense_layers else SELECT for layer in range(model.num_layers)]
    sizes = segment_sizes(cache.pages_per_row, FIRST_SEGMENT_PAGES)
    shape = (cache.batch_size, model.num_kv_heads, 2 * model.head_dim)
    bounds = tuple(
      tuple(jnp.zeros((*shape, size), cache.dtype) for size in sizes)
      for role in roles
      if role == SELECT
    )
    return LayerPlan(tuple(roles)), bounds

  def preprocess(state: State, inputs: Inputs) -> State:
    update = _bounds_of_token if inputs.k.shape[1] == 1 else _bounds_of_chunk
    bounds = update(state[inputs.row], inputs, page_size)
    return (*state[: inputs.row], bounds, *state[inputs.row + 1 :])

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    bounds = state[inputs.row]
    num_pages = -(-inputs.lengths // page_size)  # i32[B]
    b, _, h, d = inputs.q.shape
    q = inputs.q.reshape(b, inputs.k.shape[2], -1, d)
    heads = h if group == "none" else q.shape[1]
    total = sum(segment.shape[-1] for segment in bounds)
    there = _pages_there(inputs, total, page_size)
    if total <= width:
      return _all_pages(there, heads), state
    scores = page_scores(q, bounds, num_pages.max())
    pages, mask = _best(_combine(scores, there, group), num_pages, width, force_last)
    # In the order of the pool, which memory likes better than the order of the scores.
    pages, mask = jax.lax.sort((pages, mask), num_keys=1)
    return Selection(pages, mask[..., None]), state

  return Policy(
    name="quest",
    budget_tokens=budget_tokens,
    stores=("resident",),
    register=register,
    preprocess=preprocess,
    select=select,
    page_size=page_size,
  )


def _bounds_of_token(bounds, inputs: Inputs, page_size: int):
  position = inputs.positions[:, 0]
  page = position // page_size
  first = jnp.broadcast_to((position % page_size == 0)[:, None], inputs.k[:, 0].shape[:2])
  grown = extend_bounds(read_at(bounds, page), inputs.k[:, 0].astype(bounds[0].dtype), first)
  return write_at(bounds, page, grown, axis=3)


def _bounds_of_chunk(bounds, inputs: Inputs, page_size: int):
  b, s, heads, d = inputs.k.shape
  keys = inputs.k.swapaxes(1, 2).reshape(b, heads, s // page_size, page_size, d)
  valid = inputs.valid.reshape(b, 1, s // page_size, page_size)
  chunk = page_bounds(keys, jnp.broadcast_to(valid, keys.shape[:-1])).swapaxes(2, 3)
  start = inputs.positions[0, 0] // page_size
  return write_chunk(bounds, chunk, start, valid[:, 0].any(axis=-1), axis=3)


def _pages_there(inputs: Inputs, total: int, page_size: int) -> jax.Array:
  """bool[B, 1, P]: pages with a token that the newest one may see."""
  starts = jnp.arange(total)[None] * page_size
  seen = (starts < inputs.lengths[:, None]) & (starts + page_size > inputs.first[:, None])
  return seen[:, None]


def _all_pages(there: jax.Array, heads: int) -> Selection:
  b, _, total = there.shape
  pages = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (b, heads, total))
  return Selection(pages, jnp.broadcast_to(there, pages.shape)[..., None])


def _combine(scores: jax.Array, there: jax.Array, group: str) -> jax.Array:
  """f32[B, K, G, P] -> f32[B, K, P], or [B, H, P] for "none"; -inf for pages a row lacks."""
  b, k, g, p = scores.shape
  if group == "none":
    combined = scores.reshape(b, k * g, p)
  elif group == "sum_probs":
    combined = jax.nn.softmax(jnp.where(there[:, :, None], scores, -jnp.inf), axis=-1).sum(axis=2)
  else:
    combined = scores.max(axis=2) if group == "max" else scores.mean(axis=2)
  return jnp.where(there, combined, -jnp.inf)


def _best(scores: jax.Array, num_pages: jax.Array, width: int, force_last: bool):
  """The width best pages of f32[B, heads, P] scores, and which of them there really are."""
  if not force_last:
    best, pages = jax.lax.top_k(scores, width)
    return pages, best > -jnp.inf
  b, heads, p = scores.shape
  last = num_pages - 1
  others = jnp.where(jnp.arange(p)[None, None] < last[:, None, None], scores, -jnp.inf)
  best, pages = jax.lax.top_k(others, width - 1)
  last = jnp.broadcast_to(last[:, None, None], (b, heads, 1))
  pages = jnp.concatenate([pages, jnp.maximum(last, 0)], axis=-1)
  return pages, jnp.concatenate([best > -jnp.inf, last >= 0], axis=-1)
