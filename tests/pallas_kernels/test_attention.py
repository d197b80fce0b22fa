"""Every attention against its reference, on every path that a platform may take."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import contiguous_decode_attention as contiguous
from pallas_kernels import selected_decode_attention as selected
from pallas_kernels import softmax
from pallas_kernels.prefill_attention import (
  PastBlocks,
  first_block,
  prefill_attention,
  prefill_attention_reference,
)

# What one rounding of scores, weights and output may cost.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
HEADS = ((1, 1), (2, 1), (2, 2), (1, 4), (2, 8))  # K, G
C, M = 16, 4
LENGTHS = (0, 1, 3 * C - 1, 3 * C, 3 * C + 1, M * C)


def _close(found, expected, dtype):
  assert found.dtype == expected.dtype == jnp.dtype(dtype)
  found, expected = (np.asarray(x, np.float32) for x in (found, expected))
  np.testing.assert_allclose(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def _normal(seed, shape, dtype):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _poisoned(unused, x, poison):
  """x with poison where nothing may be read; by numpy, which compiles nothing."""
  return jnp.asarray(np.where(unused, np.float64(poison), np.asarray(x, np.float64)), x.dtype)


def _jitted(op):
  """Compiled anew: jit remembers by function, and would not see a patched path."""
  return jax.jit(lambda *args: op(*args))


def _elsewhere(monkeypatch):
  """platform_dependent takes the branch of a platform that has none of its own."""
  monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))


def _segmented(x, axis, sizes):
  return tuple(map(jnp.asarray, np.split(np.asarray(x), np.cumsum(sizes)[:-1], axis=axis)))


def _contiguous_case(heads, d, dtype, poison, sizes=(16, 16, 32)):
  (k, g), b, total = heads, len(LENGTHS), sum(sizes)
  q = _normal(0, (b, k, g, d), dtype)
  keys, values = _normal(1, (b, k, d, total), dtype), _normal(2, (b, k, total, d), dtype)
  unused = np.arange(total)[None] >= np.asarray(LENGTHS)[:, None]
  keys = _poisoned(unused[:, None, None], keys, poison)
  values = _poisoned(unused[:, None, :, None], values, poison)
  return q, _segmented(keys, 3, sizes), _segmented(values, 2, sizes), jnp.asarray(LENGTHS)


@pytest.mark.parametrize("path", ["cpu", "default"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_contiguous_decode(heads, dtype, path, monkeypatch):
  if path == "default":
    _elsewhere(monkeypatch)
  reference = _jitted(contiguous.contiguous_decode_attention_reference)
  for d in (16, 128) if heads == (2, 2) else (64,):
    attend = _jitted(contiguous.contiguous_decode_attention)
    for poison in (0.0, jnp.nan, jnp.inf, -jnp.inf):
      case = _contiguous_case(heads, d, dtype, poison)
      expected = reference(*case)
      _close(attend(*case), expected, dtype)
      assert not np.asarray(expected[0], np.float32).any()  # no keys: zeros


@pytest.mark.parametrize("block", [8, 24, 512])
def test_contiguous_decode_whatever_the_block(block, monkeypatch):
  """Also where the last block of a segment begins earlier than its place, to fit."""
  monkeypatch.setattr(contiguous, "_CAREFUL_BLOCK", block)
  _elsewhere(monkeypatch)
  case = _contiguous_case((2, 2), 16, "float32", jnp.nan, (20, 12, 30, 2))
  expected = contiguous.contiguous_decode_attention_reference(*case)
  _close(contiguous.contiguous_decode_attention(*case), expected, "float32")


def test_contiguous_decode_against_numpy():
  """The reference itself, in f64 and one query at a time."""
  q, keys, values, lengths = _contiguous_case((2, 2), 16, "float32", jnp.nan)
  found = contiguous.contiguous_decode_attention_reference(q, keys, values, lengths)
  keys, values = np.concatenate(keys, axis=3), np.concatenate(values, axis=2)
  for b, k, g in np.ndindex(*q.shape[:3]):
    n = LENGTHS[b]
    scores = np.asarray(q[b, k, g], np.float64) @ keys[b, k, :, :n] / 4
    weights = np.exp(scores - scores.max(initial=0))
    expected = weights @ values[b, k, :n] / max(weights.sum(), 1e-9)
    np.testing.assert_allclose(found[b, k, g], expected, atol=1e-6)


@pytest.mark.usefixtures("fully_optimized")
def test_a_segment_that_no_row_reaches_is_not_read():
  """Outside loops the compiled program multiplies with the first segment alone."""
  case = _contiguous_case((2, 2), 16, "float32", 0.0)
  hlo = _jitted(contiguous.contiguous_decode_attention).lower(*case).compile().as_text()
  entry = hlo[hlo.index("ENTRY") :]
  assert entry.count(" conditional(") >= 2  # the other two segments
  assert _products(hlo, entry) == 2  # q.k and p.v of the first one
  assert _products(hlo, hlo) >= 6


def _products(hlo: str, body: str) -> int:
  """Products in a computation and in what it calls, loops left out."""
  count = len(re.findall(r" dot\(|matmul", body))
  for line in body.splitlines():
    for name in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line):
      inner = re.search(rf"^%?{re.escape(name)} \(.*?^}}", hlo, re.MULTILINE | re.DOTALL)
      count += _products(hlo, inner[0]) if inner and body != hlo else 0
  return count


def _selected_case(heads, d, dtype, poison, page_size=C):
  """Pages are a random permutation of the pool; unused slots and unowned pages are poisoned."""
  (k, g), b = heads, len(LENGTHS)
  rng = np.random.default_rng(3)
  num_pages = b * k * M + 5
  pages = rng.permutation(num_pages)[: b * k * M].reshape(b, k, M)
  lengths = np.asarray(LENGTHS) * page_size // C
  slots = np.arange(M * page_size).reshape(M, page_size)
  mask = np.broadcast_to(slots < lengths[:, None, None, None], (b, k, M, page_size)).copy()
  mask &= rng.random(mask.shape) < 0.9  # holes too
  used = np.zeros((num_pages, page_size, 1), bool)
  used[pages] = mask[..., None]
  pools = (_normal(seed, (num_pages, page_size, d), dtype) for seed in (4, 5))
  keys, values = (_poisoned(~used, pool, poison) for pool in pools)
  pages = np.where(mask.any(axis=-1), pages, rng.choice([-7, num_pages, 10**6], pages.shape))
  q = _normal(6, (b, k, g, d), dtype)
  return q, keys, values, jnp.asarray(pages, jnp.int32), jnp.asarray(mask)


@pytest.mark.parametrize("path", ["cpu", "default"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_selected_decode(heads, dtype, path, monkeypatch):
  if path == "default":
    _elsewhere(monkeypatch)
  reference = _jitted(selected.selected_decode_attention_reference)
  for d in (16, 128) if heads == (2, 2) else (64,):
    attend = _jitted(selected.selected_decode_attention)
    for poison in (0.0, jnp.nan, jnp.inf, -jnp.inf):
      case = _selected_case(heads, d, dtype, poison)
      expected = reference(*case)
      _close(attend(*case), expected, dtype)
      assert not np.asarray(expected[0], np.float32).any()


@pytest.mark.parametrize("page_size", [8, 64])
def test_selected_decode_of_other_pages_and_with_turned_keys(page_size):
  case = _selected_case((2, 4), 16, "float32", jnp.nan, page_size)

  def turn(keys):  # f[B, K, M, C, D]; depends on the slot, as a rotation does
    angle = jnp.arange(M * page_size, dtype=jnp.float32).reshape(1, 1, M, page_size, 1)
    return keys * jnp.cos(angle) + jnp.roll(keys, 8, axis=4) * jnp.sin(angle)

  found = selected.selected_decode_attention(*case, turn=turn)
  expected = selected.selected_decode_attention_reference(*case, turn=turn)
  _close(found, expected, "float32")
  assert np.abs(found - selected.selected_decode_attention(*case)).max() > 0.01


def test_selected_over_all_pages_equals_contiguous():
  q, keys, values, lengths = _contiguous_case((2, 4), 16, "float32", jnp.nan)
  keys, values = jnp.concatenate(keys, axis=3).swapaxes(2, 3), jnp.concatenate(values, axis=2)
  b, k, total, d = keys.shape
  pages = jnp.arange(b * k * total // C, dtype=jnp.int32).reshape(b, k, -1)
  mask = jnp.arange(total)[None] < lengths[:, None]
  mask = jnp.broadcast_to(mask.reshape(b, 1, -1, C), (*pages.shape, C))
  keys, values = keys.reshape(-1, C, d), values.reshape(-1, C, d)
  found = selected.selected_decode_attention(q, keys, values, pages, mask)
  case = _contiguous_case((2, 4), 16, "float32", jnp.nan)
  _close(found, contiguous.contiguous_decode_attention_reference(*case), "float32")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("blocks", [(0,), (3,), (2, 1)], ids=str)
def test_prefill(heads, blocks, dtype):
  (k, g), b, s, t = heads, 2, 24, 8
  d = {1: 16, 2: 128}.get(g, 64)
  q = _normal(0, (b, s, k * g, d), dtype)
  new, old = (
    tuple(_normal(seed + i, (b, n, k, d), dtype) for i in range(2))
    for seed, n in ((1, s), (3, sum(blocks) * t))
  )
  past, at = [], 0
  for count in blocks:
    span = np.asarray(old)[:, :, at * t : (at + count) * t]
    rest = np.full((2, b, 2 * t, k, d), np.nan, span.dtype)  # blocks beyond the count are not read
    held = jnp.asarray(np.concatenate([span, rest], axis=2))

    def read(i, held=held):
      keys, values = jax.lax.dynamic_slice_in_dim(held, i * t, t, axis=2)
      return keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)

    past.append(PastBlocks(0, jnp.int32(count), read))
    at += count
  found = jax.jit(lambda q, k, v: prefill_attention(q, k, v, past))(q, *new)
  _close(found, _jitted(prefill_attention_reference)(q, *new, *old), dtype)


def test_prefill_sees_no_later_token():
  q, k, v = (_normal(i, (1, 8, 2, 16), "float32") for i in range(3))
  before = prefill_attention(q, k, v, [])
  after = prefill_attention(q, k.at[:, 5:].set(9.0), v.at[:, 5:].set(9.0), [])
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert np.abs(before[:, 5:] - after[:, 5:]).min() > 0


@pytest.mark.parametrize("window", [1, 7, 8, 9, 20, 24, 100])
def test_prefill_through_a_window(window):
  s, t = 8, 8
  q, k, v = (_normal(i, (2, s, 4, 16), "float32") for i in range(3))
  old = _normal(3, (2, 2, 3 * t, 4, 16), "float32")
  first = first_block(jnp.int32(3 * t), t, window)
  assert (first + 1) * t > 3 * t - window + 1 >= first * t or first == 0
  unread = jnp.arange(3 * t) < first * t
  held = jnp.where(unread[None, None, :, None, None], jnp.nan, old)

  def read(i):
    keys, values = jax.lax.dynamic_slice_in_dim(held, i * t, t, axis=2)
    return keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)

  blocks = PastBlocks(first, jnp.int32(3), read)
  found = prefill_attention(q, k, v, [blocks], start=jnp.int32(3 * t), window=window)
  _close(found, prefill_attention_reference(q, k, v, *old, window=window), "float32")


@pytest.mark.parametrize("window", [1, 5, 16, 24])
@pytest.mark.parametrize("form", [contiguous._by_segments, contiguous._by_blocks])
def test_contiguous_through_a_window_over_a_ring(window, form):
  slots, lengths = 24, jnp.array([0, 3, 23, 24, 25, 47, 48, 100])
  q, k, v = _normal(0, (8, 2, 3, 16), "float32"), *_normal(1, (2, 8, 2, 100, 16), "float32")
  # Each token in its slot, the newest of a slot wins; the reference sees the tokens in order.
  position = lengths[:, None] - 1 - (lengths[:, None] - 1 - jnp.arange(slots)[None]) % slots
  ring = [jnp.take_along_axis(x, position.clip(0)[:, None, :, None], axis=2) for x in (k, v)]
  unused = (position < 0) | (position < lengths[:, None] - window)
  ring = [jnp.where(unused[:, None, :, None], jnp.nan, x) for x in ring]
  found = form(q * 16**-0.5, [ring[0].swapaxes(2, 3)], [ring[1]], lengths, window)
  visible = jnp.arange(100)[None] >= lengths[:, None] - window
  visible &= jnp.arange(100)[None] < lengths[:, None]
  scores = jnp.einsum("bkgd,bktd->bkgt", q, k) / 4
  weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e9), axis=-1)
  expected = jnp.einsum("bkgt,bktd->bkgd", weights, v)
  expected = jnp.where((lengths > 0)[:, None, None, None], expected, 0.0)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_parts_merge_in_any_cut():
  scores = _normal(0, (1, 2, 3, 10), "float32") * 30.0
  scores, values = scores.at[..., 7:].set(softmax.NEG), _normal(1, (1, 2, 10, 4), "float32")
  whole = softmax.normalise(softmax.parts_of(scores, values), jnp.ones((), bool))
  weights = jax.nn.softmax(scores, axis=-1)
  np.testing.assert_allclose(whole, jnp.einsum("bkrt,bktd->bkrd", weights, values), atol=1e-6)
  for cuts in ([3], [0], [7], [1, 5, 9]):
    parts = softmax.empty_parts((1, 2, 3, 4))
    for low, high in zip([0, *cuts], [*cuts, 10], strict=True):
      if low < high:
        piece = softmax.parts_of(scores[..., low:high], values[:, :, low:high])
        parts = softmax.merge_parts(parts, piece)
    np.testing.assert_allclose(softmax.normalise(parts, jnp.ones((), bool)), whole, atol=1e-6)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"keys": (jnp.zeros((2, 1, 16, 9)),)}, "do not fit q"),
    ({"lengths": jnp.zeros(3, jnp.int32)}, r"lengths \(3,\) does not fit q"),
  ],
)
def test_contiguous_shapes_that_are_refused(change, message):
  args = {"keys": (jnp.zeros((2, 1, 16, 8)),), "lengths": jnp.zeros(2, jnp.int32)} | change
  values = (jnp.zeros((2, 1, 8, 16)),)
  with pytest.raises(ValueError, match=message):
    contiguous.contiguous_decode_attention(
      jnp.zeros((2, 1, 4, 16)), args["keys"], values, args["lengths"]
    )


def test_other_shapes_that_are_refused():
  keys, values = jnp.zeros((6, 8, 16)), jnp.zeros((6, 8, 16))
  pages = jnp.zeros((2, 1, 3), jnp.int32)
  mask, q = jnp.ones((2, 1, 3, 8), bool), jnp.zeros((2, 1, 4, 16))
  attend = selected.selected_decode_attention
  with pytest.raises(ValueError, match="do not fit q"):
    attend(q, keys, values[:, :4], pages, mask)
  with pytest.raises(ValueError, match="expected \\[B, K, M\\] and \\[B, K, M, C\\]"):
    attend(q, keys, values, pages, mask[..., :4])
  with pytest.raises(ValueError, match="do not fit together"):
    prefill_attention(*(jnp.zeros((1, 8, heads, 16)) for heads in (3, 2, 2)), [])
