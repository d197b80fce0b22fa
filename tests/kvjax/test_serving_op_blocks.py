"""Ten thousand steps of requests that come, grow, select, end and lose their slot, on `op_block`.

The model computes nothing: keys and values say whose they are and where, so that every number on
the device and on the host can be looked at after each step.
"""

from __future__ import annotations

import random
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, ModelConfig, Sampling, prepare
from kvjax.engine import slots, steps
from kvjax.engine.batching import JaxBackend
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Outcome, Request
from kvjax.engine.serving import Server
from kvjax.policies import _tokens
from kvjax.stores.traffic import totals
from kvjax.types import SELECT, LayerPlan, Model, Policy
from tests.kvjax import matrix

SLOTS, HEADS, PAGE, CAPACITY, BUDGET, COLORS = 3, 2, 8, 96, 24, 64
STEPS = 10_000


def named(color, position, head):
  """The number that a token's key is made of; small enough to be exact."""
  return (color * CAPACITY + position) * HEADS + head + 1


def model_of_names() -> Model:
  """One layer. All tokens of a request are its color, and after a token comes the same again."""
  config = ModelConfig("none", 1, HEADS, HEADS, 2, 1, 1, COLORS, CAPACITY)

  def forward(params, tokens, positions, cache, attend):
    del params
    heads = jnp.arange(HEADS)[None, None]
    names = named(tokens[..., None], positions[..., None], heads).astype(jnp.float32)
    k = jnp.stack([names, -names], axis=-1)
    hidden = tokens[..., None].astype(jnp.float32)
    _, cache = attend(0, jnp.zeros_like(k), k, k + 0.5, cache, hidden)
    return hidden, cache

  def unembed(params, x):
    del params
    return jax.nn.one_hot(x[:, 0].astype(jnp.int32), COLORS)

  none = lambda *args, **options: None  # noqa: E731
  return Model(config, none, forward, none, none, unembed, lambda x, positions: x, none)


def selecting() -> Policy:
  """The newest token and others, most of them the same for some steps."""

  def select(state, inputs):
    places = jnp.arange(CAPACITY, dtype=jnp.int32)[None, None]
    heads = jnp.arange(HEADS, dtype=jnp.int32)[None, :, None]
    lengths = inputs.lengths[:, None, None]
    age = (lengths + 5 * places) // 16  # a token is looked at anew every 16 steps
    scores = ((places * 7919 + heads * 104_729 + age * 1_299_709) % 10_007).astype(jnp.float32)
    seen = _tokens.tokens_seen(places, inputs)
    best = _tokens.best_tokens(scores, places == lengths - 1, seen, BUDGET)
    return _tokens.select_tokens(best, BUDGET, PAGE), state

  return Policy(
    name="of this test",
    budget_tokens=BUDGET,
    stores=("op_block",),
    register=lambda model, cache: (LayerPlan((SELECT,)), ()),
    preprocess=lambda state, inputs: state,
    select=select,
    page_size=PAGE,
  )


