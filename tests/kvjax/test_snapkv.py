"""SnapKV and PyramidKV by their papers: what stays of a prompt, and how much in each layer."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, cache_bytes, generate, make_policy, prepare
from kvjax.engine import steps
from kvjax.engine.generate import check_overflow, prefill
from kvjax.policies._attention import remember, ring_positions
from kvjax.types import Inputs
from models import build
from tests.kvjax import by_hand, matrix
from tests.kvjax.by_hand import Seen, softmax

K, G, D, L = 2, 4, 16, 3
MODEL, PARAMS = matrix.tiny_model(matrix.Shape(K, G, D))
PAGE, BUDGET, WINDOW, STEPS = 8, 24, 6, 12
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@cache
def _runner(name="snapkv", model=MODEL, capacity=192, batch=1, **options):
  options = {"budget_tokens": BUDGET, "window": WINDOW, "new_tokens": STEPS} | options
  policy = make_policy(name, page_size=PAGE, **options)
  return prepare(model, policy, "compact", CacheConfig(batch, capacity, PAGE), chunk_tokens=64)


def _kept(
  seen: Seen,
  head: int,
  capacity: int,
  *,
  window=WINDOW,
  kernel=5,
  pool="mean",
  group="mean",
  first=0,
) -> list[int]:
  """Positions that one KV head keeps of a prompt, loop by loop."""
  n = len(seen.q)
  if n <= capacity:
    return list(range(first, n))
  before, half = n - window, kernel // 2
  per_head = []
  for h in range(head * G, (head + 1) * G):
    received = np.zeros(before + 2 * half)  # zeros beyond both ends
    for p in range(before, n):
      scores = [seen.q[p][h] @ seen.k[j][head] / math.sqrt(D) for j in range(first, p + 1)]
      received[half + first : half + before] += softmax(scores)[: before - first]
    around = [received[j : j + kernel] for j in range(before)]
    per_head.append([sum(x) / kernel if pool == "mean" else max(x) for x in around])
  combined = np.mean(per_head, axis=0) if group == "mean" else np.max(per_head, axis=0)
  ranked = sorted(range(first, before), key=lambda j: (combined[j], j), reverse=True)
  return sorted(ranked[: capacity - window]) + list(range(before, n))


def _pyramid(n: int, layer: int, *, budget, window, beta=20, layers=L) -> int:
  """Tokens that a layer keeps of a prompt of n, as algorithms.md writes it down."""
  even = budget - window
  if n < budget:
    return n
  if n < 2 * even:
    return even + window
  top, bottom = even // beta, 2 * even - even // beta
  if bottom >= n - window:
    bottom = n - window
    top = 2 * even - bottom
  return bottom - layer * ((bottom - top) // (layers - 1)) + window


def _agree(runner, model, rows, lengths, keep, sight=None):
  """Logits of all steps, and what each head held at each, of keep(layer, seen, head)."""

  def rule(layer, seen, prompt):
    return [keep(layer, seen, head) for head in range(K)] if prompt else seen.held

  run = matrix.teacher_forced(runner, PARAMS, rows, lengths)
  assert not np.asarray(run.cache.overflow).any()
  for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
    logits, held = by_hand.logits_and_held(model, PARAMS, row, length, rule, sight)
    np.testing.assert_allclose(run.logits[:, b], logits, **TOLERANCE)
    for layer, step, head in np.ndindex(L, len(logits) - 1, K):
      found = np.flatnonzero(run.attended[layer][step, b, head * G])
      assert found.tolist() == held[layer][step][head], f"row {b}, layer {layer}, step {step}"
  return held


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"group": "max", "pool": "max", "kernel": 3},
    {"kernel": 1, "window": 1},
    {"window": 20, "budget_tokens": 21},
  ],
  ids=str,
)
def test_what_snapkv_keeps_is_what_the_paper_says(options):
  """A window over two chunks of the prompt, four query heads a KV head; all new tokens stay."""
  rows = matrix.tokens_of([70 + STEPS], seed=31)
  shared = {key: value for key, value in options.items() if key != "budget_tokens"}
  capacity = options.get("budget_tokens", BUDGET)

  def keep(layer, seen, head):
    return _kept(seen, head, capacity, **shared)

  held = _agree(_runner(**options), MODEL, rows, [70], keep)
  assert [len(heads[0]) for heads in held[0]] == [capacity + step + 1 for step in range(STEPS)]
  assert held[0][0][0] != held[0][0][1], "heads choose for themselves"


def test_what_pyramidkv_keeps_is_what_the_paper_says():
  """Short prompts, those cut alike in all layers, flatter pyramids, and the steepest."""
  lengths = [1, 23, 24, 25, 35, 36, 41, 42, 47, 48, 100]
  rows = matrix.tokens_of([length + 2 for length in lengths], seed=32)

  def keep(layer, seen, head):
    size = _pyramid(len(seen.q), layer, budget=BUDGET, window=WINDOW)
    return _kept(seen, head, size)

  _agree(_runner("pyramidkv", batch=len(rows)), MODEL, rows, lengths, keep)


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv"])
def test_under_a_window_of_the_model_only_what_is_in_sight_counts(name):
  sight = 40
  model = build(dataclasses.replace(MODEL.config, family="mistral", window_tokens=sight))
  rows = matrix.tokens_of([150 + STEPS], seed=33)
  sizes = [BUDGET] * L
  if name == "pyramidkv":
    sizes = [_pyramid(150, layer, budget=BUDGET, window=WINDOW) for layer in range(L)]

  def keep(layer, seen, head):
    return _kept(seen, head, sizes[layer], first=150 - sight)

  _agree(_runner(name, model), model, rows, [150], keep, sight)


def test_the_newest_queries_of_ragged_rows_come_in_several_chunks():
  """Every row's last five, wherever its chunks and padding begin; what was there before goes."""
  window, chunk, lengths = 5, 4, np.array([6, 4, 11, 1])
  q = np.random.default_rng(0).standard_normal((4, 12, 2, 3, 2)).astype(np.float32)
  ring = jnp.full((4, 2, window, 3, 2), jnp.nan)
  for start in range(0, 12, chunk):
    inputs = Inputs(**dict.fromkeys(Inputs._fields))._replace(
      lengths=jnp.asarray(lengths.clip(max=start + chunk)),
      positions=jnp.broadcast_to(start + jnp.arange(chunk), (4, chunk)),
    )
    ring = remember(ring, jnp.asarray(q[:, start : start + chunk]), inputs)
  at = np.asarray(ring_positions(ring, jnp.asarray(lengths)))
  for row, length in enumerate(lengths):
    wanted = range(max(0, length - window), length)
    assert sorted(p for p in at[row].tolist() if p >= 0) == list(wanted)
    for place, p in enumerate(at[row]):
      expected = q[row, p] if p >= 0 else np.full((2, 3, 2), np.nan)
      np.testing.assert_array_equal(ring[row, :, place], expected)


