"""Scores of pages: products of queries with digests, among them Quest's upper bound of q . k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.control import run_if

PIECE = 64  # pages that are converted at a time: a piece stays in a core's cache


def page_scores(q: jax.Array, bounds: Sequence[jax.Array], num_pages: jax.Array) -> jax.Array:
  """sum_c max(q_c * min_c, q_c * max_c) for every page, written as one product.

  The larger of the two is q_c * max_c where q_c > 0 and q_c * min_c elsewhere, so the sum is
  [max(q, 0), min(q, 0)] . [max, min].

  Args:
    q: f[B, K, G, D].
    bounds: f[B, K, 2*D, Pi] each, maxima before minima; segments of pages in order.
    num_pages: i32[], pages that any row has; segments beyond are not read on a CPU.

  Returns:
    f32[B, K, G, P], P = sum of Pi; pages that a row does not have get -inf or whatever their bounds
    say: mask them.
  """
  return page_products(signed(q), bounds, num_pages)


def signed(q: jax.Array) -> jax.Array:
  """[max(q, 0), min(q, 0)] f[..., 2*D] of q f[..., D]: what bounds are multiplied with."""
  return jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)


def page_products(
  queries: jax.Array,
  digests: Sequence[jax.Array],
  num_pages: jax.Array,
  scales: Sequence[jax.Array] = (),
) -> jax.Array:
  """Products of queries with the digest of every page, in one pass over the digests.

  Args:
    queries: f[B, K, G, Z].
    digests: f[B, K, Z, Pi] each, or i8 with scales; segments of pages in order.
    num_pages: i32[], pages that any row has; segments beyond are not read on a CPU.
    scales: f32[B, K, 1, Pi] each, what products with i8 digests are multiplied with; else none.

  Returns:
    f32[B, K, G, P], P = sum of Pi; pages that a row does not have get -inf or whatever their
    digests say: mask them.
  """
  if not scales:
    queries = queries.astype(digests[0].dtype)
  args = (queries, tuple(digests), tuple(scales), num_pages)
  return jax.lax.platform_dependent(*args, cpu=_reached, default=_all)


def _reached(queries, digests, scales, num_pages):
  product = _product_by_pieces if scales else _product
  products, offset = [], 0
  for segment in _segments(digests, scales):
    pages = segment[0].shape[-1]
    if offset == 0:
      products.append(product(queries, *segment))
    else:
      unread = jnp.full((*queries.shape[:3], pages), -jnp.inf, jnp.float32)
      read = partial(product, queries, *segment)
      products.append(run_if(num_pages > offset, lambda _, read=read: read(), unread))
    offset += pages
  return jnp.concatenate(products, axis=-1)


def _all(queries, digests, scales, num_pages):
  """No branch, which would cost a GPU a round trip to the host."""
  del num_pages
  products = [_product(queries, *segment) for segment in _segments(digests, scales)]
  return jnp.concatenate(products, axis=-1)


def _segments(digests, scales):
  return zip(digests, scales, strict=True) if scales else zip(digests, strict=True)


def _product(queries, digests, scales=1.0):
  digests = digests.astype(queries.dtype)
  products = jnp.einsum("bkgz,bkzp->bkgp", queries, digests, preferred_element_type=jnp.float32)
  return products * scales


def _product_by_pieces(queries, digests, scales):
  """`_product`, converting a few pages at a time: all at once, a CPU would write a copy of them."""
  pages = digests.shape[-1]
  width = min(PIECE, pages)

  def with_piece(piece, products):
    start = jnp.minimum(piece * width, pages - width)
    one, scale = (jax.lax.dynamic_slice_in_dim(x, start, width, axis=3) for x in (digests, scales))
    product = _product(queries, one, scale)
    return jax.lax.dynamic_update_slice_in_dim(products, product, start, axis=3)

  products = jnp.zeros((*queries.shape[:3], pages), jnp.float32)
  return jax.lax.fori_loop(0, -(-pages // width), with_piece, products)


def page_scores_reference(q, bounds):
  """The formula as it stands, over bounds f[B, K, P, 2*D]."""
  highest, lowest = jnp.split(bounds.astype(jnp.float32), 2, axis=-1)
  q = q.astype(jnp.float32)[:, :, :, None]
  return jnp.maximum(q * highest[:, :, None], q * lowest[:, :, None]).sum(axis=-1)
