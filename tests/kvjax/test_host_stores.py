"""Stores with a host tier: the same tokens, exact counts of what was moved, and what is refused."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from kvjax import POLICIES, CacheConfig, generate, make_policy, prepare
from kvjax.cache import TOO_SMALL, host
from kvjax.engine import steps
from kvjax.engine.generate import check_overflow, decode, fill, prefill
from kvjax.engine.placing import STORES, make_store
from kvjax.opkv.op_block import in_pool
from kvjax.stores.traffic import totals
from tests.kvjax import matrix
from tests.kvjax.matrix import LENGTHS, NUM_STEPS, PAGE, ROWS, SHAPES

SHAPE = SHAPES[0]
PARAMS = matrix.tiny_model(SHAPE)[1]
PROMPTS = [list(row[:length]) for row, length in zip(ROWS, LENGTHS, strict=True)]
# Nothing of what a strict op_block recalls is visible but the selection.
EXACT = {
  "whole_page": ("",),
  "prefetch_all": ("",),
  "op_block": (
    ":strict=True:rho=0.3:eviction=lru",
    ":strict=True:recheck=False:eviction=fifo",
    ":strict=True:filling=by_page",
    ":strict=True:reuse=False",
    ":strict=True:filling=refill",
    ":strict=True:shared=False",
    ":strict=True:shared=False:filling=refill:eviction=lru",
    ":strict=True:shared=False:exclusive=True:eviction=fifo",
    ":strict=True:shared=False:filling=by_page:eviction=fifo",
  ),
  "token_slots": (":strict=True", ":strict=True:slack=1.5"),
  "head_tiered": ("",),
}
CASES = [
  (name, setting, f"{store}{options}")
  for name in POLICIES
  for setting in matrix.SETTINGS[name]
  for store, variants in EXACT.items()
  if store in make_policy(name, **matrix.SETTINGS[name][setting]).stores
  for options in (variants if (name, setting) == ("infinigen", "gentle") else variants[:1])
  if setting == "harsh" or (name == "infinigen" and store in ("op_block", "token_slots"))
]


def _prepare(name, setting, store, **changes):
  policy = make_policy(name, **matrix.SETTINGS[name][setting])
  config = CacheConfig(len(LENGTHS), matrix.CAPACITY, PAGE)
  model = matrix.model_of(matrix.Entry(name, setting, store), SHAPE)[0]
  return prepare(model, policy, store, config, chunk_tokens=64, **changes)


_runner = cache(_prepare)  # what is compiled for a runner is found again by the next test


def _params(runner):
  return matrix.tiny_model(SHAPE, runner.model.config.num_layers)[1]


def _tokens(runner):
  return generate(runner, _params(runner), PROMPTS, max_new_tokens=NUM_STEPS).tokens


@cache
def _tokens_of_the_device(name, setting):
  return _tokens(_runner(name, setting, "resident"))


@pytest.mark.parametrize(("name", "setting", "store"), CASES)
def test_tokens_are_those_of_the_device(name, setting, store):
  """Before the seal there is no store (`prefill_attend`), only pools on the host: what fills them
  is compiled for the first of them, but for a store some of whose heads stay on the device. That a
  store's own runner fills them is part of the laws of test_laws.py."""
  runner = _runner(name, setting, store)
  fills = runner if runner.store.tiers_heads else _runner(name, setting, "whole_page")
  assert fills.prefill_bytes == runner.prefill_bytes
  last, filled = fill(fills, _params(runner), PROMPTS)
  args = _params(runner), last, steps.sealed(runner, filled)
  found = decode(runner, *args, max_new_tokens=NUM_STEPS)
  assert found.tokens == _tokens_of_the_device(name, setting)


def test_every_recalling_policy_is_here():
  named = {name for name, _, _ in CASES}
  assert named == {name for name in POLICIES if "whole_page" in make_policy(name).stores}
  assert {store.partition(":")[0] for _, _, store in CASES} == {*STORES} - {"resident", "compact"}


@pytest.mark.parametrize("store", ["whole_page", "op_block:strict=True", "token_slots:strict=True"])
def test_layers_that_share_a_selection_and_others_that_share_another(store):
  """Two filter layers, each with two lazy ones; what the first chose is not for the second's."""
  model, params = matrix.tiny_model(SHAPE, 6)
  tokens = {}
  for name in ("resident", store):
    policy = make_policy("omnikv", budget_tokens=32, filter_layers=(0, 3), wait_layers=0)
    runner = prepare(model, policy, name, CacheConfig(4, matrix.CAPACITY, PAGE), chunk_tokens=64)
    assert runner.plan.shared == (0, 0, 2, 2)
    tokens[name] = generate(runner, params, PROMPTS, max_new_tokens=NUM_STEPS).tokens
  assert tokens[store] == tokens["resident"]


