"""Mosaic kernels that move pages: interpreted on a CPU, and as compiled for an H100."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arg_specs import SHAPES, Shape, small
from pallas_kernels.gather_pages import gather_pages, gather_pages_reference
from pallas_kernels.recall_pages import offload_pages, recall_pages, recall_pages_reference
from pallas_kernels.scatter_pages import (
  append_kv,
  append_kv_reference,
  scatter_pages,
  scatter_pages_reference,
)
from tests import aot, aot_mosaic
from tests.pallas_kernels import test_recall_pages as recalls
from tests.pallas_kernels.attention_cases import differing

FORMS = {"xla": {}, "mosaic": {"implementation": "mosaic", "interpret": True}}
B, K, P = 2, 2, 3
NAMES = [shape.name for shape in SHAPES]
# On a CPU all have two rows of two heads, and pages are moved alike whoever asks for them.
PAGES = differing(SHAPES, "page_size", "head_dim", "dtype")
TOKENS = differing(SHAPES, "head_dim", "dtype")
# A thread holds no more than 64 bytes of a pool's page, and two pools move at a time.
REGISTERS = 72


def pools(shape: Shape, seed: int, pages: int, c: int | None = None):
  return recalls.pools(seed, pages, c or shape.page_size, shape.head_dim, shape.dtype)


def jitted(f, form: str):
  return jax.jit(lambda *args: f(*args, **FORMS[form]))


@pytest.mark.parametrize(
  ("shape", "c"),
  [*((shape, None) for shape in PAGES), *((shape, 1) for shape in TOKENS)],
  ids=lambda one: getattr(one, "name", "tokens" if one else "pages"),
)
def test_recall(shape, c):
  there, here = pools(shape, 0, 9, c), pools(shape, 1, 7, c)
  recall = jitted(recall_pages, "mosaic")
  for count in (0, 4, recalls.MOVES + 9):
    args = (there, here, recalls.SOURCE, recalls.TARGET, jnp.int32(count))
    recalls.same(recall(*args), recall_pages_reference(*args))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [small(shape) for shape in PAGES], ids=lambda shape: shape.name)
def test_gather_scatter_and_append(shape, form):
  """Each over a table with places without a page."""
  n, c, d = 13, shape.page_size, shape.head_dim
  old = pools(shape, 0, n)
  table = jnp.asarray(np.random.default_rng(2).permutation(n)[: B * K * P], jnp.int32)
  table = table.reshape(B, K, P).at[1, 0, 2].set(n)
  found = jitted(gather_pages, form)(old[0], table)
  recalls.same([found], [gather_pages_reference(old[0], table)])

  new = tuple(x.reshape(B, K, P, c, d) for x in recalls.pools(1, B * K * P, c, d, "float32"))
  args = (old, table, new)
  recalls.same(jitted(scatter_pages, form)(*args), scatter_pages_reference(*args))

  slots = jnp.asarray([[0, 2 * c - 1], [2 * c + 3, c]], jnp.int32)
  token = tuple(x[:, :, 0, 0] for x in new)
  args = (old, table, slots, token)
  append, expected = jitted(append_kv, form), append_kv_reference(*args)
  recalls.same(append(*args), expected)
  beyond = (old, table, slots + P * c, token)
  recalls.same(append(*beyond), old)


def test_nothing_to_move():
  old = recalls.pools(0, 5, 8, 64, "float32")
  none = jnp.zeros((2, 0), jnp.int32)
  for form in FORMS.values():
    assert gather_pages(old[0], none, **form).shape == (2, 0, 8, 64)
    recalls.same(scatter_pages(old, none, (jnp.zeros((2, 0, 8, 64)),) * 2, **form), old)
    recalls.same(recall_pages(old, old, none[0], none[0], jnp.int32(0), **form), old)
  recalls.same(offload_pages(old, old, none[0], none[0], jnp.int32(0)), old)


def test_large_pages_are_cut():
  """Of 64 KiB, which no program can hold in registers."""
  there, here = recalls.pools(0, 9, 64, 256, "float32"), recalls.pools(1, 7, 64, 256, "float32")
  args = (there, here, recalls.SOURCE, recalls.TARGET, jnp.int32(2))
  recalls.same(jitted(recall_pages, "mosaic")(*args), recall_pages_reference(*args))


def test_what_is_refused():
  old = recalls.pools(0, 5, 8, 64, "float32")
  table, slots, token = (
    jnp.zeros((2, 2, 3), jnp.int32),
    jnp.zeros((2, 2), jnp.int32),
    jnp.ones((2, 2, 64)),
  )

  def refused(text, f, *args, **kw):
    with pytest.raises(ValueError, match=text):
      f(*args, **kw)

  refused("pool .* has 2 axes", gather_pages, old[0][0], table)
  refused("5 is out of range, expected 0 to 4", gather_pages, old[0], table + 5)
  refused("6 is out of range", scatter_pages, old, jnp.full(5, 6, jnp.int32), old)
  refused(r"ids \(2, 2, 3\)", scatter_pages, old, table, old)
  refused(
    "keys float32.* and values bfloat16",
    scatter_pages,
    (old[0], old[1].astype("bfloat16")),
    table,
    old,
  )
  refused("ids are int16", gather_pages, old[0], table.astype("int16"))
  refused(r"slots \(2,\)", append_kv, old, table, slots[0], (token, token))
  refused(r"key \(2, 2, 32\)", append_kv, old, table, slots, (token[..., :32],) * 2)
  refused("no NVIDIA GPU", append_kv, old, table, slots, (token,) * 2, implementation="mosaic")


h100 = pytest.mark.skipif(aot_mosaic.why_not() is not None, reason=str(aot_mosaic.why_not()))


def mosaic_alone(f):
  return lambda *args: f(*args, implementation="mosaic")


def h100_report(f, *args, donate=()):
  """The memory and the program's text, once its kernels, of which all are one, are good."""
  lowered = aot.lower_for_h100(f, *args, donate_argnums=donate)
  kernel, *others = aot_mosaic.mosaic_kernels(lowered)
  assert all(other == kernel for other in others)
  compiled = aot.compile_lowered(lowered)
  memory = compiled.memory_analysis()
  print(kernel[:4], memory)
  assert kernel.spill_bytes == 0 and kernel.registers <= REGISTERS and kernel.shared_bytes < 4096
  return memory, compiled.as_text()


