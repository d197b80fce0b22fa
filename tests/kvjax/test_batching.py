"""The batching engine: what a request gets does not depend on who else is there, or was there."""

from __future__ import annotations

import logging
import random
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import KVCache, generate
from kvjax.engine.batching import JaxBackend
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.engine.serving import Server
from kvjax.opkv.op_block import OpBlockState
from tests.kvjax import matrix
from tests.kvjax.matrix import Entry

SHAPE, NEW, SLOTS = matrix.SHAPES[0], 18, 3
MODEL, PARAMS = matrix.tiny_model(SHAPE)
PROMPTS = [tuple(row) for row in matrix.tokens_of([127, 5, 64, 90, 130, 33, 111, 1], seed=3)]
# Every kind of state that a row can have, on every kind of store.
CASES = (
  Entry("dense", "harsh", "resident"),
  Entry("quest", "harsh", "resident"),
  Entry("clusterkv", "harsh", "resident"),
  Entry("streaming", "harsh", "compact"),
  Entry("h2o", "harsh", "compact"),
  Entry("snapkv", "harsh", "compact"),
  Entry("omnikv", "harsh", "whole_page"),
  Entry("flexicache", "harsh", "prefetch_all"),
  Entry("infinigen", "gentle", "op_block:strict=True"),
  Entry("quest", "gentle", "token_slots:strict=True"),
)


@cache
def alone(entry: Entry) -> list[tuple[int, ...]]:
  """What each prompt gets by itself."""
  runner = matrix.runner_of(entry, SHAPE, batch=1)
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


def at_random(server: Server, backend: Harsh, first_id: int) -> list[Finished]:
  """Serves every prompt once, while requests that nobody waits for come, go, and are preempted."""
  rng, ended, coming = backend.rng, [], list(range(len(PROMPTS)))
  rng.shuffle(coming)
  while coming or server.busy:
    if coming and rng.random() < 0.4:
      i = coming.pop()
      server.submit(Request(first_id + i, PROMPTS[i], NEW))
    if rng.random() < 0.15:
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


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_a_request_gets_what_it_gets_alone(entry, caplog):
  expected = alone(entry)
  backend = Harsh(matrix.runner_of(entry, SHAPE, batch=SLOTS), seed=1)
  server = Server(backend, VirtualClock())
  ended = at_random(server, backend, 0)
  backend.cache = poisoned(backend.cache)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    ended += at_random(server, backend, 100)
  compiled = [line for line in map(str, caplog.messages) if line.startswith("Compiling")]
  assert not compiled
  done = {f.request.id: f for f in ended if f.outcome is Outcome.DONE}
  assert set(done) >= {*range(len(PROMPTS)), *range(100, 100 + len(PROMPTS))}
  for finished in ended:
    assert finished.outcome in (Outcome.DONE, Outcome.CANCELLED)
    tokens = expected[PROMPTS.index(finished.request.prompt)]
    assert finished.tokens == tokens[: len(finished.tokens)]
  assert sum(f.preemptions for f in ended) > 3 and sum(f.sat_out for f in ended) > 20
  free_blocks(backend.cache, range(SLOTS))
  assert not np.asarray(backend.cache.lengths).any()
