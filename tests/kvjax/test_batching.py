"""The batching engine: what a request gets does not depend on who else is there, or was there."""

from __future__ import annotations

import dataclasses
import logging
import random
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
  CacheConfig,
  KVCache,
  Runner,
  Sampling,
  generate,
  make_mesh,
  make_policy,
  prepare,
)
from kvjax.engine import slots, steps
from kvjax.engine.batching import JaxBackend
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.engine.serving import Server, serve
from kvjax.opkv.op_block import OpBlockState
from models import PRESETS, build, param_shapes
from tests import aot
from tests.kvjax import matrix

SHAPE, NEW, SLOTS = matrix.SHAPES[0], 10, 3
MODEL, PARAMS = matrix.tiny_model(SHAPE, num_layers=2)
PROMPTS = [tuple(row) for row in matrix.tokens_of([130, 5, 64, 127, 33, 1], seed=3)]
# Policies on every kind of store, and what differs from their harsh setting in the matrix.
CASES = {
  "dense": ("dense", "resident", {}),
  "quest": ("quest", "resident", {"dense_layers": 1}),
  "streaming": ("streaming", "compact", {}),
  "h2o": ("h2o", "compact", {}),
  "snapkv": ("snapkv", "compact", {}),
  "omnikv, whole_page": ("omnikv", "whole_page", {}),
  "infinigen, op_block": ("infinigen", "op_block:strict=True", {"group": "max"}),
  "infinigen, apart": ("infinigen", "op_block:strict=True:shared=False", {"group": "max"}),
  "flexicache, head_tiered": ("flexicache", "head_tiered", {"unstable_heads": ((0, 0),)}),
  "quest, token_slots": ("quest", "token_slots:strict=True", {"dense_layers": 1, "group": "max"}),
}
# All others, on their first store, and digests that keep the newest keys.
OTHERS = {
  name: (name, make_policy(name, **settings["harsh"]).stores[0], {})
  for name, settings in matrix.SETTINGS.items()
  if name not in {policy for policy, _, _ in CASES.values()}
} | {"quest, int8": ("quest", "resident", {"dense_layers": 1, "digest_dtype": "int8"})}


@cache
def runner_of(case: str, store: str | None = None, batch: int = SLOTS) -> Runner:
  name, own_store, options = (CASES | OTHERS)[case]
  policy = make_policy(name, **matrix.SETTINGS[name]["harsh"] | options)
  config = CacheConfig(batch, matrix.CAPACITY, matrix.PAGE)
  return prepare(MODEL, policy, store or own_store, config, chunk_tokens=64)


@cache
def alone(case: str) -> list[tuple[int, ...]]:
  """What each prompt gets by itself, on the device (as with a host tier: test_host_stores.py)."""
  store = "compact" if CASES[case][1] == "compact" else "resident"
  runner = slots.with_batch(runner_of(case, store), 1)
  return [
    tuple(generate(runner, PARAMS, [prompt], max_new_tokens=NEW).tokens[0]) for prompt in PROMPTS
  ]


class Harsh(JaxBackend):
  """Rows sit steps out at random, and the slot of one that ended is full of NaN."""

  def __init__(self, runner, seed: int):
    super().__init__(runner, PARAMS)
    self.rng = random.Random(seed)
    self.cache = poisoned(self.cache)

  def reloading(self, slot):
    return self.rng.random() < 0.2

  def stop(self, slot):
    super().stop(slot)
    self.cache = poisoned_row(self.cache, slot)


def poisoned(state: KVCache) -> KVCache:
  """NaN in place of every number; nobody is there."""
  return matrix.filled_cache(state, np.nan)


def poisoned_row(state: KVCache, slot: int) -> KVCache:
  """NaN in what a row of the contiguous layers and of pools that all layers share has had."""
  layers = jax.tree.map(lambda x: x.at[slot].set(jnp.nan), state.contiguous)
  if state.pools is None:
    return state.replace(contiguous=layers)
  rows = state.table[:, slot]
  pools = jax.tree.map(lambda pool: pool.at[rows].set(jnp.nan, mode="drop"), state.pools)
  return state.replace(contiguous=layers, pools=pools)


