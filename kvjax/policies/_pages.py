"""What policies that select pages share: digests of all pages, their scores, and the best of them.

The digests of a layer are segments f[B, K, Z, Pi]. Where their form needs the keys of a whole page
(`Digest.extend` is None), the keys of each row's newest page lie beside them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.segments import Segments, read_at, segment_sizes, write_at, write_chunk
from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies._digests import Digest
from kvjax.types import Inputs, Selection
from pallas_kernels.page_scores import page_products

GROUPS = ("max", "mean", "sum_probs", "none")
FIRST_SEGMENT_PAGES = 512


class WithNewest(NamedTuple):
  """Digests of a layer, and newest f[B, K, C, D], the keys of each row's newest page."""

  digests: Segments
  newest: jax.Array


Kept = Segments | WithNewest


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


def no_digests(
  digest: Digest, model: ModelConfig, cache: CacheConfig, layers: int, page_size: int
) -> tuple[Kept, ...]:
  """What each of the layers keeps before the first token; pages of page_size tokens, which divides
  that of the cache."""
  pages = cache.pages_per_row * (cache.page_size // page_size)
  b, k, d = cache.batch_size, model.num_kv_heads, model.head_dim
  sizes = segment_sizes(pages, FIRST_SEGMENT_PAGES) if digest.vectors else ()

  def layer() -> Kept:
    digests = tuple(jnp.zeros((b, k, digest.size(d), size), cache.dtype) for size in sizes)
    if digest.extend or not digest.vectors:
      return digests
    return WithNewest(digests, jnp.zeros((b, k, page_size, d), cache.dtype))

  return tuple(layer() for _ in range(layers))


def with_keys(digest: Digest, kept: Kept, inputs: Inputs, page_size: int) -> Kept:
  """What a layer keeps after the keys of a chunk or of one token a row."""
  if not digest.vectors:
    return kept
  if inputs.k.shape[1] > 1:
    return _with_chunk(digest, kept, inputs, page_size)
  position, key = inputs.positions[:, 0], inputs.k[:, 0]
  page, slot = position // page_size, position % page_size
  if isinstance(kept, WithNewest):
    newest = _with_key(kept.newest, key, slot)
    valid = jnp.arange(page_size)[None] <= slot[:, None]
    grown = digest.of_pages(newest, jnp.broadcast_to(valid[:, None], newest.shape[:-1]))
    return WithNewest(write_at(kept.digests, page, grown, axis=3), newest)
  assert digest.extend is not None
  count = jnp.broadcast_to(slot[:, None], key.shape[:2])
  grown = digest.extend(read_at(kept, page), key.astype(kept[0].dtype), count)
  return write_at(kept, page, grown, axis=3)


def _with_key(newest: jax.Array, key: jax.Array, slot: jax.Array) -> jax.Array:
  here = (jnp.arange(newest.shape[2])[None] == slot[:, None])[:, None, :, None]
  return jnp.where(here, key[:, :, None].astype(newest.dtype), newest)


def _with_chunk(digest: Digest, kept: Kept, inputs: Inputs, page_size: int) -> Kept:
  b, s, heads, d = inputs.k.shape
  keys = inputs.k.swapaxes(1, 2).reshape(b, heads, s // page_size, page_size, d)
  valid = inputs.valid.reshape(b, 1, s // page_size, page_size)
  chunk = digest.of_pages(keys, jnp.broadcast_to(valid, keys.shape[:-1])).swapaxes(2, 3)
  start, holds = inputs.positions[0, 0] // page_size, valid[:, 0].any(axis=-1)
  digests = kept.digests if isinstance(kept, WithNewest) else kept
  digests = write_chunk(digests, chunk, start, holds, axis=3)
  if not isinstance(kept, WithNewest):
    return digests
  last = jnp.maximum(holds.sum(axis=-1) - 1, 0)  # of the pages of this chunk
  newest = jnp.take_along_axis(keys, last[:, None, None, None, None], axis=2)[:, :, 0]
  some = holds.any(axis=-1)[:, None, None, None]
  return WithNewest(digests, jnp.where(some, newest.astype(kept.newest.dtype), kept.newest))


def scores_of(digest: Digest, kept: Kept, inputs: Inputs, page_size: int) -> jax.Array:
  """f32[B, K, G, P]; pages that a row lacks get anything."""
  b, _, _, d = inputs.q.shape
  q = inputs.q.reshape(b, inputs.k.shape[2], -1, d)
  if not digest.vectors:
    return _exact_scores(q, inputs, page_size)
  digests = kept.digests if isinstance(kept, WithNewest) else kept
  num_pages = -(-inputs.lengths.max() // page_size)
  return digest.scores(page_products(digest.queries(q), digests, num_pages))


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


def combine(scores: jax.Array, there: jax.Array, group: str) -> jax.Array:
  """f32[B, K, G, P] -> f32[B, K, P], or [B, H, P] for "none"; -inf for pages a row lacks."""
  b, k, g, p = scores.shape
  if group == "none":
    combined = scores.reshape(b, k * g, p)
  elif group == "sum_probs":
    combined = jax.nn.softmax(jnp.where(there[:, :, None], scores, -jnp.inf), axis=-1).sum(axis=2)
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
  """Exact scores f32[B, K, P] for the width best pages of scores f32[B, K, P], -inf for the others.

  Gathering pages of `inputs.keys()` reads these pages alone: XLA makes one gather of the two.
  """
  b, k, p = scores.shape
  pages = best_pages(scores, forced, width)
  keys = inputs.keys().reshape(b, k, p, -1, inputs.q.shape[-1])
  keys = jnp.take_along_axis(keys, pages[..., None, None], axis=2, mode="clip")
  c, d = keys.shape[3:]
  q = inputs.q.reshape(b, k, -1, d).astype(keys.dtype)
  keys = keys.reshape(b, k, -1, d)
  products = jnp.einsum("bkgd,bktd->bkgt", q, keys, preferred_element_type=jnp.float32)
  products = products.reshape(*q.shape[:3], width, c)
  positions = pages[..., None] * c + jnp.arange(c)[None, None, None]
  seen = (positions >= inputs.first[:, None, None, None]) & (
    positions < inputs.lengths[:, None, None, None]
  )
  exact = jnp.where(seen[:, :, None], products, -jnp.inf).max(axis=-1)
  exact = combine(exact, seen.any(axis=-1), group)
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
