"""Random arguments of kernels for a shape of `pallas_kernels.arg_specs`, made on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arg_specs import SHAPES, Shape, named, small
from scripts.gpu_checks.case import Setting

_FEW = ("llama-3.1-8b", "opt-350m-f32")  # interpreted kernels take seconds each


class Inputs(NamedTuple):
  """Arguments of one decode step of one layer.

  Attributes:
    q: f[B, K, G, D].
    keys: f[N, C, D], pages of all rows in random order.
    values: f[N, C, D].
    table: i32[B, K, P], all pages of a row.
    lengths: i32[B], tokens of a row; the first row has none.
    pages: i32[B, K, M], some pages of a row.
    mask: bool[B, K, M, C], slots that count, all but some.
  """

  q: jax.Array
  keys: jax.Array
  values: jax.Array
  table: jax.Array
  lengths: jax.Array
  pages: jax.Array
  mask: jax.Array


def shapes(setting: Setting) -> list[Shape]:
  """The shapes of the checks of correctness: contexts of 2,048 tokens at most, and two rows."""
  if setting.interpret:
    return [small(named(name)) for name in _FEW]
  return [shortened(shape) for shape in SHAPES]


def shortened(shape: Shape) -> Shape:
  """The same with two rows of 2,048 tokens at most, which references in f32 have memory for."""
  tokens = min(shape.context_tokens, 2048)
  pages = min(shape.pages_selected, tokens // shape.page_size)
  return shape._replace(batch=2, context_tokens=tokens, pages_selected=pages)


def with_whole_segments(shape: Shape) -> Shape:
  """The same with a context of a multiple of 64 pages, as kernels that rank pages want them."""
  pages = -(-shape.pages_per_row // 64) * 64
  return shape._replace(context_tokens=pages * shape.page_size)


@lru_cache(maxsize=1)  # the pools of two shapes may be more than fits
def make(shape: Shape, *, full: bool = False) -> Inputs:
  """Random inputs; full for rows that are all of the context and slots that all count.

  Not to be donated: who asks again gets the same arrays.
  """
  b, k, d, c = shape.batch, shape.kv_heads, shape.head_dim, shape.page_size
  rng = np.random.default_rng(0)
  q, keys, values = _normals(
    shape.dtype,
    ((b, k, shape.groups, d), (shape.num_pages, c, d), (shape.num_pages, c, d)),
  )
  table = rng.permutation(shape.num_pages).reshape(b, k, shape.pages_per_row).astype(np.int32)
  lengths = np.full(b, shape.context_tokens, np.int32)
  pages = table[:, :, : shape.pages_selected]
  mask = np.ones((*pages.shape, c), bool)
  if not full:
    lengths[:2] = 0, shape.context_tokens - c // 2
    mask = rng.random(mask.shape) < 0.9
    mask[0, 0] = False
  return Inputs(q, keys, values, *(jnp.asarray(x) for x in (table, lengths, pages, mask)))


def _normals(dtype: str, sizes) -> list[jax.Array]:
  """Made under jit, so that each is an array of the device's own."""

  @jax.jit
  def make():
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return [jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True)]

  return make()
