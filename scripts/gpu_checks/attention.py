"""Decode attention against the bytes it reads, against cuDNN and against XLA; ranking beside it.

The goals of the project: dense at least 85 % of the bandwidth of a copy on the device (ratio 1.18),
selected attention at 1,024 of 32k tokens at least 4 times as fast as dense, ranking (page_scores
and top_k) under 20 % of selected attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.arg_specs import Shape, named, small
from pallas_kernels.page_scores import PANEL, page_scores
from pallas_kernels.paged_decode_attention import paged_decode_attention
from pallas_kernels.selected_decode_attention import selected_decode_attention
from scripts.gpu_checks import inputs
from scripts.gpu_checks.case import Case, LeftOut, Setting
from scripts.gpu_checks.timing import device_bandwidth, loops, measured, seconds_of_trip

SECONDS = 70
NAMES = ("llama-3.1-8b", "llama-3.1-8b-pages-64", "qwen2.5-7b")


def cases(setting: Setting) -> Iterator[Case]:
  """Dense, cuDNN, selected and ranking for each shape."""
  implementations = ("mosaic", "xla")
  for name in NAMES[:1] if setting.interpret else NAMES:
    shape = small(named(name)) if setting.interpret else named(name)
    for implementation in implementations:
      yield Case(f"dense {implementation} {name}", partial(_dense, shape, implementation, setting))
    yield Case(f"dense cudnn {name}", partial(_cudnn, shape, setting))
    for implementation in implementations:
      run = partial(_selected, shape, implementation, setting)
      yield Case(f"selected {implementation} {name}", run)
    for implementation in implementations:
      run = partial(_ranking, shape, implementation, setting)
      yield Case(f"page_scores and top_k {implementation} {name}", run)


def bandwidth(setting: Setting) -> float:
  """Bytes/s of a copy on the device."""
  return device_bandwidth((1 << 20) if setting.interpret else (1 << 30))


def interpreted(setting: Setting, implementation: str) -> dict:
  """Keywords of an operation."""
  return {
    "implementation": implementation,
    "interpret": setting.interpret and implementation != "xla",
  }


def _dense(shape, implementation, setting):
  made = inputs.make(shape, full=True)
  attend = partial(paged_decode_attention, **interpreted(setting, implementation))
  fixed = made.keys, made.values, made.table, made.lengths
  seconds = seconds_of_trip(attend, made.q + 0, *fixed, **loops(setting))
  return measured(seconds, _kv_bytes(shape, shape.context_tokens), bandwidth(setting))


def _cudnn(shape, setting):
  if setting.interpret:
    raise LeftOut("cuDNN needs a GPU")
  made, b, heads = inputs.make(shape, full=True), shape.batch, shape.kv_heads
  size = b, heads, shape.context_tokens, shape.head_dim
  k, v = (pool.reshape(size).swapaxes(1, 2) for pool in (made.keys, made.values))

  def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

  q = made.q.reshape(b, 1, heads * shape.groups, shape.head_dim)
  seconds = seconds_of_trip(attend, q + 0, k, v, **loops(setting))
  return measured(seconds, _kv_bytes(shape, shape.context_tokens), bandwidth(setting))


def _selected(shape, implementation, setting):
  made = inputs.make(shape, full=True)
  attend = partial(selected_decode_attention, **interpreted(setting, implementation))
  fixed = made.keys, made.values, made.pages, made.mask
  seconds = seconds_of_trip(attend, made.q + 0, *fixed, **loops(setting))
  tokens = shape.pages_selected * shape.page_size
  return measured(seconds, _kv_bytes(shape, tokens), bandwidth(setting))


def _ranking(shape, implementation, setting):
  """Bounds are as large as keys and values of a token a page."""
  shape = inputs.with_whole_segments(shape)
  b, k, pages = shape.batch, shape.kv_heads, shape.pages_per_row
  bounds = jnp.ones((b, k, pages // PANEL, 2 * shape.head_dim, PANEL), shape.dtype)

  def rank(q, bounds):
    options = interpreted(setting, implementation)
    scores = page_scores(q, [bounds], jnp.int32(pages), group="max", **options)
    best = jax.lax.top_k(scores, min(shape.pages_selected, pages))[1]
    return q + best[..., :1, None].astype(q.dtype)  # the next trip must need it

  seconds = seconds_of_trip(rank, inputs.make(shape, full=True).q + 0, bounds, **loops(setting))
  return measured(seconds, bounds.size * bounds.dtype.itemsize, bandwidth(setting))


def _kv_bytes(shape: Shape, tokens: int) -> int:
  item = jnp.dtype(shape.dtype).itemsize
  return 2 * shape.batch * shape.kv_heads * tokens * shape.head_dim * item
