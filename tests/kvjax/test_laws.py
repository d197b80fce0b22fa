"""The laws that every policy obeys on every store that it allows, as one matrix.

See `matrix.py` for the cells. Laws about the compiled program are in test_laws_compiled.py.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import POLICIES, STORES, generate, selected_pages
from kvjax.engine import steps
from kvjax.engine.generate import check_overflow, prefill
from tests.kvjax import masked, matrix
from tests.kvjax.matrix import LENGTHS, NUM_STEPS, PAGE, ROWS, SHAPES
from tests.kvjax.poison import poison
from tests.models import naive

ENTRIES = matrix.entries()
FULL = 1024  # a budget over every capacity here that is not a law's own subject
SHAPE = SHAPES[0]
HARSH = [entry for entry in ENTRIES if entry.setting == "harsh"]
THOROUGH = [entry for entry in ENTRIES if entry.policy in matrix.THOROUGH]
PROMPTS = [list(row[:length]) for row, length in zip(ROWS, LENGTHS, strict=True)]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=str)
every_harsh_entry = pytest.mark.parametrize("entry", HARSH, ids=str)
every_entry_and_shape = pytest.mark.parametrize(
  ("entry", "shape"),
  [(e, shape) for e in ENTRIES for shape in matrix.shapes_of(e)],
  ids=str,
)


@cache
def base_run(entry, shape) -> matrix.Run:
  """The run that others are compared with: ragged, in small chunks, capacity as it comes."""
  runner = matrix.runner_of(entry, shape)
  return matrix.teacher_forced(runner, matrix.model_of(entry, shape)[1], ROWS, LENGTHS)


def dense_logits(entry, shape) -> np.ndarray:
  """One plain pass over all of each row; what follows a row's end is not seen by it."""
  return _dense_logits(shape, matrix.model_of(entry, shape)[0].config.num_layers)


@cache
def _dense_logits(shape, num_layers) -> np.ndarray:
  model, params = matrix.tiny_model(shape, num_layers)
  return matrix.aligned(naive.logits(model, params, matrix.padded(ROWS)), LENGTHS, NUM_STEPS)


def test_the_matrix_covers_every_policy_and_store():
  assert set(matrix.SETTINGS) == set(POLICIES), "give every policy its two settings in matrix.py"
  for name, settings in matrix.SETTINGS.items():
    assert set(settings) == ({"gentle", "harsh"} if settings["harsh"] else {"harsh"}), name
  assert {entry.store.partition(":")[0] for entry in ENTRIES} == set(STORES)
  assert {shape.group for shape in SHAPES} == {1, 2, 4, 8}


# Law 1: a full budget equals dense; a row under the budget is dense.


# On a host tier the first policy of each store will do.
FIRST_ON_HOST = {entry.store: entry for entry in reversed(HARSH) if entry.store in matrix.HOST}
FULL_BUDGET = [e for e in HARSH if e.store not in matrix.HOST or e is FIRST_ON_HOST[e.store]]


@pytest.mark.parametrize("entry", FULL_BUDGET, ids=str)
def test_full_budget_equals_dense(entry):
  runner = matrix.runner_of(entry, SHAPE, budget=FULL)
  run = matrix.teacher_forced(runner, matrix.model_of(entry, SHAPE)[1], ROWS, LENGTHS)
  np.testing.assert_allclose(run.logits, dense_logits(entry, SHAPE), **TOLERANCE)


# What chooses tokens comes after the step whose logits the law above looks at, and knows neither
# policy nor store: the policies that others are built like will do, on the device. What they say on
# a host tier is what they say there: test_host_stores.py.
SAYING = [entry for entry in HARSH if entry in THOROUGH and entry.store not in matrix.HOST]


@pytest.mark.parametrize("entry", SAYING, ids=str)
def test_full_budget_says_what_dense_says(entry):
  params = matrix.model_of(entry, SHAPE)[1]
  found = generate(
    matrix.runner_of(entry, SHAPE, budget=FULL), params, PROMPTS, max_new_tokens=NUM_STEPS
  )
  said = [prompt + new for prompt, new in zip(PROMPTS, found.tokens, strict=True)]
  whole = naive.logits(matrix.model_of(entry, SHAPE)[0], params, matrix.padded(said))
  best = matrix.aligned(whole, LENGTHS, NUM_STEPS).argmax(axis=-1)
  np.testing.assert_array_equal(np.array(found.tokens).T, best[:-1])


