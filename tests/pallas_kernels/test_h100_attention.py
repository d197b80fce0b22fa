"""Paged attention compiled for an H100: no spills, two programs a processor, no copy of a pool."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.arg_specs import named
from pallas_kernels.mosaic import decode_attention as mosaic
from pallas_kernels.paged_decode_attention import paged_decode_attention
from pallas_kernels.selected_decode_attention import selected_decode_attention
from tests import aot, aot_mosaic

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures("fully_optimized"),
  pytest.mark.skipif(aot_mosaic.why_not() is not None, reason=str(aot_mosaic.why_not())),
]
SHARED = 233_472  # bytes of a processor; each program takes 1,024 besides its own
REGISTERS = 65_536
THREADS = 128
# Every head size, page size and dtype once; nothing in the kernel depends on the rest.
NAMES = ("llama-3.1-8b", "llama-3.1-8b-pages-64", "mistral-7b-v0.2", "opt-2.7b", "smollm2-135m")
NAMES += ("phi-3-mini", "gemma-2-9b")
INT8 = ("llama-3.1-8b", "opt-2.7b", "smollm2-135m")


def _args(shape, int8, dense):
  array = jax.ShapeDtypeStruct
  dtype = "int8" if int8 else shape.dtype
  pool = array((shape.num_pages, shape.page_size, shape.head_dim), dtype)
  rows = (shape.batch, shape.kv_heads)
  q = array((*rows, shape.groups, shape.head_dim), shape.dtype)
  scales = (array(pool.shape[:1], "float32"),) * 2 if int8 else None
  if dense:
    return (
      q,
      pool,
      pool,
      array((*rows, shape.pages_per_row), "int32"),
      array(rows[:1], "int32"),
      scales,
    )
  pages = array((*rows, shape.pages_selected), "int32")
  return q, pool, pool, pages, array((*pages.shape, shape.page_size), "bool"), scales


def _kernel(parts, shape, int8, **choices):
  dense = parts is mosaic.paged_parts
  lowered = aot.lower_for_h100(partial(parts, **choices), *_args(shape, int8, dense))
  (kernel,) = aot_mosaic.mosaic_kernels(lowered)
  print(f"{shape.name}: {kernel.registers} registers, {kernel.shared_bytes} bytes shared")
  assert kernel.spill_bytes == 0
  assert "Performance Loss" not in kernel.log  # wgmma that waits for each product
  return kernel


@pytest.mark.parametrize("dense", [False, True], ids=["selected", "dense"])
@pytest.mark.parametrize(
  ("name", "int8"),
  [*((name, False) for name in NAMES), *((name, True) for name in INT8)],
)
def test_two_programs_run_on_a_processor(name, int8, dense):
  """With one they would take turns to wait and to compute. A head of 256 leaves room for one."""
  shape = named(name)
  programs = 1 if shape.head_dim == 256 else 2
  parts = mosaic.paged_parts if dense else mosaic.selected_parts
  kernel = _kernel(parts, shape, int8, splits=2)  # a ring that is filled again
  assert programs * (kernel.shared_bytes + 1024) <= SHARED
  assert programs * THREADS * kernel.registers <= REGISTERS


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("dense", [False, True], ids=["selected", "dense"])
def test_pools_are_written_in_place_and_read_where_they_are(dense, int8):
  """A token is appended to donated pools and attended to, as in a decode step."""
  shape = named("llama-3.1-8b")
  attend = paged_decode_attention if dense else selected_decode_attention

  def step(q, keys, values, pages, which, scales):
    at = pages[:, :, 0]
    keys, values = (pool.at[at, 0].set(jnp.ones((), pool.dtype)) for pool in (keys, values))
    return attend(q, keys, values, pages, which, scales=scales), keys, values

  args = _args(shape, int8, dense)
  with dispatch.recording() as chosen:
    compiled = aot.compile_for_h100(step, *args, donate_argnums=(1, 2))
  assert chosen == {attend.__name__: "mosaic"}
  pool_bytes = args[1].size * args[1].dtype.itemsize
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes == 2 * pool_bytes
  assert memory.temp_size_in_bytes < pool_bytes // 10
  assert not aot.big_copies(compiled.as_text(), pool_bytes // 20)
