"""Donated pools are written where they lie, on the device and in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.arg_specs import named, small
from pallas_kernels.project_qkv_to_pages import project_qkv_to_pages
from pallas_kernels.recall_pages import offload_pages, recall_pages
from pallas_kernels.scatter_pages import append_kv, scatter_pages
from scripts.gpu_checks import inputs
from scripts.gpu_checks.case import Case, LeftOut, Setting

SECONDS = 25
Pools = tuple[jax.Array, ...]


def cases(setting: Setting) -> Iterator[Case]:
  """Every operation that writes pools."""
  shape = named("llama-3.1-8b")
  shape = small(shape) if setting.interpret else shape._replace(batch=2)
  # Interpreted kernels write copies, by callbacks.
  implementations = ("xla",) if setting.interpret else ("xla", "mosaic")
  for implementation in implementations:
    for name, write in _writes(shape, implementation).items():
      yield Case(f"{name} {implementation}", partial(check, shape, write, False))
  yield Case("offload_pages xla", partial(check, shape, _offload, True))


def check(shape, write: Callable[..., Pools], on_host: bool):
  """Whether the pools that come out have the addresses of those that went in, and no copy is made.

  An address alone does not say so: XLA may copy a pool, change the copy and copy it back.
  """
  made = inputs.make(shape)
  pools, others = _copies((made.keys, made.values), on_host), (made.keys[:4], made.values[:4])
  before, pool_bytes = [_address(pool) for pool in pools], pools[0].nbytes
  compiled = jax.jit(write, donate_argnums=0).lower(pools, others, made).compile()
  memory = compiled.memory_analysis()
  assert memory is not None, "this backend tells no bytes"
  temporary = memory.temp_size_in_bytes + memory.host_temp_size_in_bytes
  pools = compiled(pools, others, made)
  after = [_address(pool) for pool in pools]
  return {
    "ok": before == after and temporary < pool_bytes // 2,
    "moved": sum(x != y for x, y in zip(before, after, strict=True)),
    "temporary_bytes": temporary,
    "pool_bytes": pool_bytes,
  }


def _copies(pools: Pools, on_host: bool) -> Pools:
  space = jax.memory.Space.Host if on_host else jax.memory.Space.Device
  return jax.jit(lambda pools: tuple(jax.device_put(pool + 0, space) for pool in pools))(pools)


def _address(array: jax.Array) -> int:
  try:
    return array.unsafe_buffer_pointer()
  except Exception as error:  # of host memory, some versions of jax do not tell
    raise LeftOut(f"the address of the pool is not told: {error}") from error


def _writes(shape, implementation: str) -> dict[str, Callable[..., Pools]]:
  def append(pools, others, made):
    new = made.q[:, :, 0]
    slots = made.lengths[:, None] * jnp.zeros((1, shape.kv_heads), jnp.int32)
    return append_kv(pools, made.table, slots, (new, new), implementation=implementation)

  def scatter(pools, others, made):
    return scatter_pages(pools, made.table[0, 0, :4], others, implementation=implementation)

  def recall(pools, others, made):
    host = tuple(jax.device_put(pool, jax.memory.Space.Host) for pool in others)
    ids, target = jnp.arange(4, dtype=jnp.int32), made.table[0, 0, :4]
    return recall_pages(host, pools, ids, target, jnp.int32(3), implementation=implementation)

  def project(pools, others, made):
    e, width = shape.embed_dim, shape.head_dim
    x = jnp.ones((shape.batch, e), shape.dtype)
    q, k = (jnp.ones((e, n * shape.kv_heads * width), shape.dtype) for n in (shape.groups, 1))
    pages, (keys, values) = made.table[:, :, 0], pools
    call = partial(project_qkv_to_pages, implementation=implementation)
    return call(x, (q, k, k), keys, values, pages, pages * 0)[1:]

  return {
    "append_kv": append,
    "scatter_pages": scatter,
    "recall_pages": recall,
    "project_qkv_to_pages": project,
  }


def _offload(pools, others, made):
  ids, target = jnp.arange(4, dtype=jnp.int32), made.table[0, 0, :4]
  return offload_pages(others, pools, ids, target, jnp.int32(3))