def test_the_pyramid_of_the_specification():
  """32 layers, a budget of 2,048, a window of 32: 3,932 tokens, 123 less a layer, 119 at last."""
  policy, n, rows = make_policy("pyramidkv"), 8192, 32
  positions = jnp.arange(n, dtype=jnp.int32)[None, None]
  keys = jax.random.normal(jax.random.key(0), (1, 1, n, 2))
  inputs = Inputs(0, 0, jnp.array([n]), jnp.array([0]), positions, lambda: keys)
  state = (jax.random.normal(jax.random.key(1), (1, 1, 32, 1, 2)),) * rows
  counts = [int(policy.keep(state, inputs._replace(row=row))[0].sum()) for row in (0, 1, 30, 31)]
  assert counts == [3932 + 32, 3809 + 32, 242 + 32, 119 + 32]
  sizes = [_pyramid(n, layer, budget=2048, window=32, layers=rows) for layer in range(rows)]
  assert [sizes[row] for row in (0, 1, 30, 31)] == counts
  assert abs(sum(sizes) - rows * 2048) <= rows * rows  # the steps are whole


def test_slots_of_each_layer():
  """Room for the prompt that needs the most, and for new tokens; never more than there is."""
  policy = make_policy("pyramidkv", budget_tokens=BUDGET, window=WINDOW, new_tokens=STEPS)
  for slots in (16, 40, 48, 192, 1000):
    for row in range(L):
      needed = [_pyramid(n, row, budget=BUDGET, window=WINDOW) for n in range(1, slots + 1)]
      expected = min(max(needed) + STEPS, slots)
      assert list(policy.keeps(row, L, K, slots)) == [expected] * K
  assert list(policy.keeps(0, 1, 2, 1000)) == [BUDGET + STEPS] * 2  # one layer has no pyramid


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv"])
def test_bytes_by_hand(name):
  """f32: the slots of each layer in whole pages, no state, and the bytes of dense fall."""
  batch, capacity = 3, 512
  runner = _runner(name, capacity=capacity, batch=batch)
  slots = [math.ceil(runner.policy.keeps(row, L, K, capacity)[0] / PAGE) * PAGE for row in range(L)]
  assert slots == ([40, 40, 40] if name == "snapkv" else [56, 40, 40])
  kept = runner.decode_bytes
  assert kept.keys_values == batch * K * sum(slots) * 2 * D * 4
  assert kept.metadata == batch * K * sum(slots) * 4
  dense = prepare(MODEL, make_policy("dense"), "resident", CacheConfig(batch, capacity, PAGE))
  assert kept.keys_values * L * capacity == dense.decode_bytes.keys_values * sum(slots)
  rings = L * batch * K * WINDOW * G * D * 4
  assert runner.prefill_bytes.metadata == rings
  assert cache_bytes(prefill(runner, PARAMS, [[1] * 300, [2], [3] * 64])[1]) == kept


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv"])
def test_a_row_that_makes_more_tokens_than_it_has_room_for_is_marked(name):
  """One row at a time: a short prompt leaves room, and rows do not know of each other."""
  runner = _runner(name, batch=2, new_tokens=4, budget_tokens=20)
  cache = prefill(runner, PARAMS, [[5] * 90, [6] * 10])[1]
  marks = []
  for _ in range(15):
    marks.append(np.asarray(cache.overflow).tolist())
    cache = steps.decode_step(runner, PARAMS, cache, jnp.array([1, 2]))[1]
  assert marks[:5] == [[0, 0]] * 5 and marks[5] == [1, 0]
  assert np.asarray(cache.overflow).tolist() == [1, 1]
  room = f"made more tokens than policy '{name}' has room for; raise its option new_tokens"
  with pytest.raises(RuntimeError, match=r"rows \[0, 1\] " + room):
    check_overflow(runner, cache)
  with pytest.raises(RuntimeError, match=r"rows \[0\] " + room):
    generate(runner, PARAMS, [[5] * 90, [6] * 10], max_new_tokens=6)
  assert len(generate(runner, PARAMS, [[5] * 90, [6] * 10], max_new_tokens=5).tokens[0]) == 5


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    (
      "snapkv",
      {"budget_tokens": 32},
      "snapkv needs a budget over its window.*budget_tokens 32 and",
    ),
    ("snapkv", {"window": 0}, "snapkv needs a budget over its window.*window 0"),
    ("snapkv", {"kernel": 4}, "snapkv kernel 4 must be odd"),
    ("snapkv", {"kernel": -1}, "snapkv kernel -1 must be odd and positive"),
    ("snapkv", {"pool": "avg"}, "snapkv pool 'avg' is not one of mean, max"),
    ("snapkv", {"group": "none"}, "snapkv group 'none' is not one of mean, max"),
    ("snapkv", {"new_tokens": 0}, "snapkv new_tokens 0 must be positive"),
    ("pyramidkv", {"budget_tokens": 16}, "pyramidkv needs a budget over its window"),
    ("pyramidkv", {"beta": 0}, "pyramidkv beta 0 must be at least 1"),
  ],
)
def test_options_that_are_refused(name, options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy(name, **options)
  assert "\n" not in str(caught.value)
