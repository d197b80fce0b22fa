"""Random calls of paged attention, with poison wherever nothing may be read, and how exact they
must be.

What is not under test is numpy's or one compiled program: XLA compiles an operation outside of
programs for every shape that it meets, which took most of the time of these tests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arg_specs import Shape

SLACK = 2e-5  # sums in another order and approximate exponentials, all in f32
OUT_OF_RANGE = (-7, 10**6)


def differing(shapes, *fields: str) -> list[Shape]:
  """The first shape of every combination of these fields, for what depends on nothing else."""
  found: dict[tuple, Shape] = {}
  for shape in shapes:
    found.setdefault(tuple(getattr(shape, field) for field in fields), shape)
  return list(found.values())


def close(found, expected, of_magnitudes):
  """The weights and the result are rounded to the dtype of found, and nothing else is.

  Args:
    found: f[..., D].
    expected: f32[..., D].
    of_magnitudes: f32[..., D], the same attention over the absolute values: half a rounding step of
      it is what rounding the weights can change.
  """
  numbers = np.asarray(found, np.float32)
  assert np.isfinite(numbers).all()
  step = 0.0 if found.dtype == jnp.float32 else float(jnp.finfo(found.dtype).eps) / 2
  bound = step * (np.asarray(of_magnitudes) + 2 * np.abs(expected)) + SLACK
  error = np.abs(numbers - expected)
  assert (error <= bound).all(), f"off by {(error / bound).max():.2f} times what rounding explains"


def expected_of(reference, q, keys, values, *rest, scales=None):
  """The reference in f32 on the same numbers, and over the values' magnitudes."""

  @jax.jit
  def both(q, keys, values, rest, scales):
    q, k, v = (x.astype(jnp.float32) for x in (q, keys, values))
    return tuple(reference(q, k, x, *rest, scales=scales) for x in (v, jnp.abs(v)))

  return tuple(map(np.asarray, both(q, keys, values, rest, scales)))


def selected(shape: Shape, *, int8=False, poison=jnp.nan, seed=0):
  """q, keys, values, pages, mask and scales: holes, a list with nothing, ids out of range."""
  rng = np.random.default_rng(seed)
  b, k, m, c = shape.batch, shape.kv_heads, shape.pages_selected, shape.page_size
  n = b * k * m + 5
  pages = rng.permutation(n)[: b * k * m].reshape(b, k, m)
  mask = np.ones((b, k, m, c), bool)
  mask[0, 0] = False  # nothing
  mask[0, 1] = rng.random((m, c)) < 0.7  # holes
  mask[-1, 0, m // 3 :, c // 2 :] = False
  mask[-1, 0, -1] = False  # a page without any; of the last list everything counts
  used = np.zeros((n, c), bool)
  used[pages] = mask
  pages = np.where(mask.any(axis=-1), pages, rng.choice(OUT_OF_RANGE, pages.shape))
  q, *pools = _pools(rng, shape, n, used, int8, poison)
  return (q, *pools[:2], jnp.asarray(pages, jnp.int32), jnp.asarray(mask)), pools[2]


def paged(shape: Shape, lengths, *, int8=False, poison=jnp.nan, seed=0):
  """q, keys, values, table, lengths and scales; entries beyond the length are out of range."""
  rng = np.random.default_rng(seed)
  b, k, p, c = len(lengths), shape.kv_heads, shape.pages_per_row, shape.page_size
  n = b * k * p + 5
  table = rng.permutation(n)[: b * k * p].reshape(b, k, p)
  within = np.arange(p * c).reshape(p, c) < np.asarray(lengths)[:, None, None, None]
  within = np.broadcast_to(within, (b, k, p, c))
  used = np.zeros((n, c), bool)
  used[table] = within
  table = np.where(within.any(axis=-1), table, rng.choice(OUT_OF_RANGE, table.shape))
  shape = shape._replace(batch=b)
  q, *pools = _pools(rng, shape, n, used, int8, poison)
  return (q, *pools[:2], jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32)), pools[2]


def _pools(rng, shape: Shape, n, used, int8, poison):
  """q, keys, values and scales or None; poison is in all slots that are not used."""
  c, d = shape.page_size, shape.head_dim
  q = jnp.asarray(rng.standard_normal((shape.batch, shape.kv_heads, shape.groups, d)), shape.dtype)
  if not int8:
    pools = [rng.standard_normal((n, c, d)) for _ in range(2)]
    pools = [np.where(used[..., None], pool, poison) for pool in pools]
    return q, *(jnp.asarray(pool, shape.dtype) for pool in pools), None
  pools = [jnp.asarray(rng.integers(-127, 128, (n, c, d)), jnp.int8) for _ in range(2)]
  scales = [rng.uniform(0.005, 0.03, n) for _ in range(2)]
  return (
    q,
    *pools,
    tuple(jnp.asarray(np.where(used.any(axis=1), s, poison), jnp.float32) for s in scales),
  )


def traced(op, **keywords):
  """op compiled anew, with its arrays as arguments."""
  return jax.jit(lambda *args, scales: op(*args, scales=scales, **keywords))
