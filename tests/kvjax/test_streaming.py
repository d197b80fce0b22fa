"""StreamingLLM by its paper: sinks, window, positions inside the cache."""

from __future__ import annotations

import math
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine import steps
from kvjax.engine.generate import prefill
from tests.kvjax import masked, matrix
from tests.models import naive

SHAPE = matrix.Shape(2, 2, 16)
MODEL, PARAMS = matrix.tiny_model(SHAPE)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
PAGE = 8


@cache
def _runner(store, budget=24, sinks=4, capacity=192, batch=1, chunk=64):
  policy = make_policy("streaming", budget_tokens=budget, page_size=PAGE, sinks=sinks)
  return prepare(MODEL, policy, store, CacheConfig(batch, capacity, PAGE), chunk_tokens=chunk)


def _kept(length: int, budget: int, sinks: int) -> list[int]:
  """Positions in the cache once it has seen length tokens."""
  everything = list(range(length))
  return everything if length <= budget else everything[:sinks] + everything[sinks - budget :]


def _by_hand(row, prompt_length: int, budget: int, sinks: int) -> np.ndarray:
  """f32[n + 1, V]: a list of unrotated keys and values a layer, cut by the rule, in numpy order.

  Each decode step is one query at the last place of the cache over keys at places 0, 1, 2, ...
  """
  kept: list[list] = [[] for _ in range(MODEL.config.num_layers)]
  prompt = jnp.asarray([row[:prompt_length]])

  def prefill_attend(layer, q, k, v, cache, hidden, /):
    k_np, v_np = np.asarray(k[0]), np.asarray(v[0])
    kept[layer] = [(k_np[t], v_np[t]) for t in _kept(prompt_length, budget, sinks)]
    return naive.attend_with(MODEL.rotate)(layer, q, k, v, cache, hidden)

  def decode_attend(layer, q, k, v, cache, hidden, /):
    kept[layer].append((np.asarray(k[0, 0]), np.asarray(v[0, 0])))
    if len(kept[layer]) > budget:
      del kept[layer][sinks]
    count = len(kept[layer])
    keys, values = (np.zeros((budget, *k.shape[2:]), np.float32) for _ in "kv")
    keys[:count], values[:count] = zip(*kept[layer], strict=True)
    keys = np.asarray(MODEL.rotate(jnp.asarray(keys[None]), jnp.arange(budget)[None]))[0, :count]
    query = np.asarray(MODEL.rotate(q, jnp.array([[count - 1]])))[0, 0]
    keys, values = (np.repeat(x[:count], SHAPE.group, axis=1) for x in (keys, values))
    scores = np.exp(np.einsum("hd,thd->ht", query, keys) / math.sqrt(SHAPE.head_dim))
    weights = scores / scores.sum(axis=-1, keepdims=True)
    return jnp.asarray(np.einsum("ht,thd->hd", weights, values)[None, None]), cache

  positions = jnp.arange(prompt_length)[None]
  empty = naive.empty_cache(MODEL.config, 1)
  x, _ = MODEL.forward(PARAMS, prompt, positions, empty, prefill_attend)
  out = [MODEL.unembed(PARAMS, x[:, -1])]
  for token in row[prompt_length:]:
    x, _ = MODEL.forward(PARAMS, jnp.asarray([[token]]), positions[:, :1], (), decode_attend)
    out.append(MODEL.unembed(PARAMS, x[:, 0]))
  return np.concatenate(out)


@pytest.mark.parametrize("store", ["compact", "resident"])
@pytest.mark.parametrize("prompt_length", [1, 40])
def test_over_more_than_two_windows_it_is_what_the_paper_says(store, prompt_length):
  """Golden by a naive cache (A1, A2): 60 steps with a window of 20."""
  (row,) = matrix.tokens_of([prompt_length + 60], seed=8)
  run = matrix.teacher_forced(_runner(store), PARAMS, [row], [prompt_length])
  expected = _by_hand(row, prompt_length, budget=24, sinks=4)
  np.testing.assert_allclose(run.logits[:, 0], expected, **TOLERANCE)


@pytest.mark.parametrize("sinks", [0, 1, 4, 8, 9, 23])
@pytest.mark.parametrize("store", ["compact", "resident"])
def test_what_is_kept(store, sinks):
  """Sinks that share a page with the window, fill pages, or leave a window of one (A1, A6)."""
  lengths = (63, 5)
  rows = matrix.tokens_of([length + 40 for length in lengths], seed=9)
  run = matrix.teacher_forced(_runner(store, sinks=sinks, batch=2), PARAMS, rows, lengths)
  for seen in run.attended.values():
    for step, row in np.ndindex(40, 2):
      expected = _kept(lengths[row] + step + 1, 24, sinks)
      for head in range(seen.shape[2]):
        assert np.flatnonzero(seen[step, row, head]).tolist() == expected


