"""Scores of pages: products of queries with digests, among them Quest's upper bound of q . k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.control import run_if
from pallas_kernels.dispatch import choose
from pallas_kernels.mosaic import page_scores as mosaic

GROUPS = ("none", "max", "mean", "sum")
PANEL = 64  # pages whose digests lie together


def page_scores(
  q: jax.Array, bounds: Sequence[jax.Array], num_pages: jax.Array, **choices
) -> jax.Array:
  """sum_c max(q_c * min_c, q_c * max_c) for every page, written as one product.

  The larger of the two is q_c * max_c where q_c > 0 and q_c * min_c elsewhere, so the sum is
  [max(q, 0), min(q, 0)] . [max, min].

  Args:
    q: f[B, K, G, D].
    bounds: f[B, K, Ci, 2*D, Wi] each, maxima before minima; panels of Wi pages in order, see
      `page_products`.
    num_pages: i32[], pages that any row has; segments beyond are not read on a CPU.
    choices: group, implementation and interpret of `page_products`.

  Returns:
    f32[B, K, G, P], P = sum of Ci*Wi, or f32[B, K, P]; pages that a row does not have get -inf or
    whatever their bounds say: mask them.
  """
  return page_products(signed(q), bounds, num_pages, **choices)


def signed(q: jax.Array) -> jax.Array:
  """[max(q, 0), min(q, 0)] f[..., 2*D] of q f[..., D]: what bounds are multiplied with."""
  return jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)


def page_products(
  queries: jax.Array,
  digests: Sequence[jax.Array],
  num_pages: jax.Array,
  scales: Sequence[jax.Array] = (),
  *,
  group: str = "none",
  implementation: str | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Products of queries with the digest of every page, in one pass over the digests.

  On a GPU, XLA's product too reads digests once, but writes the products of all queries and reads
  them again to combine them, or to put those of panels in order (8 G bytes a page; a digest of 2*D
  numbers in bf16 has 4 D, so 6 % more for Llama-3.1-8B and 25 % for a group of 16), and it reads
  the pages that no row has. Mosaic's kernel combines in registers and reads panels of 64 pages that
  some row has.

  Args:
    queries: f[B, K, G, Z].
    digests: f[B, K, Ci, Z, Wi] each, or i8 with scales; segments of Ci panels of Wi pages, in
      order. Panels of 64 pages are what is read fastest.
    num_pages: i32[], pages that any row has; segments beyond are not read on a CPU.
    scales: f32[B, K, Ci, 1, Wi] each, what products with i8 digests are multiplied with; else none.
    group: how the products of the G queries are combined: "max", "mean", "sum" or "none".
    implementation: "xla" or "mosaic"; None for Mosaic where it can run and there is something to
      combine, else XLA.
    interpret: run Mosaic's kernel on a CPU.

  Returns:
    f32[B, K, G, P] with group "none", else f32[B, K, P], P = sum of Ci*Wi; pages that a row does
    not have get -inf or whatever their digests say: mask them.

  Raises:
    ValueError: shapes, a group or an implementation that do not fit.
  """
  _check(queries, digests, scales, group)
  if not scales:
    queries = queries.astype(digests[0].dtype)
  if implementation is None and group == "none":
    implementation = "xla"
  refusals = {"xla": None, "mosaic": _why_not_mosaic(queries, digests)}
  if choose("page_products", implementation, refusals, interpret=interpret) == "mosaic":
    return _by_mosaic(queries, digests, num_pages, group, interpret)
  args = (queries, tuple(digests), tuple(scales), num_pages)
  return _combined(jax.lax.platform_dependent(*args, cpu=_reached, default=_all), group)


def _check(queries, digests, scales, group):
  if group not in GROUPS:
    raise ValueError(f"page_products: unknown group {group!r}, expected one of {', '.join(GROUPS)}")
  if queries.ndim != 4 or not digests:
    raise ValueError(
      f"page_products: queries {queries.shape} and {len(digests)} segments of digests, expected "
      "[B, K, G, Z] and at least one"
    )
  b, k, _, z = queries.shape
  for segment in digests:
    if segment.ndim != 5 or segment.shape[:2] != (b, k) or segment.shape[3] != z:
      raise ValueError(
        f"page_products: digests {segment.shape} do not fit queries {queries.shape}: "
        "expected [B, K, C, Z, W] and [B, K, G, Z]"
      )
  of_pages = [(*x.shape[:3], 1, x.shape[4]) for x in digests]
  if scales and [x.shape for x in scales] != of_pages:
    raise ValueError(
      f"page_products: scales {[x.shape for x in scales]} do not fit digests "
      f"{[x.shape for x in digests]}: expected [B, K, C, 1, W] for [B, K, C, Z, W]"
    )


def _why_not_mosaic(queries, digests) -> str | None:
  return next(filter(None, (mosaic.why_not(queries, segment) for segment in digests)), None)


def _by_mosaic(queries, digests, num_pages, group, interpret):
  scores, offset = [], 0
  for segment in digests:
    reached = num_pages - offset
    scores.append(mosaic.page_products(queries, segment, reached, group, interpret=interpret))
    offset += segment.shape[2] * segment.shape[4]
  return jnp.concatenate(scores, axis=-1)


def _combined(products, group: str):
  """f32[B, K, P] of products f32[B, K, G, P]; the same where there is nothing to combine."""
  if group == "none":
    return products
  return {"max": jnp.max, "mean": jnp.mean, "sum": jnp.sum}[group](products, axis=2)


def _reached(queries, digests, scales, num_pages):
  product = _product_by_panels if scales else partial(_product, on_cpu=True)
  products, offset = [], 0
  for segment in _segments(digests, scales):
    pages = segment[0].shape[2] * segment[0].shape[4]
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


def _product(queries, digests, scales=1.0, *, on_cpu=False):
  """f32[B, K, G, C*W]."""
  pages = digests.shape[2] * digests.shape[4]
  digests = digests.astype(queries.dtype)
  repeated = jnp.broadcast_to(queries[:, :, None], (*digests.shape[:3], *queries.shape[2:]))
  products = jnp.einsum("bkcgz,bkczw->bkcgw", repeated, digests, preferred_element_type=jnp.float32)
  if on_cpu:  # which would make the product in the order of the result, much slower
    products = jax.lax.optimization_barrier(products)
  products = products * scales
  return products.swapaxes(2, 3).reshape(*queries.shape[:3], pages)


def _product_by_panels(queries, digests, scales):
  """`_product`, converting a panel at a time, which stays in a core's cache: of all at once a CPU
  would write a copy."""
  count, width = digests.shape[2], digests.shape[4]

  def with_panel(panel, products):
    one, scale = (jax.lax.dynamic_slice_in_dim(x, panel, 1, axis=2) for x in (digests, scales))
    product = _product(queries, one, scale, on_cpu=True)
    return jax.lax.dynamic_update_slice_in_dim(products, product, panel * width, axis=3)

  products = jnp.zeros((*queries.shape[:3], count * width), jnp.float32)
  return jax.lax.fori_loop(0, count, with_panel, products)


def page_scores_reference(q, bounds):
  """The formula as it stands, over bounds f[B, K, P, 2*D]."""
  highest, lowest = jnp.split(bounds.astype(jnp.float32), 2, axis=-1)
  q = q.astype(jnp.float32)[:, :, :, None]
  return jnp.maximum(q * highest[:, :, None], q * lowest[:, :, None]).sum(axis=-1)