@every_entry_and_shape
def test_under_the_budget_a_row_is_dense_and_over_it_not(entry, shape):
  budget = matrix.runner_of(entry, shape).policy.budget_tokens or FULL
  run, dense = base_run(entry, shape), dense_logits(entry, shape)
  below = np.array(LENGTHS)[None] + np.arange(NUM_STEPS + 1)[:, None] <= budget  # [n + 1, B]
  below[0] = True  # prefill is dense whatever the budget
  assert below[1:].any()
  np.testing.assert_allclose(run.logits[below], dense[below], **TOLERANCE)
  if budget < FULL:  # else the law would hold for a policy that ignores its budget
    assert np.abs(run.logits[~below] - dense[~below]).max(axis=-1).min() > 1e-4


@every_entry
def test_the_budget_is_kept(entry):
  runner, run = matrix.runner_of(entry, SHAPE), base_run(entry, SHAPE)
  for seen in run.attended.values():
    assert seen.sum(axis=-1).max() <= (runner.policy.budget_tokens or FULL)
    for step, row in np.ndindex(*seen.shape[:2]):
      newest = LENGTHS[row] + step
      assert seen[step, row, :, newest].all() and not seen[step, row, :, newest + 1 :].any()


# Law 2: dense attention under the mask of what was recalled is the method's own output.


@every_entry_and_shape
def test_masked_dense_attention_equals_the_method(entry, shape):
  model, params = matrix.model_of(entry, shape)
  runner, run = matrix.runner_of(entry, shape), base_run(entry, shape)
  total = max(map(len, ROWS))
  visible = masked.visibility(model.config, LENGTHS, total, run.attended)
  if runner.policy.cache_positions is None:
    positions = masked.true_positions(len(LENGTHS), total)
  else:
    (seen, *_) = run.attended.values()
    positions = masked.cache_positions(LENGTHS, total, seen[:, :, 0])
  found = masked.logits(model, params, matrix.padded(ROWS), visible, *positions)
  expected = matrix.aligned(found, LENGTHS, NUM_STEPS)
  np.testing.assert_allclose(run.logits, expected, **TOLERANCE)