def test_prefill_is_dense_whatever_the_budget():
  """A4: what a prompt attends to is decided after it."""
  rows = matrix.tokens_of((150, 64), seed=10)
  expected = naive.logits(MODEL, PARAMS, matrix.padded(rows))
  for store in ("compact", "resident"):
    last, _ = prefill(_runner(store, budget=8, batch=2), PARAMS, rows)
    logits = MODEL.unembed(PARAMS, last)
    np.testing.assert_allclose(logits[0], expected[0, 149], **TOLERANCE)
    np.testing.assert_allclose(logits[1], expected[1, 63], **TOLERANCE)


@pytest.mark.parametrize("chunk", [64, 128])
def test_chunks_are_not_prompts(chunk):
  """A5: sinks are the first tokens of the text, and the budget is one budget."""
  (row,) = matrix.tokens_of([150], seed=11)
  cache = prefill(_runner("compact", chunk=chunk), PARAMS, [row])[1]
  for remembered in cache.store_state:
    for head in np.asarray(remembered[0]):
      assert head.tolist() == _kept(150, 24, 4)


def test_the_cache_keeps_keys_before_the_rotation():
  """A3: the keys of both stores are what the layer projected, at the positions remembered."""
  (row,) = matrix.tokens_of([100], seed=12)
  seen = {}

  def watch(layer, q, k, v, cache, hidden, /):
    seen[layer] = k
    return naive.attend_with(MODEL.rotate)(layer, q, k, v, cache, hidden)

  positions = jnp.arange(100)[None]
  MODEL.forward(PARAMS, jnp.asarray([row]), positions, naive.empty_cache(MODEL.config, 1), watch)
  cache = prefill(_runner("compact"), PARAMS, [row])[1]
  for layer, remembered in enumerate(cache.store_state):
    keys = matrix.paged_keys(cache, layer).reshape(1, SHAPE.kv_heads, -1, SHAPE.head_dim)
    for head in range(SHAPE.kv_heads):
      expected = seen[layer][0, remembered[0, head], head]
      np.testing.assert_allclose(keys[0, head], expected, rtol=1e-5, atol=1e-5)


def test_the_result_depends_on_what_the_cache_holds_and_not_on_where_it_stands():
  """Moving a full cache along the text changes nothing that the next step says."""
  (row,) = matrix.tokens_of([100], seed=13)
  runner = _runner("compact")
  shift = 1000

  def moved(cache):
    state = tuple(jnp.where(x >= 4, x + shift, x) for x in cache.store_state)
    return cache.replace(lengths=cache.lengths + shift, store_state=state)

  token, outs = jnp.asarray([3]), []
  for change in (lambda cache: cache, moved):
    cache = change(prefill(runner, PARAMS, [row])[1])
    for _ in range(30):  # the window turns over once
      logits, cache = steps.decode_step(runner, PARAMS, cache, token)
      outs.append(logits)
  np.testing.assert_allclose(outs[:30], outs[30:], **TOLERANCE)


def test_slots_do_not_matter():
  """The order of the slots of a full compact cache is no part of its meaning."""
  (row,) = matrix.tokens_of([100], seed=14)
  runner = _runner("compact")
  order = jnp.asarray(np.random.default_rng(0).permutation(24))

  def shuffled(cache):
    def move(pool):  # f[N, C, D]
      return pool.reshape(-1, 24, SHAPE.head_dim)[:, order].reshape(pool.shape)

    keys, values = cache.pools.keys, cache.pools.values
    pools = cache.pools._replace(keys=move(keys), values=move(values))
    return cache.replace(pools=pools, store_state=tuple(x[..., order] for x in cache.store_state))

  outs = []
  for change in (lambda cache: cache, shuffled):
    cache = change(prefill(runner, PARAMS, [row])[1])
    for _ in range(5):
      logits, cache = steps.decode_step(runner, PARAMS, cache, jnp.asarray([3]))
      outs.append(logits)
  np.testing.assert_allclose(outs[:5], outs[5:], **TOLERANCE)


def test_true_positions_would_say_something_else():
  """That the position rule shows at all: the same mask at true positions differs."""
  (row,) = matrix.tokens_of([60], seed=15)
  run = matrix.teacher_forced(_runner("compact"), PARAMS, [row], [50])
  visible = masked.visibility(MODEL.config, [50], 60, run.attended)
  positions = masked.true_positions(1, 60)
  found = masked.logits(MODEL, PARAMS, matrix.padded([row]), visible, *positions)
  assert np.abs(found[0, 50:] - run.logits[1:, 0]).max() > 1e-3


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"budget_tokens": 15}, "budget_tokens 15 is under one page of 16 tokens"),
    ({"budget_tokens": 16, "sinks": 16}, "sinks 16 must be at least 0 and under the budget of 16"),
    ({"sinks": -1}, "sinks -1 must be at least 0"),
    ({"window": 4}, "policy 'streaming' has no option window; it has budget_tokens"),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy("streaming", **options)
  assert "\n" not in str(caught.value)


def test_the_budget_is_whole_pages():
  assert make_policy("streaming", budget_tokens=47).budget_tokens == 32
