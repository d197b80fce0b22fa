"""The Mosaic kernels under jax's race detector: what is overwritten before all have read it.

It knows that a copy by TMA and a plain load of shared memory need a fence between them. The plain
interpreter finishes every copy at once and would show none of this.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arg_specs import named, small
from pallas_kernels.gather_pages import gather_pages, gather_pages_reference
from pallas_kernels.mosaic import decode_attention, move_pages
from pallas_kernels.page_bounds import append_bounds, bounds_of_pages
from pallas_kernels.page_scores import page_scores
from pallas_kernels.project_qkv_to_pages import project_qkv_to_pages
from tests.pallas_kernels import attention_cases as cases
from tests.pallas_kernels import test_project_qkv_to_pages as projections

MOSAIC = {"implementation": "mosaic", "interpret": True}
LLAMA = small(named("llama-3.1-8b"))._replace(batch=1)


@pytest.fixture
def raced(monkeypatch, capfd, caplog):
  """A function that says whether a call of an interpreted kernel raced."""
  params = plgpu.InterpretGPUParams
  options = {"detect_races": True}
  if "on_race" in {field.name for field in dataclasses.fields(params)}:
    options["on_race"] = "warn"  # and go on, as older jax does
  monkeypatch.setattr(plgpu, "InterpretGPUParams", partial(params, **options))

  def run(call, *args, **keywords) -> bool:
    jax.block_until_ready(call(*args, **keywords))
    return "RACE DETECTED" in caplog.text + capfd.readouterr().out  # newer jax; older jax

  return run


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("kind", ["selected", "paged"])
def test_attention(kind, int8, raced):
  """A ring of two tiles that is filled again."""
  if kind == "selected":
    args, scales = cases.selected(LLAMA, int8=int8)
    parts = decode_attention.selected_parts
  else:
    args, scales = cases.paged(LLAMA, (180,), int8=int8)
    parts = decode_attention.paged_parts
  assert not raced(parts, *args, scales, splits=1, stages=2, interpret=True)


def test_projection(raced):
  """More tiles than the ring holds."""
  shape = projections.SMALL["smollm2-135m"]._replace(embed_dim=64 * 11, kv_heads=1)
  args, options = projections._case(shape, (2, 2))
  assert not raced(project_qkv_to_pages, *args, **options, **MOSAIC)


def test_scores_and_bounds(raced):
  q, digests = jnp.ones((1, 1, 4, 64), "bfloat16"), jnp.ones((1, 1, 2, 128, 64), "bfloat16")
  assert not raced(page_scores, q, [digests], jnp.int32(128), group="max", **MOSAIC)
  ids = jnp.asarray([3, 1], jnp.int32)
  assert not raced(bounds_of_pages, jnp.ones((5, 16, 64)), ids, ids * 0 + 9, **MOSAIC)
  old, key = jnp.ones((2, 2, 128, 8)), jnp.ones((2, 2, 64))
  assert not raced(append_bounds, old, key, ids, ids > 1, **MOSAIC)


@pytest.mark.parametrize("c", [16, 1], ids=["pages", "tokens"])
def test_one_program_moves_many_pages(c, monkeypatch, raced):
  """Tokens of few numbers all go through the same shared memory."""
  monkeypatch.setattr(move_pages, "PROGRAMS", 2)
  pool = jnp.asarray(np.random.default_rng(0).standard_normal((9, c, 64)), "float32")
  ids = jnp.asarray([3, 1, 8, 0, 5], jnp.int32)
  assert not raced(gather_pages, pool, ids, **MOSAIC)
  expected = gather_pages_reference(pool, ids)
  np.testing.assert_array_equal(gather_pages(pool, ids, **MOSAIC), expected)


def test_the_detector_sees_a_missing_fence(raced):
  """Or the tests above could not fail."""

  def body(x, out, tile, arrived):
    for _ in range(2):
      plgpu.copy_gmem_to_smem(x, tile, arrived)
      plgpu.barrier_wait(arrived)
      out[...] = tile[...]

  run = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
    interpret=plgpu.InterpretGPUParams(),
  )
  assert raced(run, jnp.ones(128))