@every_entry
def test_selected_pages_names_what_the_next_step_attends_to(entry):
  runner, params = matrix.runner_of(entry, SHAPE), matrix.model_of(entry, SHAPE)[1]
  tokens = np.array([row[n] for row, n in zip(ROWS, LENGTHS, strict=True)], np.int32)
  cache = prefill(runner, params, PROMPTS)[1]
  named = selected_pages(runner, params, cache, tokens)
  recalled, cache = matrix.spied_step(runner, params, cache, tokens)[1:]  # the cache was left alone
  assert sorted(named) == list(runner.plan.select_layers)
  for row, layer in enumerate(runner.plan.select_layers):
    positions, mask = (np.asarray(x) for x in recalled[layer])
    places = runner.store.slot_positions(cache, row, cache.lengths)
    places = np.asarray(places).reshape(*places.shape[:2], -1, PAGE)
    for b, head in np.ndindex(*named[layer].shape[:2]):
      pages = np.asarray(named[layer])[b, head]
      group = named[layer].shape[1] // places.shape[1]
      inside = set(places[b, head // group][pages[pages >= 0]].ravel().tolist())
      assert set(positions[b, head][mask[b, head]].tolist()) <= inside
      used = mask[b, head].any(axis=-1).sum()
      if entry.store.startswith(("op_block", "token_slots")) and entry.policy != "flexicache":
        used = mask[b, head].sum()  # single tokens were named, which lie together here
      assert (pages >= 0).sum() == used, f"{(pages >= 0).sum()} pages named, {used} used"


# Law 3: the store does not change the result.


def _others(entry):
  return [e for e in ENTRIES if e[:2] == entry[:2] and e != entry]


def _greedy(entry) -> np.ndarray:
  """i32[n + 1, B], the best token of every step, by the step that other laws have compiled."""
  return matrix.greedy(
    matrix.runner_of(entry, SHAPE), matrix.model_of(entry, SHAPE)[1], PROMPTS, NUM_STEPS
  )


@pytest.mark.parametrize(
  "entry",
  [e for e in ENTRIES if e.store == "resident" and _others(e)],
  ids=lambda e: f"{e.policy}-{e.setting}",
)
def test_stores_agree(entry):
  run = base_run(entry, SHAPE)
  tokens = _greedy(entry)
  for other in _others(entry):
    found = base_run(other, SHAPE)
    np.testing.assert_allclose(found.logits, run.logits, **TOLERANCE)
    for layer, seen in run.attended.items():
      np.testing.assert_array_equal(found.attended[layer], seen)
    np.testing.assert_array_equal(_greedy(other), tokens)


# Law 4: batch mates, chunks, steps and capacity do not matter.


def _check_alone(entry, row, **change):
  params = matrix.model_of(entry, SHAPE)[1]
  runner = matrix.runner_of(entry, SHAPE, batch=1, **change)
  alone = matrix.teacher_forced(runner, params, ROWS[row : row + 1], LENGTHS[row : row + 1])
  expected = base_run(entry, SHAPE).logits[:, row]
  np.testing.assert_allclose(alone.logits[:, 0], expected, **TOLERANCE)


def _named(one) -> str:
  return "-".join(f"{key}{one[key]}" for key in one) if isinstance(one, dict) else str(one)


@pytest.mark.parametrize("entry", THOROUGH, ids=str)
@pytest.mark.parametrize("row", [1, 3], ids=lambda row: f"length{LENGTHS[row]}")
def test_a_row_alone_equals_the_row_in_a_batch(entry, row):
  """At once, as for the others below; a capacity that is no multiple of anything."""
  _check_alone(entry, row, capacity=149)


CHANGES = ({"chunk": 128, "capacity": 320}, {"capacity": 640, "base": 16})


# At once for the others: most of the time goes into compiling, and programs for one row in other
# chunks of a larger cache are right about every row only if neither mates nor chunks nor capacity
# matter.
@pytest.mark.parametrize("entry", [e for e in ENTRIES if e not in THOROUGH], ids=str)
@pytest.mark.parametrize("row", range(len(LENGTHS)), ids=lambda row: f"length{LENGTHS[row]}")
def test_a_row_alone_in_other_chunks_and_capacity_equals_the_row_in_a_batch(entry, row):
  _check_alone(entry, row, **CHANGES[0])


@pytest.mark.parametrize(
  ("entry", "change"),
  [(e, change) for e in HARSH if e in THOROUGH for change in CHANGES],
  ids=_named,
)
def test_chunks_and_capacity_do_not_matter(entry, change):
  runner = matrix.runner_of(entry, SHAPE, **change)
  run = matrix.teacher_forced(runner, matrix.model_of(entry, SHAPE)[1], ROWS, LENGTHS)
  np.testing.assert_allclose(run.logits, base_run(entry, SHAPE).logits, **TOLERANCE)


def test_segments_do_not_matter():
  """A dense cache of three segments that rows reach one after the other."""
  lengths, entry = (1020, 2040, 30), next(e for e in ENTRIES if e.policy == "dense")
  params = matrix.model_of(entry, SHAPE)[1]
  rows = np.random.default_rng(3).integers(0, 160, (3, 2100)).tolist()
  rows = [row[: length + 8] for row, length in zip(rows, lengths, strict=True)]
  runs = []
  for base in (1024, 4096):
    runner = matrix.runner_of(entry, SHAPE, batch=3, capacity=4096, chunk=512, base=base)
    runs.append((runner, matrix.teacher_forced(runner, params, rows, lengths)))
  assert [len(run.cache.contiguous[0].values) for _, run in runs] == [3, 1]
  np.testing.assert_allclose(runs[0][1].logits, runs[1][1].logits, **TOLERANCE)


# Law 5: unused slots may hold anything.


@every_entry
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_poison_in_unused_slots_changes_nothing(entry, value, monkeypatch):
  runner, empty_cache = matrix.runner_of(entry, SHAPE), steps.empty_cache

  def poisoned(runner):
    return matrix.filled_cache(empty_cache(runner), value)

  monkeypatch.setattr(steps, "empty_cache", poisoned)
  between = partial(poison, runner, value=np.float32(value))
  params = matrix.model_of(entry, SHAPE)[1]
  for hook in (None, between):
    run = matrix.teacher_forced(runner, params, ROWS, LENGTHS, hook)
    np.testing.assert_allclose(run.logits, base_run(entry, SHAPE).logits, **TOLERANCE)
  leaves = jax.tree.leaves(between(run.cache))
  assert any(not np.isfinite(leaf).all() for leaf in leaves if leaf.dtype == jnp.float32)


# Law 6: conservation, and the bit that says what did not fit.


@every_entry
def test_every_page_has_one_owner(entry):
  cache = base_run(entry, SHAPE).cache
  np.testing.assert_array_equal(cache.lengths, np.array(LENGTHS) + NUM_STEPS)
  assert not np.asarray(cache.overflow).any()
  if cache.table is not None:
    num_pages = (cache.pools or cache.host).num_pages
    owned = np.sort(np.asarray(cache.table).ravel())
    owned = owned[owned < num_pages]  # places beyond a layer's own pages
    np.testing.assert_array_equal(owned, np.arange(num_pages))


# A cache that drops and still has to be full: the engine marks its rows, whatever the policy, but
# for a policy that never gives up a slot.
FULL_CACHES = [matrix.Entry(name, "harsh", "compact") for name in ("streaming", "snapkv")]


def _in_the_largest(entry, budget, rows, lengths) -> np.ndarray:
  """f32[n + 1, B, V], in a cache that has room for all."""
  params = matrix.model_of(entry, SHAPE)[1]
  if entry in THOROUGH and budget is None:
    runner = matrix.runner_of(entry, SHAPE, **CHANGES[0])
    return matrix.teacher_forced(runner, params, rows, lengths).logits
  runner = matrix.runner_of(entry, SHAPE, batch=1, budget=budget, **CHANGES[0])
  return np.concatenate(
    [
      matrix.teacher_forced(runner, params, [row], [length]).logits
      for row, length in zip(rows, lengths, strict=True)
    ],
    axis=1,
  )


@pytest.mark.parametrize(
  ("entry", "budget"),
  [(e, None) for e in HARSH] + [(e, FULL) for e in HARSH if e in FULL_CACHES],
  ids=str,
)
def test_past_the_capacity_one_row_is_marked_and_the_others_go_on(entry, budget):
  """In the runner of the base run, beside the larger one of law 4: both are compiled already."""
  lengths, capacity, num_steps = (156, 10, 140, 1), matrix.CAPACITY, 12
  rows = matrix.tokens_of([length + num_steps for length in lengths], seed=5)
  params = matrix.model_of(entry, SHAPE)[1]
  runner = matrix.runner_of(entry, SHAPE, budget=budget)
  run = matrix.teacher_forced(runner, params, rows, lengths)
  expected = _in_the_largest(entry, budget, rows, lengths)
  makes_room = runner.store.drops and budget is None
  marked = [0] if makes_room else [1]
  assert np.asarray(run.cache.overflow).tolist() == [*marked, 0, 0, 0]
  others = [0, 1, 2, 3] if makes_room else [1, 2, 3]
  np.testing.assert_allclose(run.logits[:, others], expected[:, others], **TOLERANCE)
  fits = capacity - lengths[0] + 1
  assert fits < num_steps
  np.testing.assert_allclose(run.logits[:fits], expected[:fits], **TOLERANCE)
  if not makes_room:
    with pytest.raises(RuntimeError, match=r"rows \[0\] outgrew the cache"):
      check_overflow(runner, run.cache)


@pytest.mark.parametrize("entry", [e for e in HARSH if e.policy in matrix.THOROUGH], ids=str)
def test_generate_raises_where_a_row_outgrew_its_cache(entry, monkeypatch):
  runner = matrix.runner_of(entry, SHAPE, budget=FULL)
  params = matrix.model_of(entry, SHAPE)[1]
  nearly, over = ([[1] * length, [2], [3], [4]] for length in (156, 166))
  with pytest.raises(ValueError, match="the cache holds 160 a row"):
    generate(runner, params, nearly, max_new_tokens=8)
  # By its globals: the module's name in kvjax.engine is the function's.
  monkeypatch.setitem(generate.__globals__, "check_request", lambda *args: None)
  with pytest.raises(RuntimeError, match=r"rows \[0\] outgrew"):
    generate(runner, params, nearly, max_new_tokens=8)
  with pytest.raises(RuntimeError, match=r"rows \[0\] outgrew"):
    generate(runner, params, over, max_new_tokens=1)
