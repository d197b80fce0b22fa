"""What is kept of the pages of a layer, and how it grows.

The digests of a layer are panels of pages [B, K, C, Z, W] (`kvjax.cache.page_panels`) of the
cache's dtype, which grow key by key, or of int8, a scale for each page beside them. Where the form
of a digest needs the keys of a whole page (`Digest.extend` is None), and where rounded numbers
would be extended, the keys of each row's newest page are kept too, and its digest is made of them
anew with every key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.page_panels import no_panels, read_page, write_page, write_pages
from kvjax.cache.segments import Segments
from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies._digests import DIGESTS, Digest
from kvjax.types import Inputs

LARGEST = 127  # of int8 with its sign changed


class WithNewest(NamedTuple):
  """Digests of a layer that are not extended.

  Attributes:
    digests: f or i8 [B, K, C, Z, W].
    newest: f[B, K, C, D], the keys of each row's newest page.
    scales: f32[B, K, C, 1, W], what int8 digests are multiplied with; empty for others.
  """

  digests: Segments
  newest: jax.Array
  scales: Segments = ()


Kept = Segments | WithNewest


def check_digest_dtype(digest_dtype: str | None, score: str) -> None:
  """Raises ValueError for a dtype that digests of this score are not kept in."""
  if digest_dtype not in (None, "int8"):
    raise ValueError(
      f"unknown digest_dtype {digest_dtype!r}; expected 'int8', or None: the cache's"
    )
  if digest_dtype and not DIGESTS[score].vectors:
    raise ValueError(
      f"digest_dtype {digest_dtype!r} with score {score!r}, which keeps no digests; leave it out"
    )


def no_digests(
  digest: Digest,
  model: ModelConfig,
  cache: CacheConfig,
  layers: int,
  page_size: int,
  dtype: str | None = None,
) -> tuple[Kept, ...]:
  """What each of the layers keeps before the first token.

  Args:
    digest: its form.
    model: gives K and D.
    cache: gives B, the number of pages and the dtype of keys.
    layers: how many.
    page_size: tokens of a page that has a digest; divides that of the cache.
    dtype: of the digests, "int8" or None for that of the cache.
  """
  pages = cache.pages_per_row * (cache.page_size // page_size)
  b, k, d = cache.batch_size, model.num_kv_heads, model.head_dim
  lists = b, k

  def layer() -> Kept:
    if not digest.vectors:
      return ()
    digests = no_panels(lists, digest.size(d), pages, dtype or cache.dtype)
    if digest.extend and not dtype:
      return digests
    newest = jnp.zeros((b, k, page_size, d), cache.dtype)
    return WithNewest(digests, newest, no_panels(lists, 1, pages, "float32") if dtype else ())

  return tuple(layer() for _ in range(layers))


def with_keys(digest: Digest, kept: Kept, inputs: Inputs, page_size: int) -> Kept:
  """What a layer keeps after the keys of a chunk or of one token a row."""
  if not digest.vectors:
    return kept
  if inputs.k.shape[1] > 1:
    return _with_chunk(digest, kept, inputs, page_size)
  position, key = inputs.positions[:, 0], inputs.k[:, 0]
  page, slot = position // page_size, position % page_size

  def write(segments: Segments, made: jax.Array) -> Segments:
    return write_page(segments, page, made)

  if isinstance(kept, WithNewest):
    slot = jnp.where(inputs.valid[:, 0], slot, page_size)  # nowhere
    newest = _with_key(kept.newest, key, slot)
    valid = jnp.arange(page_size)[None] <= slot[:, None]
    made = digest.of_pages(newest, jnp.broadcast_to(valid[:, None], newest.shape[:-1]))
    return _written(kept, made, newest, write)
  assert digest.extend is not None
  count = jnp.broadcast_to(slot[:, None], key.shape[:2])
  return write(kept, digest.extend(read_page(kept, page), key.astype(kept[0].dtype), count))


def _with_key(newest: jax.Array, key: jax.Array, slot: jax.Array) -> jax.Array:
  here = (jnp.arange(newest.shape[2])[None] == slot[:, None])[:, None, :, None]
  return jnp.where(here, key[:, :, None].astype(newest.dtype), newest)


def _with_chunk(digest: Digest, kept: Kept, inputs: Inputs, page_size: int) -> Kept:
  b, s, heads, d = inputs.k.shape
  keys = inputs.k.swapaxes(1, 2).reshape(b, heads, s // page_size, page_size, d)
  valid = inputs.valid.reshape(b, 1, s // page_size, page_size)
  made = digest.of_pages(keys, jnp.broadcast_to(valid, keys.shape[:-1]))
  start, holds = inputs.positions[0, 0] // page_size, valid[:, 0].any(axis=-1)

  def write(segments: Segments, made: jax.Array) -> Segments:
    return write_pages(segments, made, start, holds)

  if not isinstance(kept, WithNewest):
    return write(kept, made)
  last = jnp.maximum(holds.sum(axis=-1) - 1, 0)  # of the pages of this chunk
  newest = jnp.take_along_axis(keys, last[:, None, None, None, None], axis=2)[:, :, 0]
  some = holds.any(axis=-1)[:, None, None, None]
  newest = jnp.where(some, newest.astype(kept.newest.dtype), kept.newest)
  return _written(kept, made, newest, write)


def _written(
  kept: WithNewest,
  made: jax.Array,
  newest: jax.Array,
  write: Callable[[Segments, jax.Array], Segments],
) -> WithNewest:
  """kept after digests f[..., Z] were made."""
  if not kept.scales:
    return WithNewest(write(kept.digests, made), newest)
  numbers, scales = quantised(made)
  return WithNewest(write(kept.digests, numbers), newest, write(kept.scales, scales))


def quantised(digests: jax.Array) -> tuple[jax.Array, jax.Array]:
  """f[..., Z] as i8[..., Z] times f32[..., 1], to within half a scale each."""
  digests = digests.astype(jnp.float32)
  scales = jnp.abs(digests).max(axis=-1, keepdims=True) / LARGEST
  numbers = jnp.round(digests / jnp.where(scales > 0, scales, 1))
  return numbers.astype(jnp.int8), scales
