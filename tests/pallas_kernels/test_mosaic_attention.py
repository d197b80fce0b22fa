"""The Hopper kernel of paged attention, interpreted on a CPU, against the references."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arg_specs import SHAPES, named, small
from pallas_kernels.mosaic import decode_attention as mosaic
from pallas_kernels.paged_decode_attention import (
  paged_decode_attention,
  paged_decode_attention_reference,
)
from pallas_kernels.selected_decode_attention import (
  selected_decode_attention,
  selected_decode_attention_reference,
)
from pallas_kernels.softmax import NEG, merge_parts, output
from tests.pallas_kernels import attention_cases as cases

TAKEN = tuple(small(shape) for shape in SHAPES if shape.dtype != "float32")
LLAMA, OPT = small(named("llama-3.1-8b")), small(named("opt-2.7b"))
MOSAIC = {"implementation": "mosaic", "interpret": True}
by_name = {"ids": lambda shape: getattr(shape, "name", None)}


def _check(op, reference, args, scales):
  found = cases.traced(op, **MOSAIC)(*args, scales=scales)
  assert found.dtype == args[0].dtype
  cases.close(found, *cases.expected_of(reference, *args, scales=scales))
  return found


@pytest.mark.parametrize("shape", TAKEN, **by_name)
def test_selected_pages_of_every_shape(shape):
  args, scales = cases.selected(shape)
  out = _check(selected_decode_attention, selected_decode_attention_reference, args, scales)
  assert not out[0, 0].any()  # nothing was selected


# One of every head size, page size and dtype, and of the largest group.
@pytest.mark.parametrize(
  "shape", [s for s in TAKEN if s.name[:4] not in ("qwen", "yi-9")], **by_name
)
def test_whole_tables_of_every_shape(shape):
  args, scales = cases.paged(shape, (0, 1, 100, 192))
  out = _check(paged_decode_attention, paged_decode_attention_reference, args, scales)
  assert not out[0].any()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "opt-2.7b", "smollm2-135m"])
def test_int8_pages(name):
  shape = small(named(name))
  args, scales = cases.selected(shape, int8=True)
  _check(selected_decode_attention, selected_decode_attention_reference, args, scales)
  args, scales = cases.paged(shape, (64, 77), int8=True)
  _check(paged_decode_attention, paged_decode_attention_reference, args, scales)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy: inf * 0
@pytest.mark.parametrize("poison", [jnp.inf, -jnp.inf])
def test_other_numbers_in_unused_slots(poison):
  args, scales = cases.selected(LLAMA, poison=poison)
  _check(selected_decode_attention, selected_decode_attention_reference, args, scales)


@pytest.mark.parametrize("pool", [1, 2], ids=["keys", "values"])
def test_what_is_not_a_number_in_a_used_slot_stays_visible(pool):
  """Also beside a split that is all right."""
  args, _ = cases.paged(OPT, (130,))
  args = [*args]
  args[pool] = args[pool].at[args[3][0, 0, 0], 0].set(jnp.nan)
  out = output(mosaic.paged_parts(*args, splits=2, interpret=True))
  assert np.isnan(out[0, 0]).all() and np.isfinite(out[0, 1]).all()


@pytest.mark.parametrize(("splits", "stages"), [(1, 1), (1, 3), (2, 2), (5, 1)])
def test_splits_and_stages_change_nothing(splits, stages):
  """Also where a split has no tiles, and rows have fewer than there are splits."""
  args, _ = cases.paged(OPT, (0, 130, 256))
  parts = mosaic.paged_parts(*args, splits=splits, stages=stages, interpret=True)
  expected = cases.expected_of(paged_decode_attention_reference, *args)
  cases.close(output(parts).astype(args[0].dtype), *expected)
  assert (np.asarray(parts.m[0]) == NEG).all()
  assert not parts.l[0].any()


def test_parts_merge_with_parts_over_other_pages():
  args, _ = cases.selected(LLAMA)
  q, keys, values, pages, mask = args
  expected = cases.expected_of(selected_decode_attention_reference, *args)
  run = lambda at: mosaic.selected_parts(  # noqa: E731
    q, keys, values, pages[:, :, at], mask[:, :, at], interpret=True
  )
  parts = merge_parts(run(slice(0, 5)), run(slice(5, None)))
  cases.close(output(parts).astype(q.dtype), *expected)


@pytest.mark.parametrize("lists", [1, 8, 24, 64, 256, 4096])
@pytest.mark.parametrize("tiles", [0, 1, 16, 512])
def test_few_lists_are_split_until_all_processors_read(lists, tiles):
  splits = mosaic.choose_splits(lists, tiles)
  assert 1 <= splits <= max(tiles, 1)
  if tiles == 16 and lists >= 256:
    assert splits == 1
  if tiles == 512:
    assert lists * splits > 132


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"head_dim": 48}, "head size 48 is none of"),
    ({"page_size": 24}, "page size 24 is none of"),
    ({"groups": 65}, "65 query heads a KV head are more than 64"),
    ({"dtype": "float32"}, "multiplies f32"),
    ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn, expected bfloat16 or float16"),
  ],
  ids=str,
)
def test_what_it_does_not_take_is_refused(changed, message):
  shape = LLAMA._replace(pages_selected=1, **changed)
  args, _ = cases.selected(shape)
  with pytest.raises(ValueError, match=message):
    selected_decode_attention(*args, **MOSAIC)


@pytest.mark.parametrize(
  ("keywords", "message"),
  [({"turn": lambda keys: keys}, "has no turn"), ({"slots": 0}, "not single slots")],
  ids=("turn", "slots"),
)
def test_single_slots_and_turned_keys_are_refused(keywords, message):
  args, _ = cases.selected(LLAMA)
  if "slots" in keywords:
    keywords, args = {"slots": jnp.zeros_like(args[3])}, (*args[:4], args[4][..., :1])
  with pytest.raises(ValueError, match=message):
    selected_decode_attention(*args, **keywords, **MOSAIC)
