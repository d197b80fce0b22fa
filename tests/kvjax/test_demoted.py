"""The host's partition for OP blocks: what goes there, what comes back, and what it gives up."""

from __future__ import annotations

import random
from functools import cache, partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax import CacheConfig, generate, make_policy, prepare
from kvjax.cache import cache_bytes, host
from kvjax.engine.batching import JaxBackend
from kvjax.engine.clock import VirtualClock
from kvjax.engine.placing import make_store
from kvjax.engine.preparing import abstract_caches
from kvjax.engine.requests import Request
from kvjax.engine.serving import Server
from kvjax.opkv import demoted
from kvjax.opkv.apart import no_blocks_apart
from kvjax.opkv.blocks import Blocks, no_blocks, release
from kvjax.opkv.op_block import in_pool, ordered_pages
from kvjax.opkv.recalling import ordered_page
from kvjax.opkv.sub_block_manager import Settings, plan
from kvjax.stores.traffic import totals
from tests.kvjax import matrix, opkv_by_hand
from tests.kvjax.poison import poison_recalled
from tests.kvjax.test_serving_op_blocks import CAPACITY as ROOM
from tests.kvjax.test_serving_op_blocks import COLORS, HEADS, PAGE, SLOTS, model_of_names, selecting
from tests.kvjax.test_sub_block_manager import CAPACITY, LISTS, as_mask, lists_of, walk
from tests.kvjax.test_sub_block_manager import HEADS as HEADS_OF_ROW
from tests.kvjax.test_sub_block_manager import PAGE as C

M = 8  # places of the partition of the traces below
# Name -> blocks of the device and settings; two blocks are the least that holds a list's tokens.
TRACES = {
  "shared": (9, Settings(3, HEADS_OF_ROW, rho=0.5, strict=True)),
  "shared, literal": (9, Settings(4, HEADS_OF_ROW, rho=0.5, recheck=False, eviction="fifo")),
  "apart": (8, Settings(2, HEADS_OF_ROW, rho=0.5, strict=True, shared=False, eviction="lru")),
}


