"""Laws 7 and 8 of the matrix: what is compiled, when, and the bytes that it takes."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from kvjax import CacheConfig, Sampling, cache_bytes, generate, make_policy, prepare
from kvjax.engine import steps
from models import PRESETS, build, param_shapes
from tests import aot
from tests.kvjax import matrix

ENTRIES = matrix.entries()
HARSH = [entry for entry in ENTRIES if entry.setting == "harsh"]
SHAPE = matrix.SHAPES[0]
MIB = 1 << 20

every_harsh_entry = pytest.mark.parametrize("entry", HARSH, ids=str)


@pytest.fixture(scope="module")
def nothing_compiled():
  """What another file has compiled would not be compiled here."""
  jax.clear_caches()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
  ("entry", "temperature"), [*((entry, 0.0) for entry in HARSH), (HARSH[0], 0.7)], ids=str
)
def test_nothing_compiles_after_the_first_short_run(entry, temperature, caplog):
  params, sampling = matrix.model_of(entry, SHAPE)[1], Sampling(temperature)
  runner = matrix.runner_of(entry, SHAPE)  # of which test_laws.py has compiled the most
  short = [[1] * 32, [2] * 5, [3], [4] * 17]
  generate(runner, params, short, max_new_tokens=3, sampling=sampling)
  sizes = [step._cache_size() for step in (steps.prefill_chunk, steps.next_token)]
  prompts = [[3] * 130, [4] * 64, [5] * 2, [6] * 65]
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    generate(runner, params, prompts, max_new_tokens=20, sampling=sampling, seed=5, stop_ids=(1,))
  compiled = [line for line in map(str, caplog.messages) if line.startswith("Compiling")]
  assert sizes == [step._cache_size() for step in (steps.prefill_chunk, steps.next_token)]
  assert not compiled


@pytest.mark.usefixtures("fully_optimized")
@every_harsh_entry
def test_a_decode_step_works_in_place(entry):
  """SmolLM2's heads, 6 layers: pools, contiguous layers and bounds of over 50 MB."""
  config = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=6)
  capacity = 16_384 if entry.store == "compact" else 8192
  options = {"budget_tokens": 8192} if entry.store == "compact" else {"budget_tokens": 1024}
  policy = make_policy(entry.policy, page_size=matrix.PAGE, **options)
  cache = CacheConfig(1, capacity, matrix.PAGE, base_tokens=capacity)
  runner = prepare(build(config), policy, entry.store, cache)
  state = jax.eval_shape(lambda: steps.empty_cache(runner))
  if runner.store.drops:
    state = jax.eval_shape(lambda cache: steps.seal(runner, cache), state)
  if runner.store.on_host:  # abstract arrays do not say where they are
    state = steps.sealed(runner, steps.empty_cache(runner))
  tokens, key = jax.ShapeDtypeStruct((1,), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
  keys = jax.ShapeDtypeStruct((1,), key.dtype)
  params = param_shapes(config)
  step = steps.next_token.lower(runner, Sampling(), params, state, tokens, keys).compile()
  memory, kept = step.memory_analysis(), runner.decode_bytes
  print(f"{entry}: {kept}, temporaries {memory.temp_size_in_bytes}")
  assert kept.keys_values + kept.host > 50 * MIB
  assert memory.alias_size_in_bytes >= kept.total + kept.host
  # A layer's selected keys and values are gathered, by at most two layers at a time; the rest of
  # what a step needs does not grow with the cache.
  gathered = 2 * config.num_kv_heads * config.head_dim * (policy.budget_tokens or 0) * 4
  assert memory.temp_size_in_bytes < 2 * gathered + 2 * MIB, f"{memory.temp_size_in_bytes} bytes"
  one_pool = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  assert not aot.big_copies(step.as_text(), one_pool // 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_bytes_told_are_bytes_held(entry, dtype):
  """Before anything is allocated, per part; and afterwards of what really lives."""
  runner = matrix.runner_of(entry, SHAPE)  # in f32, of which test_laws.py has compiled what follows
  if dtype != "float32":
    config = CacheConfig(3, 200, matrix.PAGE, dtype)
    runner = prepare(runner.model, runner.policy, entry.store, config, chunk_tokens=64)
  cache = steps.empty_cache(runner)
  parts = [(runner.prefill_bytes, cache)]
  for told, held in parts:
    assert told == cache_bytes(held)
    assert told.total + told.host == sum(leaf.nbytes for leaf in jax.tree.leaves(held))
  held = steps.sealed(runner, cache)
  assert runner.decode_bytes == cache_bytes(held)
  total = runner.decode_bytes.total + runner.decode_bytes.host
  assert total == sum(leaf.nbytes for leaf in jax.tree.leaves(held))


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_preparing_allocates_nothing(entry):
  made = []
  runner = matrix.runner_of(entry, matrix.SHAPES[0])

  def register(*configs):
    plan, state = runner.policy.register(*configs)
    made.extend(jax.tree.leaves(state))
    return plan, state

  policy = runner.policy._replace(register=register)
  prepare(runner.model, policy, entry.store, runner.prefill_config)
  assert all(isinstance(leaf, jax.core.Tracer) for leaf in made)


def test_bytes_by_hand():
  """f32 and bf16, B = 3, K = 2, D = 16, L = 3, capacity 200: 13 pages of 16 a row."""
  b, k, d, pages, page = 3, 2, 16, 13, 16
  model, _ = matrix.tiny_model(matrix.SHAPES[0])
  for dtype, item in (("float32", 4), ("bfloat16", 2)):
    config = CacheConfig(b, 200, page, dtype)
    cursors = 2 * b * 4  # lengths and overflow

    def told(name, store, config=config, **options):
      return prepare(model, make_policy(name, **options), store, config).decode_bytes

    assert tuple(told("dense", "resident")) == (3 * b * k * d * 200 * 2 * item, cursors, 0, 0)
    paged = b * k * pages * page * d * 2 * item  # of one layer
    table = b * k * pages * 4
    bounds = b * k * pages * 2 * d * item
    dense = 2 * b * k * d * 200 * 2 * item
    assert tuple(told("quest", "resident")) == (dense + paged, cursors + table, bounds, 0)
    assert tuple(told("streaming", "resident")) == (3 * paged, cursors + 3 * table, 0, 0)
    small = b * k * 4 * page  # slots of one layer under a budget of 64 tokens
    expected = (3 * small * d * 2 * item, cursors + 3 * b * k * 4 * 4, 3 * small * 4, 0)
    assert tuple(told("streaming", "compact", budget_tokens=64)) == expected


@pytest.mark.parametrize("budget", [16, 128, 1024])
def test_what_compact_drops_is_not_allocated(budget):
  model, _ = matrix.tiny_model(SHAPE)
  config = CacheConfig(2, 4096, matrix.PAGE)
  dense = prepare(model, make_policy("dense"), "resident", config).decode_bytes
  kept = prepare(model, make_policy("streaming", budget_tokens=budget), "compact", config)
  assert kept.decode_bytes.keys_values * 4096 == dense.keys_values * budget
  assert kept.decode_bytes.total < dense.total * budget / 4096 * 1.1 + 1024
  cache = jax.eval_shape(lambda: steps.seal(kept, steps.empty_cache(kept)))
  assert cache_bytes(cache) == kept.decode_bytes