def test_more_is_visible_where_a_block_is_not_strict():
  """The other tokens of a block that serves again; the selection is always among them."""
  seen = {}
  for strict in (True, False):
    runner = _runner("infinigen", "gentle", f"op_block:strict={strict}")
    seen[strict] = matrix.teacher_forced(runner, PARAMS, ROWS, LENGTHS).attended
  layer = min(seen[True])  # the first that selects sees the same input in both
  assert (seen[False][layer] >= seen[True][layer]).all()
  assert seen[False][layer].sum() > seen[True][layer].sum()


@pytest.mark.parametrize("store", ["op_block", "op_block:shared=False"])
def test_what_came_back_is_what_was_made(store):
  """Every block on the device holds, to the bit, the keys and values of the tokens it names."""
  runner = _runner("infinigen", "gentle", store)
  cache = matrix.teacher_forced(runner, PARAMS, ROWS, LENGTHS).cache
  state, checked = cache.store_state, 0
  for row, (group, pools) in enumerate(zip(state.group, state.pools, strict=True)):
    blocks, table = state.blocks[group], np.asarray(cache.table[row]).reshape(-1)
    tokens, owner = np.asarray(blocks.tokens), np.asarray(blocks.owner)
    assert (owner[(tokens >= 0).any(axis=1)] >= 0).all()
    place = np.asarray(in_pool(state, np.arange(tokens.size))).reshape(tokens.shape)
    for block, slot in np.argwhere((tokens >= 0) & (owner >= 0)[:, None]):
      t, at = tokens[block, slot], divmod(place[block, slot], PAGE)
      page = table[owner[block] * cache.table.shape[3] + t // PAGE]
      for kept, recalled in zip(cache.host, pools, strict=True):
        np.testing.assert_array_equal(recalled[at], np.asarray(kept)[page, t % PAGE])
      checked += 1
  assert checked > 200


def test_bytes_moved_are_counted_exactly():
  """By hand: pages that hold a selected token, for each KV head, layer and step."""
  runner = _runner("omnikv", "harsh", "whole_page")
  run = matrix.teacher_forced(runner, PARAMS, ROWS, LENGTHS)
  pages = tokens = 0
  for seen in run.attended.values():  # bool[n, B, H, T]
    heads = seen[:, :, :: SHAPE.group]  # what a KV head's query heads attend to is the same
    padded = np.pad(heads, ((0, 0), (0, 0), (0, 0), (0, -heads.shape[-1] % PAGE)))
    pages += padded.reshape(*padded.shape[:3], -1, PAGE).any(axis=-1).sum()
    tokens += heads.sum()
  found = totals(run.cache)
  assert found["pages_used"] == pages and found["moved"] == pages * PAGE
  assert found["selected"] == tokens and found["resident"] == found["pages_hit"] == 0
  assert found["moved_bytes"] == pages * PAGE * 2 * SHAPE.head_dim * 4


def test_op_blocks_move_less_and_slots_of_single_tokens_least():
  moved = {}
  stores = "whole_page", "op_block:reuse=False", "op_block", "token_slots", "token_slots:slack=1.5"
  for store in stores:
    runner = _runner("infinigen", "gentle", store)
    moved[store] = totals(matrix.teacher_forced(runner, PARAMS, ROWS, LENGTHS).cache)["moved"]
  assert sorted(moved, key=moved.__getitem__) == [*moved][::-1]


def test_device_bytes_are_the_budget_and_the_slack():
  model, _ = matrix.tiny_model(SHAPE)
  config = CacheConfig(2, 4096, PAGE)
  policy = make_policy("omnikv", budget_tokens=1024, filter_layers=(0,), wait_layers=0)
  kept = prepare(model, policy, "op_block:slack=1.125", config).decode_bytes
  whole = prepare(model, policy, "resident", config).decode_bytes
  layer = 2 * SHAPE.kv_heads * 4096 * SHAPE.head_dim * 2 * 4  # of three, the first is dense
  assert whole.keys_values == 3 * layer and kept.host == 2 * layer
  lists, token = 2 * SHAPE.kv_heads, SHAPE.head_dim * 2 * 4
  assert kept.keys_values == layer + 2 * lists * (1152 + PAGE) * token


@pytest.mark.parametrize("store", ["op_block", "token_slots"])
def test_a_selection_too_large_for_the_device_is_told_and_changes_nothing(store):
  """The store believes in half of the budget. Blocks are shared, so that all rows hear of it; slots
  are not, and the last row has a token only."""
  policy = make_policy("omnikv", **matrix.SETTINGS["omnikv"]["harsh"])._replace(budget_tokens=PAGE)
  config = CacheConfig(len(LENGTHS), matrix.CAPACITY, PAGE)
  model, params = matrix.tiny_model(SHAPE, 2)
  runner = prepare(model, policy, store, config, chunk_tokens=64)
  cache = prefill(runner, params, PROMPTS)[1]
  name = "blocks" if store == "op_block" else "slots"
  before = jax.device_get(getattr(cache.store_state, name))
  tokens = np.array([row[n] for row, n in zip(ROWS, LENGTHS, strict=True)], np.int32)
  after = steps.decode_step(runner, params, cache, tokens)[1]
  small = (np.asarray(after.overflow) & TOO_SMALL) > 0
  assert small.tolist() == [True, True, True, store == "op_block"]
  lists = slice(None) if store == "op_block" else slice(3 * SHAPE.kv_heads)
  for old, new in zip(before, getattr(after.store_state, name), strict=True):
    np.testing.assert_array_equal(old.tokens[lists], new.tokens[lists])
  with pytest.raises(RuntimeError, match=r"too little room on the device.*slack"):
    check_overflow(runner, after)


def test_host_pools_lie_on_the_host_and_nothing_of_them_on_the_device():
  runner = _runner("quest", "harsh", "whole_page")
  cache = prefill(runner, _params(runner), PROMPTS)[1]
  assert {pool.sharding.memory_kind for pool in cache.host} == {"pinned_host"}
  assert cache.pools is None
  for leaf in jax.tree.leaves(cache.replace(host=None)):
    assert leaf.sharding.memory_kind == "device"


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("op_block:rho=0", "store 'op_block:rho=0': rho 0 is not in"),
    ("op_block:rho=1.5", "rho 1.5 is not in"),
    ("op_block:page_size=8", "store 'op_block' has no option page_size; it has rho, recheck"),
    ("op_block:slack=0.9", "slack 0.9 must be at least 1"),
    ("op_block:eviction=mru", "unknown eviction 'mru'; expected one of fifo, lru, s3fifo"),
    ("op_block:filling=all", "unknown filling 'all'"),
    ("token_slots:slack=0", "slack 0 must be at least 1"),
    ("op_block:pages=3", "store 'op_block' has no option pages; it has rho, recheck"),
    ("op_block:rho=much", "option rho is 'much', expected float"),
    ("whole_page:rho=0.5", "store 'whole_page' has no option rho; it has none"),
    ("nowhere", "unknown store 'nowhere'; expected one of resident"),
  ],
)
def test_stores_that_are_refused(spec, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_store(spec)
  assert "\n" not in str(caught.value)


def test_a_list_for_each_query_head_is_not_for_op_blocks():
  with pytest.raises(ValueError, match="cannot run on store 'op_block'"):
    _prepare("quest", "harsh", "op_block")


def test_a_host_pool_beyond_what_can_be_pinned(monkeypatch):
  monkeypatch.setattr(host, "limit_bytes", lambda backend: 1000)
  with pytest.raises(ValueError, match=r"host pools need .* bytes and at most 1000 can be pinned"):
    _prepare("quest", "harsh", "whole_page")
  monkeypatch.undo()
  monkeypatch.setenv(host.LIMIT_VARIABLE, "2")
  assert host.limit_bytes("gpu") == 2 * 2**30
  with pytest.raises(ValueError, match=f"raise {host.LIMIT_VARIABLE}"):
    host.check_fits(2**32, "gpu")


def test_devices_share_the_memory_that_can_be_pinned(monkeypatch):
  """Each of two devices has half of the rows, and both lie in the memory of one machine."""
  needed = _prepare("quest", "harsh", "whole_page").prefill_bytes.host
  mesh = jax.sharding.AbstractMesh((2, 1), ("data", "model"))
  monkeypatch.setattr(host, "limit_bytes", lambda backend: needed)
  assert _prepare("quest", "harsh", "whole_page", mesh=mesh).prefill_bytes.host * 2 == needed
  monkeypatch.setattr(host, "limit_bytes", lambda backend: needed - 1)
  with pytest.raises(host.HostPoolsTooLarge, match=f"need {needed} bytes"):
    _prepare("quest", "harsh", "whole_page", mesh=mesh)


def test_heads_that_are_placed_one_by_one_are_not_split():
  mesh = jax.sharding.AbstractMesh((1, 2), ("data", "model"))
  with pytest.raises(ValueError, match=r"'head_tiered' places each head .* splits rows only"):
    _prepare("flexicache", "harsh", "head_tiered", mesh=mesh)


def test_a_policy_that_selects_in_no_layer_has_nothing_on_the_host():
  config = CacheConfig(2, matrix.CAPACITY, PAGE)
  policy = make_policy("infinigen", budget_tokens=32)  # whose first two layers are dense
  with pytest.raises(ValueError, match=r"'infinigen' selects in none of 2; .*fewer dense") as error:
    prepare(matrix.tiny_model(SHAPE, 2)[0], policy, "op_block", config)
  assert "\n" not in str(error.value)


def test_two_requests_after_each_other_share_nothing():
  """A second prompt in a new cache of the same runner: as if the first had never been."""
  runner = _runner("infinigen", "gentle", "op_block")
  first, again = _tokens(runner), _tokens(runner)
  other = [row[::-1] for row in PROMPTS]
  generate(runner, PARAMS, other, max_new_tokens=4)
  assert first == again == _tokens(runner)
