"""Operations of `pallas_kernels` with their references, and arguments of a shape for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import gather_pages as gather
from pallas_kernels import page_bounds
from pallas_kernels import paged_decode_attention as paged
from pallas_kernels import project_qkv_to_pages as project
from pallas_kernels import recall_pages as recall
from pallas_kernels import scatter_pages as scatter
from pallas_kernels import selected_decode_attention as selected
from pallas_kernels.arg_specs import Shape
from pallas_kernels.page_scores import PANEL, page_scores, page_scores_reference
from scripts.gpu_checks import inputs


class Operation(NamedTuple):
  """An operation with its reference.

  Attributes:
    call: `call(*args, implementation=..., interpret=...)`.
    reference: `reference(*args)`, of the same arguments in f32.
    arguments: `arguments(shape)`, of the dtype of the shape.
    exact: it moves numbers and computes none.
  """

  call: Callable[..., Any]
  reference: Callable[..., Any]
  arguments: Callable[[Shape], Sequence[Any]]
  exact: bool = False


def widened(x: jax.Array) -> jax.Array:
  """The same numbers in f32; ids and the like as they are."""
  return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _selected(shape):
  made = inputs.make(shape)
  return made.q, made.keys, made.values, made.pages, made.mask


def _paged(shape):
  made = inputs.make(shape)
  return made.q, made.keys, made.values, made.table, made.lengths


def _in_int8(arguments):
  q, keys, values, *rest = arguments
  scales = [jnp.abs(widened(pool)).max(axis=(1, 2)) / 127 for pool in (keys, values)]
  pools = [
    jnp.round(widened(pool) / scale[:, None, None]).astype(jnp.int8)
    for pool, scale in zip((keys, values), scales, strict=True)
  ]
  return q, *pools, *rest, tuple(scales)


def _with_scales(operation):
  def call(q, keys, values, pages, mask, scales, **options):
    return operation(q, keys, values, pages, mask, scales=scales, **options)

  return call


def _multiplied_out(q, keys, values, pages, mask, scales):
  pools = zip((keys, values), scales, strict=True)
  keys, values = (widened(pool) * scale[:, None, None] for pool, scale in pools)
  return selected.selected_decode_attention_reference(q, keys, values, pages, mask)


def _scores(shape):
  made = inputs.make(inputs.with_whole_segments(shape))
  pages = made.keys[made.table]  # f[B, K, P, C, D]
  bounds = jnp.concatenate([pages.max(axis=3), pages.min(axis=3)], axis=-1)
  return made.q, bounds


def _scored(q, bounds, **options):
  b, k, pages, z = bounds.shape
  panels = bounds.reshape(b, k, -1, PANEL, z).swapaxes(3, 4)
  return page_scores(q, [panels], jnp.int32(pages), **options)


def _bounded(shape):
  made = inputs.make(shape)
  return made.keys, made.pages, made.pages % shape.page_size + 1


def _bounded_reference(pool, ids, used):
  pages, valid = pool[ids], jnp.arange(pool.shape[1]) < used[..., None]
  highest = jnp.where(valid[..., None], pages, -jnp.inf).max(axis=-2)
  lowest = jnp.where(valid[..., None], pages, jnp.inf).min(axis=-2)
  return jnp.concatenate([highest, lowest], axis=-1)


def _grown(shape):
  q, bounds = _scores(shape)
  first = jnp.arange(shape.batch) % 2 == 1
  return bounds.swapaxes(2, 3), q[:, :, 0] * 4, jnp.arange(shape.batch), first


def _grown_reference(bounds, key, place, first):
  for row in range(bounds.shape[0]):
    highest, lowest = jnp.split(bounds[row, :, :, place[row]], 2, axis=-1)
    if first[row]:
      highest = lowest = key[row]
    grown = [jnp.maximum(highest, key[row]), jnp.minimum(lowest, key[row])]
    bounds = bounds.at[row, :, :, place[row]].set(jnp.concatenate(grown, axis=-1))
  return bounds


def _gathered(shape):
  made = inputs.make(shape)
  return made.keys, made.pages


def _appended(shape):
  made = inputs.make(shape)
  slots = jnp.full(made.table.shape[:2], shape.page_size + 1, jnp.int32)
  new = made.q[:, :, 0]
  return (made.keys, made.values), made.table, slots, (new, -new)


def _scattered(shape):
  made = inputs.make(shape)
  ids = made.pages.reshape(-1)[-5:]
  return (made.keys, made.values), ids, (made.keys[:5], made.values[:5])


def _recalled(shape):
  made = inputs.make(shape)
  count = min(33, shape.num_pages // 2)
  source, target = made.table.reshape(-1)[:count], made.table.reshape(-1)[-count:]
  host, device = (made.keys, made.values), (made.values, made.keys)
  return host, device, source, target, jnp.int32(count - 2)


def _recall(host, device, *rest, interpret=False, **options):
  if not interpret:  # the interpreter knows one memory
    host = tuple(jax.device_put(pool, jax.memory.Space.Host) for pool in host)
  return recall.recall_pages(host, device, *rest, interpret=interpret, **options)


def _projected(shape):
  made, e = inputs.make(shape), shape.embed_dim
  heads = (shape.kv_heads * shape.groups, shape.kv_heads, shape.kv_heads)
  keys = jax.random.split(jax.random.key(1), 5)
  weights = tuple(
    jax.random.normal(key, (e, n * shape.head_dim), shape.dtype) * e**-0.5
    for key, n in zip(keys[:3], heads, strict=True)
  )
  x = jax.random.normal(keys[3], (shape.batch, e), shape.dtype)
  angles = jax.random.normal(keys[4], (shape.batch, shape.head_dim // 2)) * 100
  slots = jnp.full(made.table.shape[:2], 1, jnp.int32)
  rotation = jnp.cos(angles), jnp.sin(angles)
  return x, weights, made.keys, made.values, made.table[:, :, 0], slots, None, rotation


def _project(x, weights, keys, values, pages, slots, biases, rotation, **options):
  args = (x, weights, keys, values, pages, slots)
  return project.project_qkv_to_pages(*args, biases=biases, rotation=rotation, **options)


OPERATIONS = {
  "selected_decode_attention": Operation(
    selected.selected_decode_attention, selected.selected_decode_attention_reference, _selected
  ),
  "selected_decode_attention of int8": Operation(
    _with_scales(selected.selected_decode_attention),
    _multiplied_out,
    lambda shape: _in_int8(_selected(shape)),
  ),
  "paged_decode_attention": Operation(
    paged.paged_decode_attention, paged.paged_decode_attention_reference, _paged
  ),
  "page_scores": Operation(_scored, page_scores_reference, _scores),
  "bounds_of_pages": Operation(page_bounds.bounds_of_pages, _bounded_reference, _bounded, True),
  "append_bounds": Operation(page_bounds.append_bounds, _grown_reference, _grown, True),
  "gather_pages": Operation(gather.gather_pages, gather.gather_pages_reference, _gathered, True),
  "append_kv": Operation(scatter.append_kv, scatter.append_kv_reference, _appended, True),
  "scatter_pages": Operation(
    scatter.scatter_pages, scatter.scatter_pages_reference, _scattered, True
  ),
  "recall_pages": Operation(_recall, recall.recall_pages_reference, _recalled, True),
  "project_qkv_to_pages": Operation(_project, project.project_qkv_to_pages_reference, _projected),
}