def free_blocks(state: KVCache, rows) -> None:
  """No OP block belongs to one of these rows, and free ones hold nothing."""
  if not isinstance(state.store_state, OpBlockState):
    return
  for blocks in state.store_state.blocks:
    owner, tokens = np.asarray(blocks.owner), np.asarray(blocks.tokens)
    assert not np.isin(owner // SHAPE.kv_heads, list(rows)).any()
    assert (tokens[owner < 0] == -1).all() and (tokens[owner >= 0] >= 0).any(axis=-1).all()


def at_random(server: Server, backend: Harsh, first_id: int, count: int) -> list[Finished]:
  """Serves so many prompts once, while others come and are cancelled, and any is preempted."""
  rng, ended, coming = backend.rng, [], list(range(count))
  rng.shuffle(coming)
  while coming or server.busy:
    if coming and rng.random() < 0.4:
      i = coming.pop()
      server.submit(Request(first_id + i, PROMPTS[i], NEW))
    if rng.random() < 0.1:
      cancelled = first_id + 1000 + rng.randrange(10**6)
      server.submit(Request(cancelled, rng.choice(PROMPTS), NEW))
      server.step()
      server.cancel(cancelled)
    if server.running and rng.random() < 0.08:
      server.preempt(rng.choice(list(server.running)))
    server.step()
    free_blocks(backend.cache, server._free)
    ended += server.take_ended()
  return ended


@pytest.mark.parametrize("case", CASES)
def test_a_request_gets_what_it_gets_alone(case, caplog):
  expected = alone(case)
  backend = Harsh(runner_of(case), seed=1)
  server = Server(backend, VirtualClock())
  ended = at_random(server, backend, 0, len(PROMPTS))
  backend.cache = poisoned(backend.cache)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    ended += at_random(server, backend, 100, 3)
  compiled = [line for line in map(str, caplog.messages) if line.startswith("Compiling")]
  assert not compiled
  done = {f.request.id: f for f in ended if f.outcome is Outcome.DONE}
  assert set(done) >= {*range(len(PROMPTS)), *range(100, 103)}
  for finished in ended:
    assert finished.outcome in (Outcome.DONE, Outcome.CANCELLED)
    tokens = expected[PROMPTS.index(finished.request.prompt)]
    assert finished.tokens == tokens[: len(finished.tokens)]
  assert sum(f.preemptions for f in ended) > 1 and sum(f.sat_out for f in ended) > 10
  free_blocks(backend.cache, range(SLOTS))
  assert not np.asarray(backend.cache.lengths).any()


def nothing_changes(backend: JaxBackend) -> None:
  """A step that all rows sit out leaves every number of the cache as it was."""
  before = on_host(backend.cache)
  backend.step({})
  jax.tree.map(np.testing.assert_array_equal, on_host(backend.cache), before)


def on_host(state: KVCache):
  """Copies of all arrays, but for the order of OP blocks, which counts the steps."""
  kept = state.store_state
  if isinstance(kept, OpBlockState):
    kept = kept.replace(blocks=tuple(blocks._replace(order=()) for blocks in kept.blocks))
  return jax.tree.map(np.array, state.replace(store_state=kept))


@pytest.mark.parametrize("case", (*CASES, *OTHERS))
def test_a_row_that_sits_out_stays_as_it_is(case):
  """Also of policies that are not served above; two rows, and a slot that was never used."""
  backend = JaxBackend(runner_of(case), PARAMS)
  backend.cache = poisoned(backend.cache)
  asked = {slot: Request(slot, PROMPTS[2 * slot], NEW) for slot in (0, 2)}
  newest = {slot: backend.start(slot, asked[slot]).tokens[slot] for slot in (0, 2)}
  expected = {0: [newest[0]], 2: [newest[2]]}
  for _ in range(3):
    nothing_changes(backend)
    for going in ((0, 2), (0,), (2,)):
      made = backend.step({slot: newest[slot] for slot in going}).tokens
      newest |= made
      for slot, token in made.items():
        expected[slot].append(token)
  assert np.asarray(backend.cache.lengths).tolist() == [130 + 6, 0, 33 + 6]
  if case in CASES:
    assert expected == {slot: list(alone(case)[2 * slot][:7]) for slot in expected}


def test_a_row_that_outgrows_its_store_fails_alone():
  """SnapKV with room for 20 new tokens."""
  backend = JaxBackend(runner_of("snapkv"), PARAMS)
  requests = [Request(0, PROMPTS[0], 30), Request(1, PROMPTS[1], NEW), Request(2, PROMPTS[2], 21)]
  ended = {f.request.id: f for f in serve(requests, backend, VirtualClock())}
  assert [ended[i].outcome for i in range(3)] == [Outcome.FAILED, Outcome.DONE, Outcome.DONE]
  assert "made more tokens than policy 'snapkv" in ended[0].reason
  assert ended[1].tokens == alone("snapkv")[1]
  assert ended[0].tokens[:NEW] == alone("snapkv")[0] and len(ended[0].tokens) == 21


def test_requests_that_no_slot_can_hold():
  backend = JaxBackend(runner_of("quest"), PARAMS)
  capacity = matrix.CAPACITY
  requests = [
    Request(0, (1,) * capacity, 1),
    Request(1, (), 1),
    Request(2, (1, 160), 1),
    Request(3, (1,), 0),
    Request(4, PROMPTS[4], NEW),
  ]
  ended = {f.request.id: f for f in serve(requests, backend, VirtualClock())}
  assert [ended[i].outcome for i in range(4)] == [Outcome.UNFIT] * 4
  assert "that is 161, and the cache holds 160 a row" in ended[0].reason
  assert "is empty" in ended[1].reason and "outside [0, 160)" in ended[2].reason
  assert "max_new_tokens 0 must be at least 1" in ended[3].reason
  assert ended[4].tokens == alone("quest")[4]


def test_sampling_is_that_of_a_request_alone():
  runner, sampling = runner_of("dense"), Sampling(temperature=0.9, top_p=0.9)
  one = slots.with_batch(runner, 1)
  backend = JaxBackend(runner, PARAMS, sampling=sampling, seed=3)
  requests = [Request(i, prompt, 6) for i, prompt in enumerate(PROMPTS[:4])]
  for finished in serve(requests, backend, VirtualClock()):
    prompt = [finished.request.prompt]
    same = generate(one, PARAMS, prompt, max_new_tokens=6, sampling=sampling, seed=3)
    assert finished.tokens == tuple(same.tokens[0])


def test_windows_are_rings_of_their_own():
  """Quest: a dense layer and a paged one, both of them rings that have come round."""
  config = dataclasses.replace(MODEL.config, family="mistral", window_tokens=50)
  policy = make_policy("quest", budget_tokens=32, dense_layers=1)
  cache_config = CacheConfig(2, 320, matrix.PAGE)
  runner = prepare(build(config), policy, "resident", cache_config, chunk_tokens=64)
  assert runner.decode_config.ring_tokens == 128
  prompts = matrix.tokens_of([290, 40, 130, 128])
  backend = Harsh(runner, seed=2)
  requests = [Request(i, tuple(prompt), 8) for i, prompt in enumerate(prompts)]
  for finished in serve(requests, backend, VirtualClock()):
    prompt = [finished.request.prompt]
    same = generate(slots.with_batch(runner, 1), PARAMS, prompt, max_new_tokens=8)
    assert finished.tokens == tuple(same.tokens[0])


def test_after_warming_up_nothing_compiles(caplog):
  """Slots as no other test has them: what one has compiled would not be compiled here."""
  backend = JaxBackend(runner_of("omnikv, whole_page", batch=2), PARAMS)
  backend.warm_up()
  assert not np.asarray(backend.cache.lengths).any()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    (finished,) = serve([Request(0, PROMPTS[0], 3)], backend, VirtualClock())
  assert len(finished.tokens) == 3
  assert not [line for line in map(str, caplog.messages) if line.startswith("Compiling")]


def test_a_mesh_is_refused():
  policy, config = make_policy("dense"), CacheConfig(2, 64)
  runner = prepare(MODEL, policy, "resident", config, mesh=make_mesh())
  with pytest.raises(ValueError, match="runs on one device so far; prepare without a mesh"):
    JaxBackend(runner, PARAMS)


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize(
  ("name", "store"), [("quest", "resident"), ("h2o", "compact"), ("infinigen", "op_block")]
)
def test_rows_come_and_go_in_place(name, store):
  """SmolLM2's heads, 4 layers of 8,192 tokens: no pool is copied, and nothing of its size made."""
  config = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=4)
  policy = make_policy(name, page_size=16, budget_tokens=1024)
  runner = prepare(build(config), policy, store, CacheConfig(2, 8192, 16, base_tokens=8192))
  empty = slots.empty_batch.lower(runner).compile().memory_analysis()
  assert empty.temp_size_in_bytes < 1 << 20
  state, alone = slots.empty_batch(runner), slots.with_batch(runner, 1)
  one = jax.eval_shape(partial(steps.empty_cache, alone))
  last, slot = (
    jax.ShapeDtypeStruct(*of) for of in (((1, config.embed_dim), jnp.float32), ((), jnp.int32))
  )
  args = param_shapes(config), state, one, last, jax.random.key(0)[None], slot
  kept, pool = runner.decode_bytes, max(leaf.nbytes for leaf in jax.tree.leaves(state))
  for lowered in (
    slots.admit.lower(runner, Sampling(), *args),
    slots.release.lower(runner, state, jax.ShapeDtypeStruct((2,), bool)),
  ):
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= kept.total + kept.host
    assert memory.temp_size_in_bytes < kept.total // 2
    assert not aot.big_copies(compiled.as_text(), pool // 2)
