"""Scores of pages: products of queries with digests, among them Quest's upper bound of q . k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.control import run_if


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
  queries: jax.Array, digests: Sequence[jax.Array], num_pages: jax.Array
) -> jax.Array:
  """Products of queries with the digest of every page, in one pass over the digests.

  Args:
    queries: f[B, K, G, Z].
    digests: f[B, K, Z, Pi] each; segments of pages in order.
    num_pages: i32[], pages that any row has; segments beyond are not read on a CPU.

  Returns:
    f32[B, K, G, P], P = sum of Pi; pages that a row does not have get -inf or whatever their
    digests say: mask them.
  """
  args = (queries.astype(digests[0].dtype), tuple(digests), num_pages)
  return jax.lax.platform_dependent(*args, cpu=_reached, default=_all)


def _reached(queries, digests, num_pages):
  products, offset = [], 0
  for segment in digests:
    if offset == 0:
      products.append(_product(queries, segment))
    else:
      unread = jnp.full((*queries.shape[:3], segment.shape[-1]), -jnp.inf, jnp.float32)
      read = partial(_product, queries, segment)
      products.append(run_if(num_pages > offset, lambda _, read=read: read(), unread))
    offset += segment.shape[-1]
  return jnp.concatenate(products, axis=-1)


def _all(queries, digests, num_pages):
  """No branch, which would cost a GPU a round trip to the host."""
  del num_pages
  return jnp.concatenate([_product(queries, segment) for segment in digests], axis=-1)


def _product(queries, segment):
  return jnp.einsum("bkgz,bkzp->bkgp", queries, segment, preferred_element_type=jnp.float32)


def page_scores_reference(q, bounds):
  """The formula as it stands, over bounds f[B, K, P, 2*D]."""
  highest, lowest = jnp.split(bounds.astype(jnp.float32), 2, axis=-1)
  q = q.astype(jnp.float32)[:, :, :, None]
  return jnp.maximum(q * highest[:, :, None], q * lowest[:, :, None]).sum(axis=-1)
