"""Keys and values that are projected into pages are those that two steps write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import paged
from models import blocks
from pallas_kernels import arg_specs
from pallas_kernels.mosaic import project_qkv_to_pages as mosaic
from pallas_kernels.project_qkv_to_pages import (
  project_qkv_to_pages,
  project_qkv_to_pages_reference,
)
from tests import aot, aot_mosaic

# Sums are f32 on both sides; their order may move what is rounded once to its neighbour.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
SMALL = {shape.name: arg_specs.small(shape) for shape in arg_specs.SHAPES}
PAGES = 16


def _case(shape, tokens, seed=0, extras=True):
  """Arguments and keywords; of the first pages one is above and one below what the pool has."""
  rng = np.random.default_rng(seed)

  def normal(*dims, dtype=shape.dtype, scale=1.0):
    return jnp.asarray(rng.standard_normal(dims) * scale, dtype)

  e, k, d, c = shape.embed_dim, shape.kv_heads, shape.head_dim, shape.page_size
  wide = (k * shape.groups * d, k * d, k * d)
  weights = tuple(normal(e, n, scale=e**-0.5) for n in wide)
  pools = [normal(PAGES, c, d) for _ in range(2)]
  places = rng.permutation(PAGES * c)[: np.prod(tokens) * k].reshape(*tokens, k)
  pages = (places // c).astype(np.int32)
  pages.flat[:2] = PAGES, -1
  angles = normal(*tokens, d // 2, dtype="float32", scale=100.0)
  biases = tuple(normal(n) for n in wide) if extras else None
  rotation = (jnp.cos(angles), jnp.sin(angles)) if extras else None
  args = normal(*tokens, e), weights, *pools, jnp.asarray(pages), jnp.asarray(places % c, jnp.int32)
  return args, {"biases": biases, "rotation": rotation}


def _close(found, expected, dtype):
  for x, y in zip(found, expected, strict=True):
    assert x.shape == y.shape and x.dtype == y.dtype == jnp.dtype(dtype)
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    np.testing.assert_allclose(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [(3,), (2, 5)], ids=str)
@pytest.mark.parametrize("extras", [True, False])
@pytest.mark.parametrize("name", ["smollm2-135m", "opt-2.7b", "opt-350m-f32"])
def test_xla_form(name, extras, tokens):
  args, options = _case(SMALL[name], tokens, extras=extras)
  expected = project_qkv_to_pages_reference(*args, **options)
  _close(jax.jit(project_qkv_to_pages)(*args, **options), expected, SMALL[name].dtype)


def test_equals_projection_and_append():
  """What models and the paged cache do in two steps, at one token a row."""
  shape = SMALL["opt-350m-f32"]
  (x, weights, keys, values, _, _), options = _case(shape, (3,))
  table = jnp.arange(3 * shape.kv_heads, dtype=jnp.int32).reshape(3, shape.kv_heads, 1)
  slots = jnp.full((3, shape.kv_heads), 5, jnp.int32)
  named = dict(zip("qkv", weights, strict=True))
  named |= {f"{n}_bias": b for n, b in zip("qkv", options["biases"], strict=True)}
  q, k, v = (
    blocks.linear(x, named, name).reshape(3, -1, shape.head_dim) for name in ("q", "k", "v")
  )
  cos, sin = (jnp.tile(t, 2)[:, None] for t in options["rotation"])

  def turn(y):
    first, second = jnp.split(y, 2, axis=-1)
    return y * cos + jnp.concatenate([-second, first], axis=-1) * sin

  pools = paged.append_token(paged.Pools(keys, values), table, slots, turn(k), v)
  found = project_qkv_to_pages(x, weights, keys, values, table[..., 0], slots, **options)
  _close(found, (turn(q), pools.keys, pools.values), "float32")


@pytest.mark.parametrize("name", [n for n, s in SMALL.items() if s.head_dim % 32 == 0])
def test_mosaic_kernel_interpreted(name):
  shape = SMALL[name]
  if shape.dtype == "float32":
    shape = shape._replace(dtype="float16")  # tensor cores round f32
  args, options = _case(shape, (5,), extras=name != "gemma-2-9b")
  found = project_qkv_to_pages(*args, **options, implementation="mosaic", interpret=True)
  _close(found, project_qkv_to_pages_reference(*args, **options), shape.dtype)


def test_more_tiles_than_the_ring_holds():
  shape = SMALL["smollm2-135m"]._replace(embed_dim=mosaic.TILE * (2 * mosaic.STAGES + 3))
  args, options = _case(shape, (2, 2))
  found = project_qkv_to_pages(*args, **options, implementation="mosaic", interpret=True)
  _close(found, project_qkv_to_pages_reference(*args, **options), shape.dtype)


@pytest.mark.parametrize(
  ("name", "tokens", "reason"),
  [
    ("opt-2.7b", (3,), "head size 80"),
    ("opt-350m-f32", (3,), "x and weights are float32"),
    ("smollm2-135m", (1, 65), "65 tokens"),
  ],
)
def test_what_the_kernel_refuses(name, tokens, reason):
  args, options = _case(SMALL[name]._replace(kv_heads=1), tokens)
  with pytest.raises(ValueError, match=reason):
    project_qkv_to_pages(*args, **options, implementation="mosaic", interpret=True)
  project_qkv_to_pages(*args, **options)


def test_shapes_that_are_refused():
  args, options = _case(SMALL["smollm2-135m"], (3,))
  x, weights, keys, values, pages, slots = args
  with pytest.raises(ValueError, match=r"x \(128,\)"):
    project_qkv_to_pages(x[0], *args[1:])
  with pytest.raises(ValueError, match=r"pages \(2, 2\) and slots \(3, 2\)"):
    project_qkv_to_pages(x, weights, keys, values, pages[:2], slots)
  with pytest.raises(ValueError, match=r"weights \[\(128, 384\), \(128, 64\), \(128, 128\)\]"):
    project_qkv_to_pages(x, (weights[0], weights[1][:, :64], weights[2]), *args[2:])
  with pytest.raises(ValueError, match=r"biases \[\(384,\), \(128,\)\] do not fit"):
    project_qkv_to_pages(*args, biases=options["biases"][:2])
  with pytest.raises(ValueError, match=r"rotation \[\(3, 16\), \(3, 32\)\]"):
    cos, sin = options["rotation"]
    project_qkv_to_pages(*args, rotation=(cos[:, :16], sin))


@pytest.mark.slow
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.skipif(aot_mosaic.why_not() is not None, reason=str(aot_mosaic.why_not()))
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "phi-3-mini", "gemma-2-9b"])
def test_compiles_for_h100_in_place(name):
  shape = arg_specs.named(name)
  pool_bytes = shape.num_pages * shape.page_size * shape.head_dim * 2

  def project(x, weights, keys, values, pages, slots, rotation):
    return project_qkv_to_pages(x, weights, keys, values, pages, slots, rotation=rotation)

  lowered = aot.lower_for_h100(project, *_structs(shape), donate_argnums=(2, 3))
  (kernel,) = aot_mosaic.mosaic_kernels(lowered)
  print(f"{name}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared memory")
  assert "wgmma" in kernel.ptx and "Performance Loss" not in kernel.log
  assert kernel.registers <= 128 and kernel.spill_bytes == 0
  assert kernel.shared_bytes <= 160 << 10
  compiled = aot.compile_lowered(lowered)
  assert compiled.memory_analysis().alias_size_in_bytes == 2 * pool_bytes
  assert not aot.big_copies(compiled.as_text(), 1 << 20)


def _structs(shape):
  b, k, d, e = shape.batch, shape.kv_heads, shape.head_dim, shape.embed_dim

  def struct(*dims, dtype=shape.dtype):
    return jax.ShapeDtypeStruct(dims, dtype)

  weights = tuple(struct(e, heads * d) for heads in (k * shape.groups, k, k))
  pools = [struct(shape.num_pages, shape.page_size, d)] * 2
  places = [struct(b, k, dtype="int32")] * 2
  return struct(b, e), weights, *pools, *places, (struct(b, d // 2, dtype="float32"),) * 2
