"""Paged layout: one flat pool of pages over layers, rows and heads, and tables of page ids.

Where a model sees only a window, a row's table leads round a ring: a new page takes the place of
one that has left the window, so that two places of the table name the same page, of which the older
is never read again.

The pool is threaded through the layers and donated, and is only ever indexed by global page ids,
never sliced by layer: slices are copies. Writes come before reads within a step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.page_copies import copies_of_pages
from pallas_kernels.prefill_attention import PastBlocks, first_block
from pallas_kernels.scatter_pages import append_kv, scatter_pages


class Pools(NamedTuple):
  """All pages of all layers that select.

  Attributes:
    keys: f[N, C, D], one KV head's keys of C tokens a page. A token's numbers lie together, which
      GPU kernels and copies of single tokens want; `Contiguous` has slots last, for CPUs.
    values: f[N, C, D].
  """

  keys: jax.Array
  values: jax.Array

  @property
  def num_pages(self) -> int:
    """N; as a page id it means: no page."""
    return self.values.shape[0]

  @property
  def page_size(self) -> int:
    """C."""
    return self.values.shape[1]


def append_token(
  pools: Pools, table: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array
) -> Pools:
  """Writes one token a row.

  Args:
    pools: all pages.
    table: i32[B, K, P], page ids of one layer; N where there is no page.
    slots: i32[B, K], slot within the row's P*C.
    k: f[B, K, D].
    v: f[B, K, D].

  Returns:
    Pools; a token without a page is not written.
  """
  return Pools(*append_kv(tuple(pools), table, slots, (k, v)))


def append_chunk(
  pools: Pools, table: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, valid: jax.Array
) -> Pools:
  """Writes S tokens a row as whole pages.

  Padding within the last page of a row is written too (its slots are unused); pages that would
  hold nothing but padding are not.

  Args:
    pools: all pages.
    table: i32[B, K, P].
    k: f[B, S, K, D], S a multiple of C.
    v: f[B, S, K, D].
    start: i32[], position of the first token, a multiple of C.
    valid: bool[B, S].
  """
  b, s, heads, d = k.shape
  c = pools.page_size
  places = start // c + jnp.arange(s // c)
  pages = jnp.take(table, places, axis=-1, mode="fill", fill_value=pools.num_pages)
  holds = valid.reshape(b, 1, s // c, c).any(axis=-1)
  pages = jnp.where(holds, pages, pools.num_pages)  # i32[B, K, S/C]

  def in_pages(x):
    return x.swapaxes(1, 2).reshape(b, heads, s // c, c, d)

  return Pools(*scatter_pages(tuple(pools), pages, (in_pages(k), in_pages(v))))


def keys_of(pools: Pools, table: jax.Array, pages: jax.Array | None = None) -> jax.Array:
  """f[B, K, M*C, D]: a copy of the keys of a layer with table i32[B, K, P]; of all its pages, or of
  those at i32[B, K, M] places in the table."""
  if pages is not None:
    table = jnp.take_along_axis(table, pages, axis=-1, mode="clip")
  # Not `copies_of_pages`: what masks these keys is fused with the gather, and they are many.
  keys = pools.keys.at[table].get(mode="clip")  # f[B, K, P, C, D]
  return keys.reshape(*table.shape[:2], -1, keys.shape[-1])


def past_blocks(
  pools: Pools, table: jax.Array, start: jax.Array, block: int, window: int | None = None
) -> PastBlocks:
  """What a chunk of block tokens from start i32[] may see before itself.

  start is a multiple of block, and block of C.
  """
  b, k, _ = table.shape
  c, d = pools.values.shape[1:]

  def read(i):
    places = i * (block // c) + jnp.arange(block // c)
    pages = jnp.take(table, places, axis=-1, mode="clip")  # i32[B, K, block/C]
    keys, values = (copies_of_pages(pool, pages).reshape(b, k, block, d) for pool in pools)
    return keys.swapaxes(2, 3), values

  first = 0 if window is None else first_block(start, block, window)
  return PastBlocks(first, start // block, read)