@pytest.mark.slow
@h100
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("c", [None, 1], ids=["pages", "tokens"])
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_recall_on_an_h100(shape, c):
  """Launches that read pinned memory and write the device's pools: nothing is copied."""
  page = (c or shape.page_size, shape.head_dim)
  host = (aot.on_host((4096, *page), shape.dtype),) * 2
  device = (jax.ShapeDtypeStruct((1024, *page), shape.dtype),) * 2
  ids, count = jax.ShapeDtypeStruct((512,), "int32"), jax.ShapeDtypeStruct((), "int32")
  memory, text = h100_report(recall_pages, host, device, ids, ids, count, donate=(1,))
  pool_bytes = 1024 * page[0] * page[1] * jnp.dtype(shape.dtype).itemsize
  calls = [line for line in text.splitlines() if " custom-call(" in line]
  assert memory.host_temp_size_in_bytes == 0
  assert memory.temp_size_in_bytes < 1024  # the count, and where a call finds its arguments
  assert memory.alias_size_in_bytes == 2 * pool_bytes
  assert not aot.big_copies(text, 1024)
  assert len(calls) == text.count(" call-start(") == 2  # on a stream of their own
  assert all("mosaic_gpu" in call for call in calls) and text.count("S(5)") >= 2


@pytest.mark.slow
@h100
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("order", [recalls.append_first, recalls.barrier])
def test_order_of_recall_and_append_on_an_h100(order):
  args = recalls.shapes()
  compiled = aot.compile_for_h100(order, *args, donate_argnums=(0, 1))
  memory, text = compiled.memory_analysis(), compiled.as_text()
  assert not aot.big_copies(text, recalls.POOL_BYTES // 8)
  assert (
    memory.host_temp_size_in_bytes == 0 and memory.temp_size_in_bytes < recalls.POOL_BYTES // 16
  )
  assert memory.host_alias_size_in_bytes == 2 * recalls.POOL_BYTES
  assert memory.alias_size_in_bytes == 2 * recalls.POOL_BYTES


@pytest.mark.slow
@h100
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_gather_scatter_and_append_on_an_h100(shape):
  struct = jax.ShapeDtypeStruct
  page = (shape.page_size, shape.head_dim)
  pool = struct((2048, *page), shape.dtype)
  pool_bytes = pool.size * pool.dtype.itemsize
  ids = struct((4, shape.kv_heads, 8), "int32")
  slots, new = struct(ids.shape[:2], "int32"), struct((*ids.shape, *page), shape.dtype)
  token = struct((*ids.shape[:2], page[1]), shape.dtype)
  h100_report(mosaic_alone(gather_pages), pool, ids)
  for f, *args in ((scatter_pages, ids, (new, new)), (append_kv, ids, slots, (token, token))):
    memory, text = h100_report(mosaic_alone(f), (pool, pool), *args, donate=(0,))
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    assert memory.temp_size_in_bytes < 1 << 16 and not aot.big_copies(text, 1 << 16)


@pytest.mark.slow
@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.usefixtures("fully_optimized")
def test_why_xla_is_chosen_on_an_h100():
  """Its gather is one kernel, its scatter one a pool, in place."""
  struct = jax.ShapeDtypeStruct
  pool, ids = struct((2048, 16, 128), "bfloat16"), struct((4, 8, 8), "int32")
  new, token = struct((*ids.shape, 16, 128), "bfloat16"), struct((4, 8, 128), "bfloat16")
  text = aot.compile_for_h100(gather_pages, pool, ids).as_text()
  assert text.count(" fusion(") == 1 and "custom-call" not in text
  for f, *args in (
    (scatter_pages, ids, (new, new)),
    (append_kv, ids, struct((4, 8), "int32"), (token, token)),
  ):
    compiled = aot.compile_for_h100(f, (pool, pool), *args, donate_argnums=(0,))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert text.count(" fusion(") == 2 and "custom-call" not in text
    assert memory.alias_size_in_bytes == 2 * pool.size * 2 and memory.temp_size_in_bytes < 1024
