"""Paged attention by XLA on every path of a platform: whole tables, int8 pages, parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode_attention as paged
from pallas_kernels import selected_decode_attention as selected
from pallas_kernels.arg_specs import named, small
from pallas_kernels.softmax import NEG, merge_parts, output
from tests.pallas_kernels import attention_cases as cases

F32, BF16 = small(named("opt-350m-f32")), small(named("llama-3.1-8b"))
LENGTHS = (0, 1, 100, 256)


@pytest.fixture(params=["cpu", "default"])
def path(request, monkeypatch):
  if request.param == "default":
    elsewhere = lambda *args, default, **_: default(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)


def _check(op, reference, args, scales):
  found = cases.traced(op)(*args, scales=scales)
  step = 0.0 if args[0].dtype == jnp.float32 else 2**-8
  expected, magnitudes = cases.expected_of(reference, *args, scales=scales)
  # XLA rounds the scaled queries as well, which moves scores of about 1 by a rounding step.
  cases.close(found, expected, magnitudes * 4 if step else magnitudes)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("int8", [False, True], ids=["floats", "int8"])
@pytest.mark.parametrize("shape", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("block", [64, 512])
def test_whole_tables(shape, int8, block, monkeypatch):
  """Also in blocks of which the last begins earlier than its place, to fit."""
  monkeypatch.setattr(paged, "_BLOCK", block)
  args, scales = cases.paged(shape._replace(context_tokens=272), LENGTHS, int8=int8)
  op, reference = paged.paged_decode_attention, paged.paged_decode_attention_reference
  _check(op, reference, args, scales)
  assert not op(*args, scales=scales)[0].any()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", [F32, BF16], ids=["f32", "bf16"])
def test_selected_int8_pages(shape):
  args, scales = cases.selected(shape, int8=True)
  op, reference = selected.selected_decode_attention, selected.selected_decode_attention_reference
  _check(op, reference, args, scales)


@pytest.mark.parametrize("scaled", [False, True])
def test_int8_pages_hold_numbers_divided_by_their_scale(scaled):
  """The references themselves, against pages of floats that are multiplied out."""
  args, scales = cases.selected(F32, int8=True, poison=0.0)
  q, keys, values, pages, mask = args
  k, v = (
    x.astype(jnp.float32) * s[:, None, None] for x, s in zip((keys, values), scales, strict=True)
  )
  if not scaled:
    k = k * 2
  plain = selected.selected_decode_attention_reference(q, k, v, pages, mask)
  found = selected.selected_decode_attention_reference(*args, scales=scales)
  assert np.allclose(found, plain, atol=1e-5) == scaled


@pytest.mark.usefixtures("path")
def test_parts_merge_and_say_what_is_empty():
  args, _ = cases.selected(F32)
  q, keys, values, pages, mask = args
  run = jax.jit(lambda at: selected.selected_decode_parts(q, keys, values, *at))
  halves = [(pages[:, :, at], mask[:, :, at]) for at in (slice(0, 5), slice(5, 10))]
  parts = merge_parts(*map(run, halves))
  reference = selected.selected_decode_attention_reference
  cases.close(output(parts), *cases.expected_of(reference, *args))
  for x, empty in zip(parts, (NEG, 0, 0), strict=True):
    assert (np.asarray(x[0, 0]) == np.float32(empty)).all()
  dense, _ = cases.paged(F32, LENGTHS)
  parts = paged.paged_decode_parts(*dense)
  assert (np.asarray(parts.m[0]) == np.float32(NEG)).all()
  assert not parts.l[0].any()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"table": (4, 2)}, r"table \(4, 2\) and lengths \(4,\) do not fit q \(4, 2, 1, 64\)"),
    ({"table": (4, 3, 16)}, r"table \(4, 3, 16\)"),
    ({"lengths": (3,)}, r"lengths \(3,\) do not fit"),
    ({"values": (133, 16, 32)}, r"pools \(133, 16, 64\) and \(133, 16, 32\) do not fit q"),
    ({"keys": (133, 2, 16, 64)}, r"pools \(133, 2, 16, 64\)"),
  ],
  ids=str,
)
def test_what_does_not_fit_is_refused(change, message):
  args, _ = cases.paged(F32, LENGTHS)
  args = dict(zip(("q", "keys", "values", "table", "lengths"), args, strict=True))
  for name, shape in change.items():
    args[name] = jnp.zeros(shape, args[name].dtype)
  with pytest.raises(ValueError, match=message):
    paged.paged_decode_attention(**args)


def test_scales_come_with_int8_and_only_then():
  args, scales = cases.paged(F32, LENGTHS, int8=True)
  with pytest.raises(ValueError, match="pools of int8 with no scales"):
    paged.paged_decode_attention(*args)
  with pytest.raises(ValueError, match=r"scales \(3,\) do not fit pools \(133, 16, 64\)"):
    paged.paged_decode_attention(*args, scales=(scales[0], scales[1][:3]))
  args, _ = cases.paged(F32, LENGTHS)
  with pytest.raises(ValueError, match="pools of float32 with scales"):
    paged.paged_decode_attention(*args, scales=scales)
  with pytest.raises(ValueError, match="keys are float32 and values bfloat16"):
    paged.paged_decode_attention(*args[:2], args[2].astype("bfloat16"), *args[3:])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("pool", [1, 2], ids=["keys", "values"])
def test_what_is_not_a_number_in_a_used_slot_stays_visible(pool):
  """Zeros would say that there were no keys."""
  args, _ = cases.selected(F32)
  args = [*args]
  args[pool] = args[pool].at[args[3][-1, -1, 0], 0].set(jnp.nan)
  out = selected.selected_decode_attention(*args)
  assert np.isnan(out[-1, -1]).all() and np.isfinite(out[0]).all()
  args, _ = cases.paged(F32, LENGTHS)
  args = [*args]
  args[pool] = args[pool].at[args[3][-1, -1, 0], 0].set(jnp.nan)
  out = paged.paged_decode_attention(*args)
  assert np.isnan(out[-1, -1]).all() and np.isfinite(out[0]).all()
