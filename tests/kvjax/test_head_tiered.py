"""The store head_tiered: where pages are, what moves, the bytes that it takes, and the same tokens.

What holds of every store is in test_laws.py and test_host_stores.py. Here the store is also driven
without a model, by random selections, beside sets in plain Python.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, ModelConfig, generate, make_policy, prepare
from kvjax.cache import TOO_SMALL, allocate, host
from kvjax.cache.paged import Pools
from kvjax.stores import head_tiered
from kvjax.stores.head_tiered import HEAD_TIERED
from kvjax.stores.traffic import totals
from kvjax.types import SELECT, LayerPlan, Selection
from models import build
from tests.kvjax import matrix
from tests.kvjax.matrix import LENGTHS, PAGE, ROWS, SHAPES

B, K, D, C, PAGES, BUDGET = 4, 3, 2, 8, 9, 3  # of the store alone; the budget in pages
STARTS = (1, 16, 47, 31)
STEPS = 25  # the longest row fills its capacity, all go over page boundaries
TIERED = ((0, 2), (0, 1, 2), ())  # KV heads of three layers
PLAN = LayerPlan((SELECT,) * 3, on_device=((1,), (), (0, 1, 2)))
MODEL = ModelConfig(
  **{"family": "llama", "num_layers": 3, "num_heads": K, "num_kv_heads": K, "head_dim": D},
  **{"embed_dim": 8, "ffn_dim": 8, "vocab_size": 8, "max_tokens": 64},
)
CONFIG = CacheConfig(B, PAGES * C, C)
POLICY = make_policy("quest", budget_tokens=BUDGET * C, page_size=C)


@jax.jit
def sealed(numbers, lengths):
  """The cache after a prompt, of f[2, layers, B, K, PAGES, C, D] numbers that it left."""
  cache = allocate(MODEL, CONFIG, PLAN, on_host=True, stay=PLAN.on_device)
  pools = Pools(
    *(pool.at[cache.table].set(x) for pool, x in zip(cache.pools, numbers, strict=True))
  )
  kept = Pools(*(pool[: cache.host.num_pages] for pool in pools))
  on_host = jax.tree.map(lambda pool: jax.device_put(pool, jax.memory.Space.Host), kept)
  cache = cache.replace(pools=pools, host=on_host, lengths=lengths)
  return HEAD_TIERED.seal(cache, POLICY, CONFIG, PLAN)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def step(early, cache, tokens, pages, masks):
  """A token a row through all layers; early: the recall begins before the layer's token is there.

  Returns:
    What each layer was given to read, and the cache.
  """
  lengths, read = cache.lengths + 1, []
  slots = jnp.broadcast_to(cache.lengths[:, None], (B, K))
  for row, ((k, v), page, mask) in enumerate(zip(tokens, pages, masks, strict=True)):
    selection = Selection(page, mask[..., None])
    if early:
      ticket, cache = HEAD_TIERED.fetch(cache, row, selection, lengths)
    cache = HEAD_TIERED.append(cache, row, k, v, cache.lengths, slots)
    if not early:
      ticket, cache = HEAD_TIERED.fetch(cache, row, selection, lengths)
    recalled, cache = HEAD_TIERED.recall(cache, row, ticket, lengths)
    read.append((recalled.pages, recalled.mask, *recalled.pools))
  return read, cache.replace(lengths=lengths)


def selections(rng, lengths, wanted=BUDGET):
  """For each layer, row and head some pages, mostly with the newest; unused places are masked."""
  pages = np.zeros((3, B, K, wanted), np.int32)
  masks = np.zeros(pages.shape, bool)
  for at in np.ndindex(3, B, K):
    newest = (lengths[at[1]] - 1) // C
    chosen = rng.permutation(newest + 1)[: rng.integers(1, wanted + 1)]
    if newest not in chosen and rng.random() < 0.8:
      chosen[0] = newest
    pages[at][: len(chosen)], masks[at][: len(chosen)] = np.sort(chosen), True
  return pages, masks


def by_hand(table, wanted, length, null):
  """Table of one list after a step, and how many pages were copied."""
  begins = {length // C} if length % C == 0 and length < PAGES * C else set()
  here = {page for page, place in enumerate(table) if place != null}
  came, after = sorted((wanted | begins) - here), list(table)
  for page, left in zip(came, sorted(here - wanted - begins), strict=False):
    after[page], after[left] = table[left], null
  return after, len({*came} - begins)


def add_counts(counts, wanted, table, length, null):
  """What a list selected and what of it was there, in tokens and in pages."""
  sizes = {page: min(C, length - page * C) for page in wanted}
  here = {page for page in wanted if table[page] != null}
  counts["selected"] += sum(sizes.values())
  counts["resident"] += sum(sizes[page] for page in here)
  counts["pages_used"] += len(wanted)
  counts["pages_hit"] += len(here)


def check_owners(layer, tables, null):
  """Of tables [B, K, P]: a page of the pool is of one list, which has as many as it should."""
  owned = [np.sort(row[row != null]) for row in tables.reshape(-1, PAGES)]
  for x, pages in enumerate(owned):
    assert len(pages) == (BUDGET + 1 if x % K in TIERED[layer] else PAGES)
  np.testing.assert_array_equal(np.sort(np.concatenate(owned)), np.arange(null))


def check_contents(pools, places, tokens):
  """Tokens f[2, n, D] of a list are in the pages of both pools, to the bit, where they have one."""
  for page, place in enumerate(places[: -(-tokens.shape[1] // C)]):
    for pool, whole in zip(pools, tokens, strict=True):
      if place < len(pool):
        part = whole[page * C : (page + 1) * C]
        np.testing.assert_array_equal(np.asarray(pool[place])[: len(part)], part)


def pages_read(ids, mask, null):
  """Of each row and head the pages of the pool that attention sees; no ids are all, in order."""
  mask = np.asarray(mask).any(axis=-1)
  ids = np.arange(null).reshape(mask.shape) if ids is None else np.asarray(ids)
  return [
    [of[seen].tolist() for of, seen in zip(*row, strict=True)]
    for row in zip(ids, mask, strict=True)
  ]


@pytest.mark.parametrize("early", [False, True], ids=["after the token", "before it"])
def test_random_steps_beside_sets(early):
  """Places, contents and counts of every list after every step; no token is ever lost."""
  rng, lengths = np.random.default_rng(5), np.array(STARTS)
  truth = rng.normal(size=(2, 3, B, K, PAGES * C, D)).astype(np.float32)
  known = np.where(np.arange(PAGES * C)[:, None] < lengths[:, None, None, None], truth, np.nan)
  state = sealed(known.reshape(2, 3, B, K, PAGES, C, D), jnp.asarray(lengths, jnp.int32))
  tables = [np.array(table) for table in state.store_state.tables]
  counts = dict.fromkeys(("selected", "resident", "moved", "pages_used", "pages_hit"), 0)
  for _ in range(STEPS):
    pages, masks = selections(rng, lengths + 1)
    new = np.stack([truth[:, :, b, :, n] for b, n in enumerate(lengths)], axis=2)
    read, state = step(early, state, tuple(new.swapaxes(0, 1)), pages, masks)
    lengths = lengths + 1
    kept = [np.asarray(jax.device_put(x, jax.memory.Space.Device)) for x in state.host]
    on_host = np.asarray(state.table)
    assert len(kept[0]) == sum(map(len, TIERED)) * B * PAGES
    for layer, (ids, mask, *pools) in enumerate(read):
      null, pools = len(pools[0]), [*map(np.asarray, pools)]
      after = np.array(state.store_state.tables[layer])
      check_owners(layer, after, null)
      for b, head in np.ndindex(B, K):
        wanted = set(pages[layer, b, head][masks[layer, b, head]].tolist())
        before, places = tables[layer][b, head], after[b, head]
        add_counts(counts, wanted, before, lengths[b], null)
        tokens = truth[:, layer, b, head, : lengths[b]]
        check_contents(pools, places, tokens)
        if head in TIERED[layer]:
          expected, moved = by_hand(before, wanted, lengths[b], null)
          counts["moved"] += C * moved
          assert (on_host[layer, b, head] < len(kept[0])).all()
          check_contents(kept, on_host[layer, b, head], tokens)
        else:
          expected = before
          assert (on_host[layer, b, head] >= len(kept[0])).all(), (
            "it has a place that is never used"
          )
        np.testing.assert_array_equal(places, expected)
        read_pages = pages_read(ids, mask, null)[b][head]
        assert sorted(read_pages) == sorted(places[[*wanted]].tolist())
        assert max(read_pages, default=0) < null, "the null page was read"
      tables[layer] = after
  found = totals(state)
  assert counts == {name: found[name] for name in counts}
  assert counts["moved"] > 0 and not np.asarray(state.overflow).any()


def test_the_newest_pages_stay_after_a_prompt():
  """And the place of the next one, so that a row that fits never moves anything."""
  state = sealed(jnp.zeros((2, 3, B, K, PAGES, C, D)), jnp.asarray(STARTS, jnp.int32)).store_state
  for layer, b, head in np.ndindex(3, B, K):
    live = np.flatnonzero(np.asarray(state.tables[layer][b, head]) < state.pools[layer].num_pages)
    first = max(-(-STARTS[b] // C) - BUDGET, 0) if head in TIERED[layer] else 0
    last = first + BUDGET if head in TIERED[layer] else PAGES - 1
    assert live.tolist() == list(range(first, last + 1))


def test_more_pages_than_slots_are_told():
  """A policy that breaks its budget: the row is marked, the others are as they would be."""
  truth = jnp.zeros((2, 3, B, K, PAGES, C, D))
  state = sealed(truth, jnp.asarray(STARTS, jnp.int32))
  wanted = BUDGET + 2
  pages = np.broadcast_to(np.arange(wanted, dtype=np.int32), (3, B, K, wanted))
  masks = np.zeros(pages.shape, bool)
  masks[..., 0] = masks[:, 2] = True
  state = step(False, state, ((jnp.zeros((B, K, D)),) * 2,) * 3, pages, masks)[1]
  assert np.asarray(state.overflow).tolist() == [0, 0, TOO_SMALL, 0]


def test_a_step_that_wants_nothing_new_does_no_work():
  """What would plan and copy is behind a branch; here it would leave NaN."""

  def spoil(pools, host, table, wanted, *rest):
    del host, rest
    return jax.tree.map(lambda x: x * jnp.nan, pools), table + 1, ~wanted, ~wanted.any(axis=1)

  pools = Pools(*(jnp.ones((4, C, D)) for _ in range(2)))
  table = jnp.array([[0, 1, 4], [2, 4, 3]], jnp.int32)
  run_it = jax.jit(partial(head_tiered.moved_if_any, spoil))
  for page, comes in ((1, False), (2, True)):
    wanted = jnp.zeros((2, 3), bool).at[0, page].set(True)
    args = pools, pools, table, wanted, wanted, jnp.arange(6)
    after, where, moved, lacking = run_it(*args)
    assert np.isnan(after.keys).all() == np.isnan(after.values).all() == comes
    assert (where == table).all() == (not comes)
    assert moved.any() == comes and not (lacking.any() and not comes)
  assert " conditional(" in run_it.lower(*args).compile().as_text()


SHAPE = SHAPES[0]
EVERY_HEAD = tuple((layer, head) for layer in range(3) for head in range(SHAPE.kv_heads))
PROMPTS = [list(row[:length]) for row, length in zip(ROWS, LENGTHS, strict=True)]
MANY = 40


@cache
def run(store, name, **options):
  """Tokens of `MANY` steps, and what was moved of each row."""
  options = {"budget_tokens": 48, "page_size": PAGE} | options
  policy = make_policy(name, **options)
  config = CacheConfig(len(LENGTHS), 180, PAGE)
  model, params = matrix.tiny_model(SHAPE)
  runner = prepare(model, policy, store, config, chunk_tokens=64)
  done = generate(runner, params, PROMPTS, max_new_tokens=MANY)
  moved = (
    [] if done.cache.host is None else np.asarray(done.cache.store_state.traffic.moved).sum(axis=1)
  )
  return done.tokens, [*map(int, moved)]


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("flexicache", {"unstable_heads": ((0, 1), (2, 0)), "period": 7}),
    ("flexicache_adaptive", {"longest": 16, "missed_mass": 0.05}),
    ("quest", {"budget_tokens": PAGE, "dense_layers": 0, "force_last": False}),
  ],
  ids=["over several periods", "periods of each head", "one page"],
)
def test_the_store_does_not_change_the_result(name, options):
  tokens, moved = run("head_tiered", name, **options)
  assert tokens == run("resident", name, **options)[0]
  assert min(moved[:3]) > 0
  if name != "quest":  # whose last row never outgrows the budget
    assert moved[3] == 0


def test_ranking_always_is_quest_and_with_every_head_on_the_device_nothing_moves():
  quest = run("resident", "quest", dense_layers=0)[0]
  for name, option in (("flexicache", "period"), ("flexicache_adaptive", "longest")):
    tokens, moved = run("head_tiered", name, **{option: 1})
    assert tokens == quest and min(moved[:3]) > 0
  tokens, moved = run("head_tiered", "flexicache", unstable_heads=EVERY_HEAD)
  assert tokens == quest and moved == [0] * len(LENGTHS)


def test_heads_that_stay_are_those_that_the_profile_names():
  model = matrix.tiny_model(SHAPE)[0].config
  for pairs, expected in (((), ((), (), ())), (((2, 1), (0, 1), (2, 0)), ((1,), (), (0, 1)))):
    policy = make_policy("flexicache", unstable_heads=pairs, period=1)
    assert policy.register(model, CacheConfig(1, 64))[0].on_device == expected


LLAMA_8B = {"num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMOLLM2 = {"num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}


@pytest.mark.parametrize("shape", [LLAMA_8B, SMOLLM2], ids=["llama-3.1-8b", "smollm2-135m"])
@pytest.mark.parametrize(("tokens", "budget"), [(20_000, 1024), (32_768, 2048), (1024, 2048)])
def test_device_bytes_are_the_closed_form(shape, tokens, budget):
  """u P + t (M + 1) pages, and t P on the host; nothing is allocated here, and law 8 holds what
  lives against this."""
  config = ModelConfig(
    family="llama", embed_dim=64, ffn_dim=64, vocab_size=64, max_tokens=tokens, **shape
  )
  model, cache = build(config), CacheConfig(2, tokens, PAGE, "bfloat16")
  heads = [(layer, h) for layer in range(config.num_layers) for h in range(config.num_kv_heads)]
  unstable = heads[::4]
  policy = make_policy("flexicache", budget_tokens=budget, unstable_heads=unstable)
  kept = prepare(model, policy, "head_tiered", cache).decode_bytes
  dense = prepare(model, make_policy("dense"), "resident", cache).decode_bytes
  page, pages = PAGE * config.head_dim * 2 * 2, tokens // PAGE
  slots = min(pages, budget // PAGE + 1)
  of_row = len(unstable) * pages + (len(heads) - len(unstable)) * slots
  assert kept.keys_values == 2 * of_row * page
  assert dense.keys_values == 2 * len(heads) * pages * page
  assert kept.host == 2 * (len(heads) - len(unstable)) * pages * page
  if tokens == 20_000:
    assert 1 - kept.keys_values / dense.total >= 0.70
    assert 1 - kept.total / dense.total >= 0.64  # with bounds, lists and tables


def test_pools_that_cannot_be_pinned_have_an_error_of_their_own(monkeypatch):
  monkeypatch.setattr(host, "limit_bytes", lambda backend: 1000)
  policy = make_policy("flexicache", budget_tokens=32)
  with pytest.raises(host.HostPoolsTooLarge, match="lower capacity_tokens, batch_size or"):
    prepare(matrix.tiny_model(SHAPE)[0], policy, "head_tiered", CacheConfig(1, 160))
