"""The tools that look at GPU code without a GPU see what is there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests import aot, aot_mosaic

pytestmark = [
  pytest.mark.slow,  # compiles for a GPU
  pytest.mark.usefixtures("fully_optimized"),
  pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not())),
]
NUMBERS = jax.ShapeDtypeStruct((128, 128), jnp.float32)
needs_c = pytest.mark.skipif(aot_mosaic.why_not() is not None, reason=str(aot_mosaic.why_not()))


def _through_shared_memory(x):
  def body(x_ref, out_ref, held):
    held[...] = x_ref[...]
    plgpu.commit_smem()
    out_ref[...] = jnp.exp(held[...])

  return plgpu.kernel(body, out_type=NUMBERS, scratch_types=[plgpu.SMEM((128, 128), jnp.float32)])(
    x
  )


@needs_c
def test_mosaic_kernels_are_compiled_and_measured():
  lowered = aot.lower_for_h100(lambda x: _through_shared_memory(x) + 1, NUMBERS)
  (kernel,) = aot_mosaic.mosaic_kernels(lowered)
  assert "ex2.approx" in kernel.ptx and ".target sm_90a" in kernel.ptx
  assert 32 <= kernel.registers <= 255 and kernel.spill_bytes == 0
  assert 128 * 128 * 4 <= kernel.shared_bytes <= 128 * 128 * 4 + 1024


@needs_c
def test_spills_are_seen():
  """A thread cannot hold its part of these rows, 512 numbers, until it knows their maxima."""

  def body(x_ref, out_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    out_ref[...] = x - lax.broadcast_in_dim(x.max(axis=1), x.shape, [0])

  wide = jax.ShapeDtypeStruct((128, 512), jnp.float32)
  lowered = aot.lower_for_h100(lambda x: plgpu.kernel(body, out_type=wide)(x), wide)
  (kernel,) = aot_mosaic.mosaic_kernels(lowered)
  assert kernel.registers == 255 and kernel.spill_bytes > 1000


def test_kernels_of_xla_are_measured():
  lowered = aot.lower_for_h100(lambda x: jnp.exp(x) * 2, NUMBERS)
  (kernel,) = aot_mosaic.xla_kernels(lowered)
  assert 0 < kernel.registers <= 64 and kernel.spill_bytes == 0
  assert not aot_mosaic.mosaic_kernels(lowered)


def test_an_argument_in_host_memory_stays_there():
  def append(pool, x):
    return pool.at[3].set(x)

  pool, row = aot.on_host((1024, 128), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32)
  compiled = aot.compile_for_h100(append, pool, row, donate_argnums=(0,))
  memory = compiled.memory_analysis()
  assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == 1024 * 128 * 4
  assert "S(5)" in compiled.as_text()
  on_device = aot.compile_for_h100(append, jax.ShapeDtypeStruct(pool.shape, pool.dtype), row)
  assert on_device.memory_analysis().host_argument_size_in_bytes == 0
