"""The step's plan against Python sets, what it conserves, and what it refuses."""

from __future__ import annotations

from functools import cache

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.opkv.apart import by_list, no_blocks_apart
from kvjax.opkv.blocks import Blocks, no_blocks, release
from kvjax.opkv.sub_block_manager import Plan, Settings, checked, plan
from tests.kvjax.opkv_by_hand import Ledger, Pool

PAGE, CAPACITY, HEADS, LISTS = 4, 32, 2, 4
BUDGET = 8  # tokens of a list
ROOMY, TIGHT, BY_PAGE = 18, 9, 40  # blocks of a pool; LISTS * BUDGET / PAGE = 8 always suffice

VARIANTS = {
  "literal": (ROOMY, Settings(5, HEADS, eviction="fifo", recheck=False)),
  "greedy": (ROOMY, Settings(5, HEADS, eviction="lru")),
  "greedy, strict": (TIGHT, Settings(3, HEADS, eviction="s3fifo", strict=True)),
  "half a block": (TIGHT, Settings(4, HEADS, rho=0.5)),
  "narrow": (ROOMY, Settings(2, HEADS, rho=0.5, recheck=False)),
  "no aggregation": (BY_PAGE, Settings(8, HEADS, rho=0.5, filling="by_page")),
  "no hot reuse": (ROOMY, Settings(2, HEADS, eviction="fifo", reuse=False)),
  "refill": (ROOMY, Settings(ROOMY, HEADS, filling="refill")),
  "exclusive": (ROOMY, Settings(5, HEADS, exclusive=True)),
  "exclusive, strict": (TIGHT, Settings(3, HEADS, eviction="fifo", strict=True, exclusive=True)),
  "exclusive, refill": (ROOMY, Settings(3, HEADS, filling="refill", exclusive=True)),
  "refill, tight": (TIGHT, Settings(2, HEADS, filling="refill", strict=True)),
}


@cache
def compiled(variant: str):
  """An empty pool, and the plan and the release that are compiled for it."""
  n, static = VARIANTS[variant]
  empty = no_blocks(n, PAGE, checked(static).order, LISTS, CAPACITY)
  return empty, jax.jit(lambda blocks, s, newest: plan(blocks, s, static, newest)), jax.jit(release)


def as_mask(selected) -> jax.Array:
  mask = np.zeros((len(selected), CAPACITY), bool)
  for x, tokens in enumerate(selected):
    mask[x, list(tokens)] = True
  return jnp.asarray(mask)


def lists_of(ids) -> jax.Array:
  return jnp.asarray(np.isin(np.arange(LISTS), list(ids)))


