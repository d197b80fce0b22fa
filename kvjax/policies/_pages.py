"""What policies that select pages share: scores of all pages, and the best of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.policies._digests import Digest
from kvjax.policies._kept import Kept, WithNewest
from kvjax.types import Inputs, Selection
from pallas_kernels.page_scores import page_products

GROUPS = ("max", "mean", "sum_probs", "none")


def pages_of_budget(budget_tokens: int, page_size: int, protected: int = 0) -> int:
  """Pages that may be attended to.

  Raises:
    ValueError: less than one page, or not more than the pages that are always attended to.
  """
  if budget_tokens < page_size:
    raise ValueError(
      f"budget_tokens {budget_tokens} is under one page of {page_size} tokens; give at least one"
    )
  if budget_tokens // page_size < protected:
    raise ValueError(
      f"budget_tokens {budget_tokens} has no room for the {protected} pages of {page_size} tokens "
      f"that are always attended to; give at least {protected * page_size}"
    )
  return budget_tokens // page_size


def check_option(name: str, value: str, known) -> None:
  """Raises ValueError for a value that is not among the known ones."""
  if value not in known:
    raise ValueError(f"unknown {name} {value!r}; expected one of {', '.join(known)}")


def check_dense_layers(dense_layers: int) -> None:
  """Raises ValueError for fewer than none."""
  if dense_layers < 0:
    raise ValueError(f"dense_layers {dense_layers} must be at least 0; give 0 for none")


def scores_of(digest: Digest, kept: Kept, inputs: Inputs, page_size: int) -> jax.Array:
  """f32[B, K, G, P]; pages that a row lacks get anything."""
  b, _, _, d = inputs.q.shape
  q = inputs.q.reshape(b, inputs.k.shape[2], -1, d)
  if not digest.vectors:
    return _exact_scores(q, inputs, page_size)
  digests, scales = (kept.digests, kept.scales) if isinstance(kept, WithNewest) else (kept, ())
  num_pages = -(-inputs.lengths.max() // page_size)
  return digest.scores(page_products(digest.queries(q), digests, num_pages, scales))


def _exact_scores(q: jax.Array, inputs: Inputs, page_size: int) -> jax.Array:
  there = inputs.slot_positions >= inputs.first[:, None, None]  # bool[B, K, T]
  keys = jnp.where(there[..., None], inputs.keys(), 0)
  products = jnp.einsum(
    "bkgd,bktd->bkgt", q.astype(keys.dtype), keys, preferred_element_type=jnp.float32
  )
  products = jnp.where(there[:, :, None], products, -jnp.inf)
  return products.reshape(*products.shape[:3], -1, page_size).max(axis=-1)


def pages_there(inputs: Inputs, total: int, page_size: int) -> jax.Array:
  """bool[B, 1, P]: pages with a token that the newest one may see."""
  starts = jnp.arange(total)[None] * page_size
  seen = (starts < inputs.lengths[:, None]) & (starts + page_size > inputs.first[:, None])
  return seen[:, None]


def ends(inputs: Inputs, total: int, page_size: int, first: int = 0, last: int = 1) -> jax.Array:
  """bool[B, 1, P]: this many first pages and this many last ones of each row."""
  pages, num_pages = jnp.arange(total)[None], -(-inputs.lengths // page_size)[:, None]
  return ((pages < first) | ((pages >= num_pages - last) & (pages < num_pages)))[:, None]


def combine(scores: jax.Array, there: jax.Array, group: str, head_dim: int) -> jax.Array:
  """f32[B, K, G, P] -> f32[B, K, P], or [B, H, P] for "none"; -inf for pages a row lacks.

  Scores are q . k as they come. For "sum_probs" they get their factor 1/sqrt(D), and the sum is
  given by its logarithm: of equal order, and above zero for the farthest page too.
  """
  b, k, g, p = scores.shape
  if group == "none":
    combined = scores.reshape(b, k * g, p)
  elif group == "sum_probs":
    scaled = jnp.where(there[:, :, None], scores * head_dim**-0.5, -jnp.inf)
    combined = jax.nn.logsumexp(jax.nn.log_softmax(scaled, axis=-1), axis=2)
  else:
    combined = scores.max(axis=2) if group == "max" else scores.mean(axis=2)
  return jnp.where(there, combined, -jnp.inf)


def best_pages(scores: jax.Array, forced: jax.Array | None, width: int) -> jax.Array:
  """The width best pages of f32[B, heads, P] scores, those of forced bool[B, 1 or heads, P] first.

  Returns:
    i32[B, heads, width], best first; P where there are no more: pages of score -inf, which are not
    forced either.
  """
  if forced is not None:
    scores = jnp.where(forced & (scores > -jnp.inf), jnp.inf, scores)
  best, pages = jax.lax.top_k(scores, width)
  return jnp.where(best > -jnp.inf, pages, scores.shape[-1])


def looked_at_again(
  scores: jax.Array, forced: jax.Array | None, inputs: Inputs, width: int, group: str
) -> jax.Array:
  """Exact scores f32[B, K, P] of the width best pages by scores f32[B, K, P]; else -inf."""
  b, k, _ = scores.shape
  pages = best_pages(scores, forced, width)
  keys = inputs.keys(pages)  # f[B, K, width*C, D]
  c, d = keys.shape[2] // width, keys.shape[3]
  q = inputs.q.reshape(b, k, -1, d).astype(keys.dtype)
  products = jnp.einsum("bkgd,bktd->bkgt", q, keys, preferred_element_type=jnp.float32)
  products = products.reshape(*q.shape[:3], width, c)
  positions = pages[..., None] * c + jnp.arange(c)[None, None, None]
  seen = (positions >= inputs.first[:, None, None, None]) & (
    positions < inputs.lengths[:, None, None, None]
  )
  exact = jnp.where(seen[:, :, None], products, -jnp.inf).max(axis=-1)
  exact = combine(exact, seen.any(axis=-1), group, d)
  rows, heads = jnp.arange(b)[:, None, None], jnp.arange(k)[None, :, None]
  return jnp.full_like(scores, -jnp.inf).at[rows, heads, pages].set(exact, mode="drop")


def all_pages(there: jax.Array, heads: int) -> Selection:
  """The selection of every page of there bool[B, 1, P]."""
  b, _, total = there.shape
  pages = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (b, heads, total))
  return Selection(pages, jnp.broadcast_to(there, pages.shape)[..., None])


def selection_of(pages: jax.Array, there: jax.Array) -> Selection:
  """The selection of pages i32[B, heads, M] as far as they are there, bool[B, 1, P]; P is none.

  In the order of the pool, which memory likes better than the order of the scores.
  """
  pages = jnp.sort(pages, axis=-1)
  mask = jnp.take_along_axis(there, pages, axis=-1, mode="fill", fill_value=False)
  return Selection(jnp.minimum(pages, there.shape[-1] - 1), mask[..., None])


def replaced(rows: tuple, row: int, value) -> tuple:
  """rows with another value at this place."""
  return (*rows[:row], value, *rows[row + 1 :])