def check(backend: JaxBackend, colors: dict[int, int]) -> None:
  """Conservation, and every token where it belongs; colors of the rows that are there, by slot."""
  cache = backend.cache
  state, (blocks,) = cache.store_state, cache.store_state.blocks
  owner, tokens, lengths = (np.asarray(x) for x in (blocks.owner, blocks.tokens, cache.lengths))
  assert sorted(np.flatnonzero(lengths)) == sorted(colors)
  color = np.array([colors.get(slot, 0) for slot in range(SLOTS)])
  held = owner >= 0
  assert (tokens[~held] == -1).all() and (tokens[held] >= 0).any(axis=-1).all()
  assert np.isin(owner[held] // HEADS, list(colors)).all()  # nothing of who has ended
  row, head = np.divmod(owner[:, None], HEADS)
  there = (tokens >= 0) & held[:, None]
  assert (tokens < lengths[row])[there].all()
  # The host: every token of every row. The table is that of the one layer.
  table = np.asarray(cache.table)[0]
  place = np.arange(CAPACITY)
  on_host = np.asarray(cache.host.keys)[table[:, :, place // PAGE], place % PAGE, 0]
  names = named(color[:, None, None], place[None, None], np.arange(HEADS)[None, :, None])
  written = place[None] < lengths[:, None]
  assert (on_host == names).all(axis=1)[written].all()
  for pool, host, shift in zip(state.pools[0], cache.host, (0, 0.5), strict=True):
    device, host = np.asarray(pool), np.asarray(host)
    n = len(owner)
    original = host[table[row, head, tokens // PAGE], tokens % PAGE]
    assert (device[:n] == original)[there].all()
    expected = named(color[row], tokens, head)
    assert (device[:n, :, 0] == expected + shift)[there].all()
    newest = device[n:, :, 0].reshape(SLOTS, HEADS, PAGE)  # the ordered page of each list
    within = (np.maximum(lengths - 1, 0) // PAGE * PAGE)[:, None] + np.arange(PAGE)[None]
    rows, slots = np.nonzero(within < lengths[:, None])
    of_page = named(color[rows, None], within[rows, slots][:, None], np.arange(HEADS)[None])
    assert (newest[rows, :, slots] == of_page + shift).all()


@cache
def runner_of_names():
  config = CacheConfig(SLOTS, CAPACITY, PAGE)
  store = "op_block:strict=True:slack=1.0"
  return prepare(model_of_names(), selecting(), store, config, chunk_tokens=64)


@pytest.mark.usefixtures("fully_optimized")
def test_ten_thousand_steps():
  backend = JaxBackend(runner_of_names(), jnp.zeros(1))
  backend.cache = matrix.filled_cache(backend.cache, np.nan)
  server = Server(backend, VirtualClock(), queue_limit=4)
  rng, ended = random.Random(3), []
  for step in range(STEPS):
    kind = rng.random()
    if kind < 0.12:
      prompt = (rng.randrange(COLORS),) * rng.randint(1, 60)
      server.submit(Request(step, prompt, rng.randint(1, 36)))
    elif kind < 0.13 and server.running:
      server.cancel(rng.choice(list(server.running)))
    elif kind < 0.15 and server.running:
      server.preempt(rng.choice(list(server.running)))
    server.step()
    running = {slot: live.request.prompt[0] for slot, live in server._running.items()}
    check(backend, running)
    ended += server.take_ended()
  counts = {outcome: sum(f.outcome is outcome for f in ended) for outcome in Outcome}
  assert counts[Outcome.DONE] > 300 and counts[Outcome.CANCELLED] > 30, counts
  assert sum(f.preemptions for f in ended) > 50
  for finished in ended:
    assert set(finished.tokens) <= {finished.request.prompt[0]}
  moved = totals(backend.cache)
  assert moved["pages_hit"] > 10_000 and moved["moved"] > 10_000, moved
  while server.busy:
    server.cancel(next(iter(server._live)))
  check(backend, {})


def started(*lengths: int) -> JaxBackend:
  """A request in each slot; its color is the slot's number and one."""
  backend = JaxBackend(runner_of_names(), jnp.zeros(1))
  for slot, length in enumerate(lengths):
    backend.start(slot, Request(slot, (slot + 1,) * length, 30))
  return backend


def stepped(backend: JaxBackend, colors: dict[int, int]):
  """One token of each, which is its color again."""
  made = backend.step(colors)
  assert made.tokens == colors
  return made


@pytest.mark.usefixtures("fully_optimized")
def test_a_request_that_ends_while_its_recall_is_under_way():
  """Nobody waits for the step that brings its tokens back; its blocks are free for who comes."""
  backend, colors = started(50, 40, 30), {0: 1, 1: 2, 2: 3}
  for _ in range(9):
    stepped(backend, colors)
  newest, everyone = np.array([1, 2, 3], np.int32), np.ones(SLOTS, bool)
  args = backend._params, backend.cache, newest, backend._keys[SLOTS], everyone
  _, under_way = steps.next_token(runner_of_names(), Sampling(), *args)
  backend.cache = slots.release(runner_of_names(), under_way, np.arange(SLOTS) == 0)
  del colors[0]
  check(backend, colors)
  stepped(backend, colors)
  backend.start(0, Request(9, (9,) * 60, 30))
  for _ in range(9):
    stepped(backend, colors | {0: 9})
    check(backend, colors | {0: 9})


@pytest.mark.usefixtures("fully_optimized")
def test_a_row_that_fills_its_part_of_the_host_ends_alone():
  backend, colors = started(CAPACITY - 1, 40, 30), {0: 1, 1: 2, 2: 3}
  assert not stepped(backend, colors).lost
  table = np.asarray(backend.cache.table)[:, 0]
  full = [np.array(pool)[table] for pool in backend.cache.host]
  made = backend.step(colors)
  assert list(made.lost) == [0] and "outgrew the cache" in made.lost[0]
  for pool, before in zip(backend.cache.host, full, strict=True):
    np.testing.assert_array_equal(np.asarray(pool)[table], before)
  backend.stop(0)
  del colors[0]
  check(backend, colors)
  assert not stepped(backend, colors).lost
  check(backend, colors)
