"""Ids out of range, known and traced, empty batches and lists, and wrong dtypes and ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_bounds, page_scores
from pallas_kernels import page_copies as copies
from pallas_kernels import paged_decode_attention as paged
from pallas_kernels import recall_pages as recall
from pallas_kernels import scatter_pages as scatter
from pallas_kernels import selected_decode_attention as selected
from pallas_kernels.gather_pages import gather_pages, gather_pages_reference
from pallas_kernels.project_qkv_to_pages import project_qkv_to_pages
from tests.pallas_kernels.test_recall_pages import same, to_host

N, C, D = 6, 8, 64
FORMS = {"xla": {}, "mosaic": {"implementation": "mosaic", "interpret": True}}
WILD = jnp.asarray([-1, -3, N, 10**9, 2, -(2**31)], jnp.int32)


def _pool(seed=0, dtype="float32"):
  return jnp.asarray(np.random.default_rng(seed).standard_normal((N, C, D)), dtype)


def _traced(f, form="xla"):
  return jax.jit(lambda *args: f(*args, **FORMS[form]))


def _attention(b=1, m=3, dtype="float32"):
  q = jnp.ones((b, 1, 2, D), dtype)
  pages = jnp.arange(b * m, dtype=jnp.int32).reshape(b, 1, m)
  return q, _pool(1, dtype), _pool(2, dtype), pages, jnp.ones((b, 1, m, C), bool)


@pytest.mark.parametrize("form", FORMS)
def test_traced_ids_out_of_range_are_read_nearby(form):
  """Negative ones too, which numpy would count from the end."""
  pool, used = _pool(), jnp.full(WILD.shape, C)
  expected = gather_pages_reference(pool, WILD)
  np.testing.assert_array_equal(_traced(gather_pages, form)(pool, WILD), expected)
  limits = jnp.concatenate([expected.max(axis=1), expected.min(axis=1)], axis=-1)
  np.testing.assert_array_equal(
    _traced(page_bounds.bounds_of_pages, form)(pool, WILD, used), limits
  )
  if form == "xla":
    for path in (copies.copies_of_pages, copies._as_they_are):
      np.testing.assert_array_equal(jax.jit(path)(pool, WILD), expected)


@pytest.mark.parametrize("form", FORMS)
def test_traced_ids_out_of_range_are_not_written(form):
  pools, new = (_pool(), _pool(1)), (_pool(2), _pool(3))
  args = (pools, WILD, new)
  found = _traced(scatter.scatter_pages, form)(*args)
  same(found, scatter.scatter_pages_reference(*args))
  same([x[:2] for x in found], [x[:2] for x in pools])
  token = tuple(x[:, :1] for x in new)  # f[6, 1, D]: six rows of one head
  table = WILD.reshape(6, 1, 1)
  for slots in (jnp.full((6, 1), 3), jnp.full((6, 1), -1), jnp.full((6, 1), C)):
    args = (pools, table, slots.astype(jnp.int32), token)
    found = _traced(scatter.append_kv, form)(*args)
    same(found, scatter.append_kv_reference(*args))


def test_which_pairs_count_is_unknown_where_the_count_is_traced():
  """The ids are known, and those that do not count may be anything."""
  pools, ids = (_pool(), _pool(1)), jnp.asarray([4, -7, N], jnp.int32)
  one = jnp.int32(1)
  found = jax.jit(lambda host, n: recall.recall_pages(host, pools[::-1], ids, ids, n))
  same([x[4] for x in found(to_host(pools), one)], [x[4] for x in pools])
  found = jax.jit(lambda host, n: recall.offload_pages(pools, host, ids, ids, n))
  same([x[4] for x in found(to_host(pools[::-1]), one)], [x[4] for x in pools])
  same(recall.recall_pages(pools, pools, ids, ids, jnp.int32(-1)), pools)


def test_offload_by_scatter_is_the_same_as_by_a_loop():
  """What a GPU does, against pages moved one by one."""
  pools, into = (_pool(), _pool(1)), (_pool(2), _pool(3))
  source, target = jnp.asarray([5, 0, 3], jnp.int32), jnp.asarray([1, 4, -1], jnp.int32)
  found = jax.jit(recall._offload_by_scatter)(pools, into, source, target, jnp.int32(2))
  same(found, recall.recall_pages_reference(pools, into, source, target, 2))


@pytest.mark.parametrize("form", FORMS)
def test_attention_over_nothing(form):
  q, keys, values, pages, mask = _attention(dtype="bfloat16")
  lengths, options = jnp.zeros(1, jnp.int32), FORMS[form]
  for out in (
    selected.selected_decode_attention(q, keys, values, pages[..., :0], mask[:, :, :0], **options),
    selected.selected_decode_attention(q, keys[:0], values[:0], pages, mask & False, **options),
    paged.paged_decode_attention(q, keys, values, pages[..., :0], lengths, **options),
  ):
    assert out.shape == q.shape and out.dtype == q.dtype and not out.any()
  none = (q[:0], keys, values, pages[:0])
  assert selected.selected_decode_attention(*none, mask[:0], **options).shape == (0, 1, 2, D)
  assert paged.paged_decode_attention(*none, lengths[:0], **options).shape == (0, 1, 2, D)


def test_operations_on_nothing_launch_no_kernel():
  """A launch of no programs is an error on a GPU, and None goes to XLA."""
  ids, options = jnp.zeros((2, 0), jnp.int32), FORMS["mosaic"]
  assert page_bounds.bounds_of_pages(_pool(), ids, ids, **options).shape == (2, 0, 2 * D)
  q, digests = jnp.ones((0, 1, 2, D), "bfloat16"), jnp.ones((0, 1, 1, 2 * D, 64), "bfloat16")
  scores = page_scores.page_scores(q, [digests], jnp.int32(1), group="max", interpret=True)
  assert scores.shape == (0, 1, 64)
  with pytest.raises(ValueError, match=r"digests \(0, 1, 1, 128, 64\) are empty"):
    page_scores.page_scores(q, [digests], jnp.int32(1), **options)
  x, weights = jnp.ones((0, 64), "bfloat16"), (jnp.ones((64, D), "bfloat16"),) * 3
  pools, places = (_pool(0, "bfloat16"),) * 2, jnp.zeros((0, 1), jnp.int32)
  out = project_qkv_to_pages(x, weights, *pools, places, places, interpret=True)
  assert out[0].shape == (0, 1, D)


def _refused(message, f, *args, **keywords):
  with pytest.raises(ValueError, match=message):
    f(*args, **keywords)


def test_known_ids_out_of_range_are_refused_where_they_are_read():
  q, keys, values, pages, mask = _attention()
  attend = selected.selected_decode_attention
  _refused("pages: 6 is out of range, expected 0 to 5", attend, q, keys, values, pages + 5, mask)
  _refused("pages: -1 is out of range", attend, q, keys, values, pages - 1, mask)
  attend(q, keys, values, pages - 1, mask.at[0, 0, 0].set(False))
  slots = {"slots": jnp.full_like(pages, C)}
  _refused("slots: 8 is out of .* 0 to 7", attend, q, keys, values, pages, mask[..., :1], **slots)
  attend, lengths = paged.paged_decode_attention, jnp.asarray([C + 1], jnp.int32)
  attend(q, keys, values, pages.at[0, 0, 2].set(-7), lengths)
  wild = pages.at[0, 0, 1].set(N)
  _refused("table: 6 is out of range, expected 0 to 5", attend, q, keys, values, wild, lengths)
  _refused("length 25 .* expected 0 to 24", attend, q, keys, values, pages, lengths + 16)
  _refused("length -1 does not fit", attend, q, keys, values, pages, lengths - 10)


def test_wrong_dtypes_and_ranks_are_refused():
  q, keys, values, pages, mask = _attention()
  attend = selected.selected_decode_attention
  _refused("ids are int8, expected int32", attend, q, keys, values, pages.astype("int8"), mask)
  _refused("mask is int32: expected bool", attend, q, keys, values, pages, mask.astype("int32"))
  _refused("q of int32: expected floats", attend, q.astype("int32"), keys, values, pages, mask)
  _refused(r"q \(\): expected q \[B, K", attend, q[0, 0, 0, 0], keys, values, pages, mask)
  ints = [x.astype("int16") for x in (keys, values)]
  _refused("pools of int16: expected floats, or int8", attend, q, *ints, pages, mask)
  ints, scales = [x.astype("int8") for x in (keys, values)], (jnp.ones(N, "bfloat16"),) * 2
  _refused("scales are bfloat16", attend, q, *ints, pages, mask, scales=scales)
  lengths = jnp.ones(1)
  _refused("lengths are float32", paged.paged_decode_attention, q, keys, values, pages, lengths)
  n = jnp.int32(1)
  _refused(r"queries \(1, 2, 64\) and 1 seg", page_scores.page_products, q[0], [keys[None]], n)
  _refused("and 0 segments", page_scores.page_products, q, [], n)
  _refused(r"bounds \(6, 8, 64\)", page_bounds.append_bounds, keys, q, lengths, lengths)
  _refused("3 pools, expected keys", scatter.scatter_pages, (keys,) * 3, pages, (keys,) * 2)
  x, weights, places = jnp.ones((1, 16)), (jnp.ones((16, D)),) * 3, jnp.zeros((1, 1), jnp.int32)
  args = x, weights, keys, values, places
  _refused("slots: 8 is out of range", project_qkv_to_pages, *args, places + C)
  _refused("pages are float32", project_qkv_to_pages, *args[:4], places.astype("float32"), places)
  _refused(r"pages \(1, 0\)", project_qkv_to_pages, *args[:4], places[:, :0], places[:, :0])
