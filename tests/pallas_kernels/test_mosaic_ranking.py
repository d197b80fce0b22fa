"""Mosaic kernels for bounds and scores of pages: interpreted on a CPU, and compiled for an H100."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arg_specs import SHAPES
from pallas_kernels.page_bounds import append_bounds, bounds_of_pages, page_bounds_reference
from pallas_kernels.page_scores import (
  GROUPS,
  PANEL,
  page_products,
  page_scores,
  page_scores_reference,
)
from tests import aot, aot_mosaic
from tests.pallas_kernels.attention_cases import differing
from tests.panels import in_panels

FORMS = {"xla": {}, "mosaic": {"implementation": "mosaic", "interpret": True}}
NAMES = [shape.name for shape in SHAPES]
B, K, P = 2, 2, 128
# Products of two bf16 or f16 numbers are exact in f32, so only the order of the sums differs: of at
# most 512 terms, a few units in the last of 24 bits.
RELATIVE = 2e-6
COMBINED = {"none": lambda x: x, "max": lambda x: x.max(axis=2), "mean": lambda x: x.mean(axis=2)}
COMBINED |= {"sum": lambda x: x.sum(axis=2)}


def normal(seed, shape, dtype):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def some_bounds(shape, dtype):
  """Maxima above minima, f[B, K, 2*D, P]."""
  lower, upper = np.sort(np.random.default_rng(1).standard_normal((2, *shape)), axis=0)
  return jnp.asarray(np.concatenate([upper, lower], axis=2), dtype)


@jax.jit
def scores_by_hand(q, bounds):
  """f32[B, K, G, P], of bounds f[B, K, 2*D, P]."""
  return page_scores_reference(q, bounds.swapaxes(2, 3))


def half(shape):
  """The dtype of the shape, or bf16 where it is one that the tensor core does not take."""
  return "bfloat16" if shape.dtype == "float32" else shape.dtype


def exact(x):
  return np.asarray(x, np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
  "shape", differing(SHAPES, "page_size", "head_dim", "dtype"), ids=lambda shape: shape.name
)
def test_bounds_of_pages(shape, form):
  """Slots that do not count hold NaN."""
  c, d = shape.page_size, shape.head_dim
  used = jnp.asarray([[1, c], [c - 1, min(c, 9)]], jnp.int32)
  ids = jnp.asarray([[3, 0], [4, 1]], jnp.int32)
  keys = np.array(normal(0, (5, c, d), shape.dtype))
  for page, count in zip(np.ravel(ids), np.ravel(used), strict=True):
    keys[page, count:] = np.nan
  pool = jnp.asarray(keys)
  found = jax.jit(lambda *args: bounds_of_pages(*args, **FORMS[form]))(pool, ids, used)
  found, ids, used = map(np.asarray, (found, ids, used))
  assert found.dtype == pool.dtype and found.shape == (2, 2, 2 * d)
  for at in np.ndindex(2, 2):
    expected = page_bounds_reference(keys[ids[at]], np.arange(c) < used[at])
    np.testing.assert_array_equal(exact(found[at]), exact(expected))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bounds_after_one_more_key(d, dtype, form):
  """Rows: a new page (over NaN), an old one, the last one, and two without a place."""
  place = jnp.asarray([3, 0, 6, 7, -1], jnp.int32)
  first = jnp.asarray([True, False, False, True, False])
  before, key = np.array(normal(0, (5, 2, 2 * d, 7), dtype)), normal(1, (5, 2, d), dtype)
  before[0, :, :, 3] = np.nan
  old = jnp.asarray(before)
  found = jax.jit(lambda *args: append_bounds(*args, **FORMS[form]))(old, key, place, first)
  expected, new = exact(old).copy(), exact(key)
  expected[0, :, :, 3] = np.concatenate([new[0], new[0]], axis=-1)
  for row, page in ((1, 0), (2, 6)):
    highest, lowest = expected[row, :, :d, page], expected[row, :, d:, page]
    expected[row, :, :d, page] = np.maximum(highest, new[row])
    expected[row, :, d:, page] = np.minimum(lowest, new[row])
  assert found.dtype == old.dtype
  np.testing.assert_array_equal(exact(found), expected)


# Sums are combined as means are, so that a few shapes are enough for both.
CASES = [(shape, group) for shape in SHAPES for group in ("none", "max")]
CASES += [(shape, group) for shape in SHAPES[-1:] for group in ("mean", "sum")]
CASE_NAMES = [f"{shape.name}-{group}" for shape, group in CASES]
SMALL = differing(SHAPES, "groups", "head_dim", "dtype")  # of two rows of two heads, whatever pages


@pytest.mark.parametrize(
  ("shape", "group"),
  [case for case in CASES if case[0] in SMALL],
  ids=lambda one: getattr(one, "name", one),
)
def test_scores(shape, group):
  """Segments of 64 pages, of which the second is not reached by a row of 60 pages."""
  q = normal(0, (B, K, shape.groups, shape.head_dim), half(shape))
  whole = some_bounds((B, K, shape.head_dim, P), half(shape))
  expected = COMBINED[group](np.asarray(scores_by_hand(q, whole)))
  segments = tuple(in_panels(jnp.asarray(x)) for x in np.split(np.asarray(whole), 2, axis=-1))
  tolerance = RELATIVE * np.abs(expected).max()
  score = jax.jit(lambda *args: page_scores(*args, group=group, **FORMS["mosaic"]))
  for num_pages, read in ((65, P), (60, 64)):
    found = np.asarray(score(q, segments, jnp.int32(num_pages)))
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found[..., :read], expected[..., :read], rtol=0, atol=tolerance)
    assert np.isneginf(found[..., read:]).all()


@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_xla(group):
  q, whole = normal(0, (B, K, 3, 16), "float32"), some_bounds((B, K, 16, 12), "float32")
  expected = COMBINED[group](scores_by_hand(q, whole))
  found = page_scores(q, (in_panels(whole),), jnp.int32(12), group=group)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("z", [80, 144])
def test_digests_of_other_sizes(z):
  """Of odd multiples of 16 numbers."""
  queries, digests = normal(0, (1, 1, 9, z), "bfloat16"), normal(1, (1, 1, z, 64), "bfloat16")
  expected = jnp.einsum("bkgz,bkzp->bkgp", *(x.astype(jnp.float32) for x in (queries, digests)))
  found = page_products(queries, (in_panels(digests),), jnp.int32(64), **FORMS["mosaic"])
  np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * np.abs(expected).max())


def test_what_is_refused():
  q, bounds, n = (
    jnp.ones((2, 2, 3, 16), "bfloat16"),
    jnp.ones((2, 2, 32, 64), "bfloat16"),
    jnp.int32(1),
  )
  panels = in_panels(bounds)
  pool, ids = jnp.ones((5, 8, 64)), jnp.zeros(3, jnp.int32)
  key, place, first = jnp.ones((2, 2, 16)), jnp.zeros(2, jnp.int32), jnp.zeros(2, bool)

  def refused(text, f, *args, **kw):
    with pytest.raises(ValueError, match=text):
      f(*args, **kw)

  mosaic = FORMS["mosaic"]
  refused("unknown group 'best', expected one of none", page_scores, q, (panels,), n, group="best")
  refused(r"digests \(2, 2, 1, 30, 64\)", page_scores, q, (panels[..., :30, :],), n)
  refused(
    r"scales \[\(2, 2, 1, 64\)\]",
    page_products,
    q,
    (jnp.ones((2, 2, 1, 16, 64), "int8"),),
    n,
    (jnp.ones((2, 2, 1, 64)),),
  )
  refused("digests are float32", page_scores, q, (panels.astype("float32"),), n, **mosaic)
  refused("panels of 30 pages, expected 64", page_scores, q, (panels[..., :30],), n, **mosaic)
  refused("no NVIDIA GPU", page_scores, q, (panels,), n, implementation="mosaic")
  refused("there are only xla, mosaic", page_scores, q, (panels,), n, implementation="triton")
  refused(r"ids \(3,\) and used \(2,\)", bounds_of_pages, pool, ids, ids[:2])
  refused("5 is out of range, expected 0 to 4", bounds_of_pages, pool, ids + 5, ids)
  refused("4 slots, expected a multiple of 8", bounds_of_pages, pool[:, :4], ids, ids, **mosaic)
  refused(r"key \(2, 2, 8\)", append_bounds, bounds, key[..., :8], place, first)
  refused("32 numbers of a page's bounds", append_bounds, bounds, key, place, first, **mosaic)


@pytest.mark.parametrize("group", ["none", "max"])
def test_int8_digests_stay_with_xla(group):
  """None chooses what can do it."""
  queries, digests = normal(0, (1, 1, 2, 16), "float32"), jnp.ones((1, 1, 1, 16, 64), "int8")
  scales = (jnp.ones((1, 1, 1, 1, 64)),)
  found = page_products(queries, (digests,), jnp.int32(64), scales, group=group)
  assert found.shape == ((1, 1, 2, 64) if group == "none" else (1, 1, 64))


h100 = pytest.mark.skipif(aot_mosaic.why_not() is not None, reason=str(aot_mosaic.why_not()))
struct = jax.ShapeDtypeStruct


def h100_report(f, *args, registers: int, donate=()):
  """Memory of a program with one kernel, which spills nothing and has at most so many registers."""
  lowered = aot.lower_for_h100(f, *args, donate_argnums=donate)
  (kernel,) = aot_mosaic.mosaic_kernels(lowered)
  compiled = aot.compile_lowered(lowered)
  memory = compiled.memory_analysis()
  print(kernel[:4], memory)
  assert kernel.spill_bytes == 0 and kernel.registers <= registers
  assert kernel.shared_bytes < 227 << 10 and "Performance Loss" not in kernel.log
  assert not aot.big_copies(compiled.as_text(), 1 << 20)
  return memory


@pytest.mark.slow
@h100
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize(("shape", "group"), CASES, ids=CASE_NAMES)
def test_scores_on_an_h100(shape, group):
  """Of all pages of a context; None chooses the kernel where there is something to combine."""
  queries = struct((shape.batch, shape.kv_heads, shape.groups, shape.head_dim), half(shape))
  panels = -(-shape.pages_per_row // PANEL)
  digests = struct((*queries.shape[:2], panels, 2 * shape.head_dim, PANEL), half(shape))
  implementation = "mosaic" if group == "none" else None

  def f(q, digests, n):
    return page_scores(q, (digests,), n, group=group, implementation=implementation)

  h100_report(f, queries, digests, struct((), "int32"), registers=48)


@pytest.mark.slow
@h100
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_bounds_on_an_h100(shape):
  pool = struct((4096, shape.page_size, shape.head_dim), shape.dtype)
  ids = struct((4, shape.kv_heads, 8), "int32")

  def of_pages(pool, ids, used):
    return bounds_of_pages(pool, ids, used, implementation="mosaic")

  def append(*args):
    return append_bounds(*args, implementation="mosaic")

  h100_report(of_pages, pool, ids, ids, registers=176)
  if shape.head_dim % 64:
    return
  bounds = struct((4, shape.kv_heads, 2 * shape.head_dim, 1024), shape.dtype)
  key, place = struct((4, shape.kv_heads, shape.head_dim), shape.dtype), struct((4,), "int32")
  memory = h100_report(append, bounds, key, place, struct((4,), bool), registers=32, donate=(0,))
  assert memory.alias_size_in_bytes == bounds.size * bounds.dtype.itemsize
  assert memory.temp_size_in_bytes < 1 << 18


@pytest.mark.slow
@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.usefixtures("fully_optimized")
def test_what_xla_does_on_an_h100():
  """Why it is chosen for bounds, and for scores only where there is nothing to combine."""
  pool, ids = struct((4096, 16, 128), "bfloat16"), struct((4, 8, 1024), "int32")
  compiled = aot.compile_for_h100(bounds_of_pages, pool, ids, ids)
  pages = ids.size * 16 * 128 * 2
  assert compiled.memory_analysis().temp_size_in_bytes <= pages // 8  # no copy of the pages

  bounds, key, place = (
    struct((4, 8, 256, 1024), "bfloat16"),
    struct((4, 8, 128), "bfloat16"),
    struct((4,), "int32"),
  )
  compiled = aot.compile_for_h100(
    append_bounds, bounds, key, place, struct((4,), bool), donate_argnums=(0,)
  )
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes == bounds.size * 2 and memory.temp_size_in_bytes < 1 << 16

  def score(q, bounds, n, group):
    return page_scores(q, (bounds,), n, group=group, implementation="xla")

  panels = struct((4, 8, 1024 // PANEL, 256, PANEL), "bfloat16")
  args = (struct((4, 8, 4, 128), "bfloat16"), panels, struct((), "int32"))
  products = 4 * 8 * 4 * 1024 * 4
  for group in ("none", "max"):  # products of panels are put in order, or combined
    compiled = aot.compile_for_h100(score, *args, group, static_argnums=(3,))
    memory = compiled.memory_analysis()
    assert products <= memory.temp_size_in_bytes <= products + (1 << 17)