def walk(rng, steps: int, budget: int = BUDGET):
  """Selections that overlap from step to step, with newest pages that grow, and rows that end."""
  length, wanted = rng.integers(8, 20, LISTS // HEADS), [set() for _ in range(LISTS)]
  for _ in range(steps):
    ended = [row for row in range(LISTS // HEADS) if rng.random() < 0.06 or length[row] >= CAPACITY]
    for row in ended:
      length[row] = rng.integers(8, 20)
      for x in range(row * HEADS, (row + 1) * HEADS):
        wanted[x] = set()
    length += 1
    for x in range(LISTS):
      stays = [t for t in sorted(wanted[x]) if rng.random() < 0.7]
      size = int(rng.integers(0, budget + 1))
      wanted[x] = set([*stays, *rng.permutation(length[x // HEADS]).tolist()][:size])
    newest = np.repeat(length // PAGE * PAGE, HEADS)
    gone = [x for row in ended for x in range(row * HEADS, (row + 1) * HEADS)]
    yield [set(s) for s in wanted], newest.astype(np.int32), gone


def check_moves(planned: Plan, step) -> None:
  count = int(planned.count)
  source, target = np.asarray(planned.source)[:count], np.asarray(planned.target)[:count]
  pairs = zip(source, target, strict=True)
  moves = [(s // CAPACITY, s % CAPACITY, t // PAGE, t % PAGE) for s, t in pairs]
  assert sorted(moves) == sorted(step.moves)
  assert planned.moved.tolist() == [sum(m[0] == x for m in moves) for x in range(LISTS)]


def check_visible(planned: Plan, step, n: int) -> None:
  tokens, mask = np.asarray(planned.blocks.tokens), np.asarray(planned.mask)
  for x, attended in enumerate(np.asarray(planned.attended)):
    real = [b for b in attended if b < n]
    assert real == step.hits[x] + step.new[x]
    assert not mask[x, len(real) :].any()
    shown = [
      (int(tokens[b, slot]), (int(b), slot))
      for place, b in enumerate(real)
      for slot in np.flatnonzero(mask[x, place]).tolist()
    ]
    assert len(shown) == len(dict(shown))  # no token twice
    assert dict(shown) == step.visible[x]


def check_conserved(blocks: Blocks) -> None:
  """Every slot of a block that is owned holds a token or nothing; free blocks hold nothing."""
  tokens, owner = np.asarray(blocks.tokens), np.asarray(blocks.owner)
  assert ((owner >= -1) & (owner < LISTS)).all()
  assert ((tokens >= -1) & (tokens < CAPACITY)).all()
  assert (tokens[owner < 0] == -1).all()
  assert (tokens[owner >= 0] >= 0).any(axis=-1).all()
  ordered = np.sort(tokens, axis=-1)
  assert ((ordered[:, 1:] != ordered[:, :-1]) | (ordered[:, 1:] < 0)).all()  # once in a block


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_steps_as_by_hand(variant, seed):
  n, static = VARIANTS[variant]
  blocks, step_of, free = compiled(variant)
  pool = Pool(n, PAGE, LISTS, static)
  for wanted, newest, ended in walk(np.random.default_rng(seed), steps=12):
    blocks = free(blocks, lists_of(ended))
    pool.release(ended)
    planned = step_of(blocks, as_mask(wanted), jnp.asarray(newest))
    step = pool.step(wanted, newest)
    blocks = planned.blocks
    assert not planned.too_small and not step.too_small
    assert np.asarray(blocks.tokens).tolist() == pool.tokens
    assert np.asarray(blocks.owner).tolist() == pool.owner
    assert planned.hits.tolist() == [len(hits) for hits in step.hits]
    assert planned.new.tolist() == [len(new) for new in step.new]
    assert int(planned.evicted) == len(step.evicted)
    check_moves(planned, step)
    check_visible(planned, step, n)
    check_conserved(blocks)


@pytest.mark.parametrize("variant", ["greedy, strict", "refill, tight", "exclusive, strict"])
def test_ten_thousand_events_conserve_and_mix_up_nothing(variant):
  """Rows arrive, grow, select and end; a pool of numbers is kept beside, as the store would."""
  n, _ = VARIANTS[variant]
  blocks, step_of, free = compiled(variant)
  content = np.full((n, PAGE), -1)  # x*T + t of the key that lies there
  events = 0
  for wanted, newest, ended in walk(np.random.default_rng(11), steps=1500):
    events += len(ended) + sum(map(bool, wanted))
    blocks = free(blocks, lists_of(ended))
    planned = jax.device_get(step_of(blocks, as_mask(wanted), newest))
    blocks, count = planned.blocks, planned.count
    tokens, owner = blocks.tokens, blocks.owner
    targets = planned.target[:count]
    assert len(np.unique(targets)) == count  # no slot twice
    content.reshape(-1)[targets] = planned.source[:count]
    names = owner[:, None] * CAPACITY + tokens
    assert ((tokens < 0) | (content == names)).all()
    assert (owner < 0).sum() + (owner >= 0).sum() == n and (tokens[owner < 0] == -1).all()
    attended = planned.attended[planned.attended < n]
    assert len(np.unique(attended)) == len(attended)  # no block for two lists
    shown = np.sort(names.take(planned.attended, 0, mode="clip")[planned.mask])
    here = [x * CAPACITY + t for x, s in enumerate(wanted) for t in s if t < newest[x]]
    assert shown.tolist() == sorted(here)  # strict: what is selected, once, and nothing else
    events += int(planned.hits.sum() + planned.new.sum())
  assert events > 10_000
  blocks = free(blocks, lists_of(range(LISTS)))
  assert (blocks.owner == -1).all() and (blocks.tokens == -1).all()


def test_exclusive_blocks_share_no_token_and_greedy_ones_do():
  twice = dict.fromkeys(("greedy", "exclusive", "exclusive, refill"), 0)
  for variant in twice:
    blocks, step_of, _ = compiled(variant)
    for wanted, newest, _ in walk(np.random.default_rng(3), steps=40):
      blocks = step_of(blocks, as_mask(wanted), jnp.asarray(newest)).blocks
      tokens, owner = np.asarray(blocks.tokens), np.asarray(blocks.owner)
      twice[variant] += int((tokens >= 0).sum()) - len(resident(blocks))
      assert (tokens[owner < 0] == -1).all()
  assert twice.pop("greedy") > 0 and not any(twice.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_that_is_selected_is_visible_and_strict_shows_no_more(variant):
  static = VARIANTS[variant][1]
  blocks, step_of, _ = compiled(variant)
  more = 0
  for wanted, newest, _ in walk(np.random.default_rng(5), steps=40):
    planned = step_of(blocks, as_mask(wanted), jnp.asarray(newest))
    blocks = planned.blocks
    for x, tokens in enumerate(wanted):
      here = {t for t in tokens if t < newest[x]}
      shown = np.asarray(blocks.tokens).take(planned.attended[x], 0, mode="clip")[planned.mask[x]]
      assert here <= set(shown.tolist())
      more += len(shown) - len(here)
  assert (more == 0) == (static.strict or not static.reuse)


def test_refilling_moves_what_is_not_there_and_nothing_else():
  blocks, step_of, _ = compiled("refill")
  there = [set() for _ in range(LISTS)]
  rng = np.random.default_rng(0)
  for _ in range(30):
    wanted = [set(rng.choice(CAPACITY, BUDGET, replace=False).tolist()) for _ in range(LISTS)]
    planned = step_of(blocks, as_mask(wanted), jnp.full(LISTS, CAPACITY, jnp.int32))
    assert planned.moved.tolist() == [len(s - t) for s, t in zip(wanted, there, strict=True)]
    blocks = planned.blocks
    tokens, owner = np.asarray(blocks.tokens), np.asarray(blocks.owner)
    there = [set(tokens[owner == x].ravel().tolist()) for x in range(LISTS)]


@pytest.mark.parametrize("variant", ["literal", "greedy, strict", "refill"])
def test_a_pool_that_is_too_small_changes_nothing(variant):
  n, _ = VARIANTS[variant]
  blocks, step_of, _ = compiled(variant)
  newest = jnp.full(LISTS, CAPACITY, jnp.int32)
  some = [set(range(x, x + 8)) for x in range(LISTS)]
  blocks = step_of(blocks, as_mask(some), newest).blocks
  planned = step_of(blocks, as_mask([set(range(CAPACITY))] * LISTS), newest)
  assert planned.too_small
  assert int(planned.count) == 0 and not planned.mask.any() and (planned.attended == n).all()
  assert np.array_equal(planned.blocks.tokens, blocks.tokens)
  assert np.array_equal(planned.blocks.owner, blocks.owner)
  again = step_of(planned.blocks, as_mask(some), newest)
  assert not again.too_small and int(again.count) == 0  # all is still there


def resident(blocks: Blocks) -> set[tuple[int, int]]:
  """(list, token) of all that lies in a pool."""
  tokens, owner = np.asarray(blocks.tokens), np.asarray(blocks.owner)
  return {(int(owner[b]), int(tokens[b, s])) for b, s in zip(*np.nonzero(tokens >= 0), strict=True)}


@pytest.mark.parametrize("variant", ["literal", "no hot reuse", "refill, tight"])
def test_states_of_tokens(variant):
  """Rows hand over, fetch, recall and free; what the pool holds fits the ledger at every moment."""
  blocks, step_of, free = compiled(variant)
  ledger, written = Ledger(), [0] * LISTS
  for wanted, newest, ended in walk(np.random.default_rng(2), steps=60):
    for x in ended:
      ledger.free(x)
      written[x] = 0
    blocks = free(blocks, lists_of(ended))
    ledger.recall(resident(blocks))
    for x in range(LISTS):
      end = int(newest[x]) + PAGE
      ledger.transfer(x, range(written[x], end))
      written[x] = end
    planned = step_of(blocks, as_mask(wanted), newest)
    blocks = planned.blocks
    ledger.fetch(divmod(int(s), CAPACITY) for s in planned.source[: int(planned.count)])
    ledger.recall(resident(blocks))
  for x in range(LISTS):
    ledger.free(x)
  blocks = free(blocks, lists_of(range(LISTS)))
  ledger.close(resident(blocks))


def test_the_ledger_finds_misuse():
  ledger = Ledger()
  ledger.transfer(0, range(4))
  ledger.fetch([(0, 1)])
  with pytest.raises(AssertionError, match="in flight"):
    ledger.free(0)
  ledger.recall({(0, 1)})
  with pytest.raises(AssertionError, match="leaked"):
    ledger.close(set())
  ledger.free(0)
  with pytest.raises(AssertionError, match="freed before"):
    ledger.free(0)
  with pytest.raises(AssertionError, match="not on the host"):
    ledger.fetch([(0, 1)])
  with pytest.raises(AssertionError, match="belong to nobody"):
    ledger.recall({(0, 1)})
  with pytest.raises(AssertionError, match="leaked"):
    ledger.close({(0, 1)})


def test_the_newest_page_is_read_elsewhere():
  blocks, step_of, _ = compiled("literal")
  newest = jnp.asarray([8, 8, 12, 12], jnp.int32)
  planned = step_of(blocks, as_mask([{1, 7, 8, 9}, {8, 9, 10, 11}, {11, 12}, {0}]), newest)
  assert planned.moved.tolist() == [2, 0, 1, 1]
  assert np.asarray(planned.mask).sum(axis=(1, 2)).tolist() == [2, 0, 1, 1]


def test_a_row_below_half_of_its_share_is_spared():
  """Row 1 holds two of 18 blocks, older than all others; its share is nine."""
  blocks, step_of, _ = compiled("literal")
  newest = jnp.full(LISTS, CAPACITY, jnp.int32)
  blocks = step_of(blocks, as_mask([set(), set(), {0}, {1}]), newest).blocks
  for start in range(0, 60, 4):
    some = {t % CAPACITY for t in range(start, start + 8)}
    blocks = step_of(blocks, as_mask([some, some, set(), set()]), newest).blocks
    assert (np.asarray(blocks.owner) >= 2).sum() == 2
  assert (np.asarray(blocks.owner) >= 0).all()  # the pool was full long ago


@pytest.mark.parametrize("eviction", ["fifo", "lru", "s3fifo"])
@pytest.mark.parametrize("filling", ["aggregate", "by_page", "refill"])
def test_lists_with_a_pool_each_are_planned_as_if_alone(filling, eviction):
  """What of it is not fit for one list (its selection is too large) is not planned, of it alone."""
  width = 8 if filling == "by_page" else 3
  exclusive = eviction == "lru"  # as well as not: the plans differ, and this must hold for both
  alone = Settings(width, 1, rho=0.5, eviction=eviction, filling=filling, exclusive=exclusive)
  apart = alone._replace(heads=HEADS, shared=False)
  order = alone.order
  blocks = no_blocks_apart(width, PAGE, order, LISTS, CAPACITY)
  pools = [no_blocks(width, PAGE, order, 1, CAPACITY) for _ in range(LISTS)]
  plan_apart = jax.jit(lambda blocks, s, newest: plan(blocks, s, apart, newest))
  plan_one = jax.jit(lambda blocks, s, newest: plan(blocks, s, alone, newest))
  refused = 0
  for selected, newest, _ in walk(np.random.default_rng(0), 40, budget=13):
    mask = as_mask(selected)
    step = plan_apart(blocks, mask, newest)
    moves, ones = [], []
    for x in range(LISTS):
      one = plan_one(pools[x], mask[x : x + 1], newest[x : x + 1])
      count = int(one.count)
      moves += zip(
        np.asarray(one.source[:count]) + x * CAPACITY,
        np.asarray(one.target[:count]) + x * width * PAGE,
        strict=True,
      )
      pools[x] = one.blocks
      ones.append(one)
    count = int(step.count)
    assert moves == list(zip(*(np.asarray(ids)[:count] for ids in step[1:3]), strict=True))
    assert bool(step.too_small) == any(bool(one.too_small) for one in ones)
    refused += bool(step.too_small)
    blocks = step.blocks
    for x, one in enumerate(ones):
      np.testing.assert_array_equal(by_list(step.visible, LISTS)[x], one.visible)
      np.testing.assert_array_equal(by_list(blocks.tokens, LISTS)[x], one.blocks.tokens)
      np.testing.assert_array_equal(by_list(blocks.owner, LISTS)[x] >= 0, one.blocks.owner >= 0)
      assert (int(step.hits[x]), int(step.new[x])) == (int(one.hits[0]), int(one.new[0]))
  assert refused > 0 or filling == "by_page"


def test_what_is_released_is_free_for_others():
  blocks, step_of, free = compiled("greedy")
  newest = jnp.full(LISTS, CAPACITY, jnp.int32)
  blocks = step_of(blocks, as_mask([set(range(x, x + 8)) for x in range(LISTS)]), newest).blocks
  blocks = free(blocks, lists_of([0, 1]))
  assert (np.asarray(blocks.owner) >= 0).sum() == 4
  check_conserved(blocks)
  blocks = free(blocks, lists_of([0, 1]))  # they hold nothing any more: nothing changes
  blocks = free(blocks, lists_of([2, 3]))
  assert (blocks.owner == -1).all() and (blocks.tokens == -1).all()
  planned = step_of(blocks, as_mask([set(range(8))] * LISTS), newest)
  assert planned.new.tolist() == [2] * LISTS and int(planned.evicted) == 0


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"rho": 0.0}, r"rho 0.0 is not in \(0, 1\]"),
    ({"rho": 1.01}, r"rho 1.01 is not in \(0, 1\]"),
    ({"eviction": "random"}, "unknown eviction 'random'; expected one of fifo, lru, s3fifo"),
    ({"filling": "no"}, "unknown filling 'no'; expected one of aggregate, by_page, refill"),
    ({"width": 0}, "width 0 must be at least 1"),
    ({"heads": 0}, "heads 0 must be at least 1"),
  ],
)
def test_bad_settings(change, message):
  with pytest.raises(ValueError, match=message):
    checked(Settings(4, 2)._replace(**change))


def test_shapes_that_do_not_fit():
  blocks, static = compiled("literal")[0], VARIANTS["literal"][1]
  with pytest.raises(ValueError, match="30 tokens are not whole pages of 4"):
    plan(blocks, jnp.zeros((LISTS, 30), bool), static)
  with pytest.raises(ValueError, match="3 lists are not rows of 2 heads"):
    plan(blocks, jnp.zeros((3, CAPACITY), bool), static)