@cache
def compiled(name: str):
  """An empty pool, an empty partition, and the plan and the release that are compiled for them."""
  n, static = TRACES[name]
  make, size = (no_blocks, n) if static.shared else (no_blocks_apart, n // LISTS)
  blocks = make(size, C, static.order, LISTS, CAPACITY)
  step = jax.jit(lambda blocks, held, s, newest: plan(blocks, s, static, newest, held))
  return blocks, demoted.none_held(M, C), step, jax.jit(release)


class Moved:
  """Numbers that say whose token lies where, on the device and in the partition, moved as a store
  would move them."""

  def __init__(self, n: int):
    self.device, self.host = np.full((n, C), -1), np.full((M, C), -1)

  def step(self, planned) -> None:
    for into, origin, (source, target, count) in (
      (self.host, self.device, planned.exchange.down),
      (self.device, self.host, planned.exchange.up),
    ):
      assert len({*target[:count].tolist()}) == count
      into[target[:count]] = origin[source[:count]]
    target = planned.target[: planned.count]
    self.device.reshape(-1)[target] = planned.source[: planned.count]


def check_content(blocks: Blocks, content: np.ndarray) -> None:
  """Every slot has what its metadata say, of a list that is there; what is free holds nothing."""
  tokens, owner = np.asarray(blocks.tokens), np.asarray(blocks.owner)
  assert (tokens[owner < 0] == -1).all() and (owner < LISTS).all()
  assert (tokens[owner >= 0] >= 0).any(axis=-1).all()
  names = owner[:, None] * CAPACITY + tokens
  assert ((tokens < 0) | (content == names)).all()


def named(blocks: Blocks, among) -> list[tuple[int, tuple[int, ...]]]:
  """List and tokens of the blocks with these ids."""
  tokens, owner = np.asarray(blocks.tokens), np.asarray(blocks.owner)
  return [(int(owner[b]), tuple(tokens[b].tolist())) for b in among]


def named_here(held: Blocks, among) -> list[tuple[int, tuple[int, ...], int]]:
  """The same of a partition's, and when they came."""
  stamps = np.asarray(held.order.stamp)[list(among)].tolist()
  return [(*block, stamp) for block, stamp in zip(named(held, among), stamps, strict=True)]


@pytest.mark.parametrize("name", TRACES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_traces_conserve_and_evict_as_a_heap_does(name, seed):
  blocks, held, step_of, free = compiled(name)
  n, static = TRACES[name]
  content, heap = Moved(n), opkv_by_hand.Partition(M, HEADS_OF_ROW)
  went = 0
  for wanted, newest, ended in walk(np.random.default_rng(seed), steps=25):
    blocks, held = free(blocks, lists_of(ended)), free(held, lists_of(ended))
    heap.release(ended)
    planned = jax.device_get(step_of(blocks, held, as_mask(wanted), newest))
    assert not planned.too_small
    exchange = planned.exchange
    up = exchange.up[0][: exchange.up[2]]
    back = named_here(held, up)
    # All that was taken from a list, by id: what the partition is offered.
    taken = [
      b for x in range(LISTS) for b in planned.attended[x][planned.hits[x] :].tolist() if b < n
    ]
    gone = named(blocks, sorted(b for b in taken if blocks.owner[b] >= 0))
    heap.step(gone, back)
    before = blocks
    blocks, held = planned.blocks, exchange.blocks
    content.step(planned)
    check_content(blocks, content.device)
    check_content(held, content.host)
    assert sorted(named_here(held, np.flatnonzero(held.owner >= 0))) == sorted(heap.held())
    down = exchange.down[0][: exchange.down[2]]
    assert exchange.demoted.sum() == (before.tokens[down] >= 0).sum()
    assert exchange.back.sum() == sum(t >= 0 for _, tokens, _ in back for t in tokens)
    went += len(down)
    check_seen(planned, wanted, newest, static)
  assert went > 0
  blocks, held = (free(x, lists_of(range(LISTS))) for x in (blocks, held))
  assert (held.owner == -1).all() and (held.tokens == -1).all() and (blocks.owner == -1).all()


def check_seen(planned, wanted, newest, static: Settings) -> None:
  """What is selected, once; nothing else if strict."""
  for x, mask in enumerate(planned.mask):
    here = sorted(t for t in wanted[x] if t < newest[x])
    shown = planned.blocks.tokens.take(planned.attended[x], 0, mode="clip")[mask].tolist()
    assert len(shown) == len({*shown}) and {*here} <= {*shown}
    assert sorted(shown) == here or not static.strict
    theta = 2
    covered = planned.exchange.covered[x]
    assert planned.exchange.back[x] >= covered and (covered == 0 or covered >= theta)


@pytest.mark.parametrize("name", TRACES)
def test_blocks_come_back_in_those_traces(name):
  blocks, held, step_of, _ = compiled(name)
  came = went = 0
  for wanted, newest, _ in walk(np.random.default_rng(1), steps=120):
    planned = step_of(blocks, held, as_mask(wanted), newest)
    blocks, held = planned.blocks, planned.exchange.blocks
    went, came = went + planned.exchange.down[2], came + planned.exchange.up[2]
  assert went > 100 and came > 10, (went, came)


TWO = matrix.tokens_of((130, 61), seed=5)
RHO = ":strict=True:slack=1.0:rho=0.3"


@cache
def answer(store: str, steps: int = 96):
  model, params = matrix.tiny_model(matrix.SHAPES[0], 2)
  policy = make_policy("infinigen", budget_tokens=32, dense_layers=1)
  runner = prepare(model, policy, store, CacheConfig(len(TWO), 400, matrix.PAGE), chunk_tokens=64)
  return runner, generate(runner, params, TWO, max_new_tokens=steps)


@pytest.mark.parametrize("shared", [True, False])
def test_strict_is_the_bare_policy(shared):
  """Token for token, while blocks go to the host and come back."""
  bare, found = answer("resident")[1], answer(f"op_block{RHO}:host_blocks=1.0:shared={shared}")[1]
  assert found.tokens == bare.tokens
  partition, moved = found.cache.store_state.partition, totals(found.cache)
  demoted_, back = (int(np.asarray(x).sum()) for x in (partition.demoted, partition.back))
  assert demoted_ > 1000 and back > 100, (demoted_, back)
  # Of a block that came back all tokens were moved, of which at least theta were missing.
  lacking = moved["selected"] - moved["resident"]
  assert lacking < moved["moved"] <= lacking + back - back * 5 // matrix.PAGE
  check_partition(found.cache)


def check_partition(cache) -> int:
  """Every block on the host holds, to the bit, what the ordered pages have of its tokens."""
  state, checked = cache.store_state, 0
  for row, (group, pools) in enumerate(zip(state.group, state.partition.pools, strict=True)):
    held, table = state.partition.blocks[group], np.asarray(cache.table[row]).reshape(-1)
    tokens, owner = np.asarray(held.tokens), np.asarray(held.owner)
    assert (tokens[owner < 0] == -1).all()
    c, lengths = tokens.shape[1], np.repeat(np.asarray(cache.lengths), cache.table.shape[2])
    block, slot = np.nonzero(tokens >= 0)
    t, x = tokens[block, slot], owner[block]
    assert (t < lengths[x]).all()  # of rows that are there
    page = table[x * cache.table.shape[3] + t // c]
    for original, kept in zip(cache.host, pools, strict=True):
      there = np.asarray(original)[page, t % c]
      np.testing.assert_array_equal(np.asarray(kept)[block, slot], there)
    checked += len(block)
  return checked


def check_pool(cache) -> None:
  """The same of the blocks of the device, those that came back among them, and of the ordered page
  of each list, which a row brings along when it begins."""
  state, table = cache.store_state, np.asarray(cache.table[0]).reshape(-1)
  tokens, owner = (np.asarray(x) for x in state.blocks[0][:2])
  block, slot = np.nonzero(tokens >= 0)
  c, held = tokens.shape[1], tokens[block, slot]
  in_blocks = np.divmod(np.asarray(in_pool(state, jnp.asarray(block * c + slot))), c)
  _, within, there = (np.asarray(x) for x in ordered_page(cache, cache.lengths))
  x, slot = np.nonzero(there)
  ordered = np.asarray(ordered_pages(state))[x], slot
  for at, lists, t in ((in_blocks, owner[block], held), (ordered, x, within[there])):
    page = table[lists * cache.table.shape[3] + t // c]
    for original, pool in zip(cache.host, state.pools[0], strict=True):
      np.testing.assert_array_equal(np.asarray(pool)[at], np.asarray(original)[page, t % c])


@pytest.mark.parametrize("shared", [True, False])
def test_rows_come_and_go(shared):
  """Served requests that begin, end and sit steps out; all places hold what they say, and at the
  end nothing is left. What no one wrote is NaN."""
  config = CacheConfig(SLOTS, ROOM, PAGE)
  store = f"op_block{RHO}:host_blocks=0.5:shared={shared}"
  runner = prepare(model_of_names(), selecting(), store, config, chunk_tokens=64)
  backend = JaxBackend(runner, jnp.zeros(1))
  backend.cache = matrix.filled_cache(backend.cache, np.nan)
  server = Server(backend, VirtualClock(), queue_limit=4)
  rng, seen = random.Random(3), 0
  for step in range(400):
    if rng.random() < 0.12:
      prompt = (rng.randrange(COLORS),) * rng.randint(1, 60)
      server.submit(Request(step, prompt, rng.randint(1, 36)))
    elif rng.random() < 0.02 and server.running:
      server.cancel(rng.choice(list(server.running)))
    server.step()
    server.take_ended()
    if step % 4 == 0:
      seen += check_partition(backend.cache)
      check_pool(backend.cache)
  partition = backend.cache.store_state.partition
  back = int(np.asarray(partition.back).sum())
  assert seen > 1000 and back > 300, (seen, back)
  while server.busy:
    server.cancel(next(iter(server._live)))
  (held,) = backend.cache.store_state.partition.blocks
  assert (np.asarray(held.owner) == -1).all() and (np.asarray(held.tokens) == -1).all()
  assert held.owner.shape[0] % (SLOTS * HEADS) == 0


def test_what_unused_places_hold_changes_nothing():
  runner, _ = answer(f"op_block{RHO}:host_blocks=1.0:shared=True")
  rows = matrix.tokens_of((154, 85), seed=5)
  args = runner, matrix.tiny_model(matrix.SHAPES[0], 2)[1], rows, (130, 61)
  poisoned = jax.jit(poison_recalled)
  zeros, nans = (
    matrix.teacher_forced(*args, between=partial(poisoned, value=np.float32(value)))
    for value in (0, np.nan)
  )
  partition = nans.cache.store_state.partition
  assert np.asarray(partition.back).sum() > 0 and np.isnan(partition.pools[0].keys).any()
  np.testing.assert_array_equal(nans.logits, zeros.logits)


def test_bytes_and_the_limit_of_what_can_be_pinned(monkeypatch):
  model, _ = matrix.tiny_model(matrix.SHAPES[0], 2)
  policy = make_policy("infinigen", budget_tokens=32, dense_layers=1)
  config = CacheConfig(2, 400, matrix.PAGE)
  without, with_ = (
    prepare(model, policy, f"op_block{RHO}:host_blocks={size}", config) for size in (0.0, 1.5)
  )
  shape = matrix.SHAPES[0]
  lists, token = 2 * shape.kv_heads, 2 * shape.head_dim * 4
  places = lists * 3  # two blocks of the device for each list
  more = with_.decode_bytes.host - without.decode_bytes.host
  assert more == places * matrix.PAGE * token
  assert with_.decode_bytes.keys_values == without.decode_bytes.keys_values
  assert with_.decode_bytes.metadata > without.decode_bytes.metadata
  assert with_.prefill_bytes == without.prefill_bytes
  needed = with_.decode_bytes.host
  monkeypatch.setattr(host, "limit_bytes", lambda backend: needed - 1)
  with pytest.raises(host.HostPoolsTooLarge, match=f"need {needed} bytes"):
    prepare(model, policy, with_.store.name, config)
  prepare(model, policy, without.store.name, config)


def test_off_it_is_not_there():
  runner, found = answer(f"op_block{RHO}:host_blocks=0.0", steps=4)
  assert found.cache.store_state.partition is None
  assert cache_bytes(abstract_caches(runner)[1]).host == runner.prefill_bytes.host


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ("host_blocks=-0.5", "host_blocks -0.5 must be at least 0"),
    ("host_blocks=nan", "host_blocks is 'nan', expected float"),
    ("host_blocks=1:filling=refill", "host_blocks 1 needs filling 'aggregate': with 'refill'"),
    ("host_blocks=1:filling=by_page", "needs filling 'aggregate': with 'by_page'"),
    ("host_blocks=1:exclusive=True", "host_blocks 1 excludes exclusive"),
    ("host_blocks=1:reuse=False", "needs reuse: without it"),
  ],
)
def test_what_is_refused(options, message):
  with pytest.raises(ValueError, match=message) as error:
    make_store(f"op_block:{options}")
  assert "\n" not in str(error.value)
