"""Models that see only a window (Mistral 7B v0.1): the same laws, and rings of slots.

The window is shorter than the prompts and no multiple of anything.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine import steps
from models import build
from tests.kvjax import masked, matrix
from tests.kvjax.matrix import LENGTHS, NUM_STEPS, PAGE, ROWS, SHAPES
from tests.models import naive

WINDOW, CHUNK = 50, 64
RING = 128  # of whole chunks: the window of the first token of a chunk, and the chunk
SHAPE = SHAPES[0]
FULL = 1024
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ENTRIES = matrix.entries()
HARSH = [entry for entry in ENTRIES if entry.setting == "harsh"]
THOROUGH = [entry for entry in HARSH if entry.policy in matrix.THOROUGH]
# The second setting of a policy sees the same window; on a host tier it may be the only one.
every_entry = pytest.mark.parametrize(
  "entry", [e for e in ENTRIES if e.setting == "harsh" or e.store in matrix.HOST], ids=str
)
every_harsh_entry = pytest.mark.parametrize("entry", HARSH, ids=str)


def model_of(entry, window: int | None = WINDOW):
  return tiny_model(matrix.model_of(entry, SHAPE)[0].config.num_layers, window)


@cache
def tiny_model(num_layers: int, window: int | None):
  model, params = matrix.tiny_model(SHAPE, num_layers)
  config = dataclasses.replace(model.config, family="mistral", window_tokens=window)
  return build(config), params


@cache
def runner_of(entry, *, window=WINDOW, capacity=160, chunk=CHUNK, budget=None, batch=4):
  options = matrix.SETTINGS[entry.policy][entry.setting]
  policy = make_policy(entry.policy, **options | ({"budget_tokens": budget} if budget else {}))
  config = CacheConfig(batch, capacity, PAGE)
  return prepare(model_of(entry, window)[0], policy, entry.store, config, chunk_tokens=chunk)


@cache
def base_run(entry) -> matrix.Run:
  return matrix.teacher_forced(runner_of(entry), model_of(entry)[1], ROWS, LENGTHS)


def windowed(masks, positions=None):
  """Masks bool[B, H, S, S] cut to the window, by distance of positions (queries, keys) if given."""
  total = masks[0].shape[-1]
  if positions is None:
    age = np.arange(total)[:, None] - np.arange(total)[None]
  else:
    age = (positions[0][..., None] - positions[1])[:, None]
  return [mask & (age < WINDOW) for mask in masks]


@every_entry
def test_masked_dense_attention_equals_the_method(entry):
  """The window hides what a policy selected beyond it, at the distances that attention sees."""
  model, params = model_of(entry)
  run, total = base_run(entry), max(map(len, ROWS))
  positions = masked.true_positions(len(LENGTHS), total)
  if runner_of(entry).policy.cache_positions is not None:
    (seen, *_) = run.attended.values()
    positions = masked.cache_positions(LENGTHS, total, seen[:, :, 0])
  visible = windowed(masked.visibility(model.config, LENGTHS, total, run.attended), positions)
  found = masked.logits(model, params, matrix.padded(ROWS), visible, *positions)
  np.testing.assert_allclose(run.logits, matrix.aligned(found, LENGTHS, NUM_STEPS), **TOLERANCE)


# That a store serves a full budget is a law of test_laws.py, and that it serves a window is the law
# above: here it is the policy that has to select everything in sight, on the first of its stores.
FIRST_STORES = list({entry.policy: entry for entry in reversed(HARSH)}.values())[::-1]


@pytest.mark.parametrize("entry", FIRST_STORES, ids=str)
def test_full_budget_equals_dense_within_the_window(entry):
  model, params = model_of(entry)
  runner = runner_of(entry, budget=FULL)
  run = matrix.teacher_forced(runner, params, ROWS, LENGTHS)
  total = max(map(len, ROWS))
  visible = windowed(masked.visibility(model.config, LENGTHS, total, {}))
  positions = masked.true_positions(len(LENGTHS), total)
  found = masked.logits(model, params, matrix.padded(ROWS), visible, *positions)
  np.testing.assert_allclose(run.logits, matrix.aligned(found, LENGTHS, NUM_STEPS), **TOLERANCE)
  long = np.array(LENGTHS) > WINDOW
  assert np.abs(run.logits - unbounded(model.config.num_layers))[:, long].max(axis=-1).min() > 1e-4


@cache
def unbounded(num_layers: int) -> np.ndarray:
  """Logits of the model without its window."""
  model, params = tiny_model(num_layers, None)
  return matrix.aligned(naive.logits(model, params, matrix.padded(ROWS)), LENGTHS, NUM_STEPS)


@pytest.mark.parametrize("entry", THOROUGH, ids=str)
def test_a_smaller_capacity_does_not_matter(entry):
  lengths = (100, 30, 110, 1)  # which fit the smallest capacity
  rows = [row[: length + NUM_STEPS] for row, length in zip(ROWS, lengths, strict=True)]
  runs = [
    matrix.teacher_forced(runner_of(entry, **options), model_of(entry)[1], rows, lengths).logits
    for options in ({}, {"capacity": 130})
  ]
  np.testing.assert_allclose(*runs, **TOLERANCE)


@every_harsh_entry
def test_a_row_alone_with_another_ring_and_capacity_equals_the_row_in_a_batch(entry):
  """All at once, as in test_laws.py: one row, in larger chunks and so a larger ring."""
  runner = runner_of(entry, batch=1, capacity=640, chunk=128)
  for row, expected in enumerate(base_run(entry).logits.swapaxes(0, 1)):
    mine = slice(row, row + 1)
    alone = matrix.teacher_forced(runner, model_of(entry)[1], ROWS[mine], LENGTHS[mine])
    np.testing.assert_allclose(alone.logits[:, 0], expected, **TOLERANCE)


@every_entry
def test_bytes_follow_the_window_and_not_the_capacity(entry):
  small, large = (runner_of(entry, capacity=capacity) for capacity in (320, 640))
  ring = small.prefill_config.ring_tokens
  if small.policy.cache_positions is not None:
    assert ring is None  # it sees its sinks however far away they are
    return
  config, rows = small.model.config, len(LENGTHS)
  token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
  assert ring == RING
  assert small.prefill_bytes.keys_values == large.prefill_bytes.keys_values == rows * RING * token
  assert runner_of(entry, capacity=128).prefill_config.ring_tokens is None  # no shorter


@every_harsh_entry
@pytest.mark.parametrize("value", [np.nan], ids=str)
def test_what_has_left_the_window_may_be_anything(entry, value, monkeypatch):
  """Slots that no token in sight owns are poisoned, before prefill and before every step."""
  runner, empty_cache = runner_of(entry), steps.empty_cache

  def poisoned(runner):
    return matrix.filled_cache(empty_cache(runner), value)

  monkeypatch.setattr(steps, "empty_cache", poisoned)
  between = jax.jit(partial(poison_out_of_sight, runner, value))
  run = matrix.teacher_forced(runner, model_of(entry)[1], ROWS, LENGTHS, between)
  np.testing.assert_allclose(run.logits, base_run(entry).logits, **TOLERANCE)


def poison_out_of_sight(runner, value, cache):
  """The cache with value in every slot whose token the next one will not see."""
  config, lengths = runner.decode_config, cache.lengths[:, None]

  def hidden_slots(total):  # bool[B, total]: of a layer whose position p lies in slot p % total
    newest = lengths - 1 - (lengths - 1 - jnp.arange(total)[None]) % total
    return (newest < 0) | (newest < lengths + 1 - WINDOW)

  def poison(layer):
    if layer is None:
      return None
    out = hidden_slots(layer.values[0].shape[2])
    return layer._replace(
      keys=(jnp.where(out[:, None, None], value, layer.keys[0]),),
      values=(jnp.where(out[:, None, :, None], value, layer.values[0]),),
    )

  cache = cache.replace(contiguous=tuple(map(poison, cache.contiguous)))
  if config.ring_tokens is None or cache.pools is None or runner.store.drops:
    return cache  # laws about the slots of other tables are those of test_laws.py
  owned = config.ring_tokens // PAGE
  out = hidden_slots(config.ring_tokens).reshape(len(LENGTHS), 1, owned, PAGE)
  pools = cache.pools
  for table in cache.table:
    pages = table[:, :, :owned]
    pools = pools._replace(
      keys=pools.keys.at[pages].set(jnp.where(out[..., None], value, pools.keys[pages])),
      values=pools.values.at[pages].set(jnp.where(out[..., None], value, pools.values[pages])),
    )
  return cache.replace(pools=pools)


def test_a_second_step_compiles_nothing_when_the_ring_turns():
  entry = next(e for e in ENTRIES if e.policy == "dense")
  runner = runner_of(entry, capacity=320)
  rows = [list(range(1, 150))] * len(LENGTHS)
  matrix.teacher_forced(runner, model_of(entry)[1], rows, (100,) * len(LENGTHS))
  size = matrix.spied_step._cache_size()
  matrix.teacher_forced(runner, model_of(entry)[1], rows, (120,) * len(LENGTHS))
  assert matrix.spied_step._cache_size() == size
