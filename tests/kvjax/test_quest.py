"""Quest by its paper: bounds, choice of pages, options."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, generate, make_policy, prepare, selected_pages
from kvjax.engine import steps
from kvjax.engine.generate import prefill
from kvjax.policies.quest import GROUPS
from kvjax.types import Inputs
from tests.kvjax import matrix
from tests.kvjax.pages_by_hand import grouped
from tests.panels import in_order, in_panels

B, K, G, D = 2, 2, 4, 16
MODEL, PARAMS = matrix.tiny_model(matrix.Shape(K, G, D))


def _inputs(q, k, lengths, **changes):
  none = dict.fromkeys(Inputs._fields)
  own = {"layer": 2, "row": 0, "q": q, "k": k, "lengths": lengths, "first": 0 * lengths}
  return Inputs(**none | own | changes)


def _normal(seed, shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _filled(policy, keys, lengths, page_size):
  """State after one chunk of keys f[B, S, K, D]."""
  b, s = keys.shape[:2]
  state = policy.register(MODEL.config, CacheConfig(b, s, page_size))[1]
  positions = jnp.broadcast_to(jnp.arange(s), (b, s))
  chunk = _inputs(None, keys, lengths, positions=positions, valid=positions < lengths[:, None])
  return policy.preprocess(state, chunk)


def _chosen(policy, state, q, lengths):
  """Pages of each (row, head), as sets."""
  token = _inputs(q, jnp.zeros((len(q), 1, K, D)), lengths)
  selection, _ = policy.select(state, token)
  pages, mask = np.asarray(selection.pages), np.asarray(selection.mask)[..., 0]
  rows = zip(pages, mask, strict=True)
  return [[set(p[m].tolist()) for p, m in zip(*row, strict=True)] for row in rows]


def _by_hand(q, keys, length, page_size, width, group, force_last):
  """Sets of one row's pages, by the formulas of the paper."""
  num_pages = -(-length // page_size)
  scores = np.empty((K, G, num_pages))
  for k, g, p in np.ndindex(scores.shape):
    page = np.asarray(keys[p * page_size : min((p + 1) * page_size, length), k], np.float64)
    head = np.asarray(q[0, k * G + g], np.float64)
    scores[k, g, p] = np.maximum(head * page.min(axis=0), head * page.max(axis=0)).sum()
  found = []
  for one in grouped(scores, group, D):
    if force_last:
      best = {*np.argsort(-one[:-1])[: width - 1].tolist(), num_pages - 1}
    else:
      best = set(np.argsort(-one)[:width].tolist())
    found.append(best)
  return found


@pytest.mark.parametrize("force_last", [True, False])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
def test_choice_by_the_formulas(page_size, group, force_last):
  lengths = (12 * page_size, 7 * page_size - 1)
  keys = _normal(0, (B, 12 * page_size, K, D))
  policy = make_policy(
    "quest",
    budget_tokens=4 * page_size + 3,  # rounded down
    page_size=page_size,
    group=group,
    force_last=force_last,
  )
  assert policy.page_size == page_size
  state = _filled(policy, keys, jnp.asarray(lengths), page_size)
  q = _normal(1, (B, 1, K * G, D))
  found = _chosen(policy, state, q, jnp.asarray(lengths))
  for row, length in enumerate(lengths):
    expected = _by_hand(q[row], keys[row], length, page_size, 4, group, force_last)
    assert found[row] == expected


@pytest.mark.parametrize("force_last", [True, False])
@pytest.mark.parametrize("sharper", [1, 50])
def test_summed_probabilities_of_many_pages(sharper, force_last):
  """Most of 40 pages have no probability to speak of, and some of them are among the best 30."""
  keys, lengths = _normal(0, (B, 320, K, D)), jnp.asarray([320, 300])
  q = sharper * _normal(1, (B, 1, K * G, D))
  options = {"budget_tokens": 240, "page_size": 8, "force_last": force_last}
  policy = make_policy("quest", **options, group="sum_probs")
  found = _chosen(policy, _filled(policy, keys, lengths, 8), q, lengths)
  for row, length in enumerate(lengths.tolist()):
    assert found[row] == _by_hand(q[row], keys[row], length, 8, 30, "sum_probs", force_last)


def test_score_is_a_bound_of_every_key_of_the_page():
  """(a): with one page chosen by max, no key of another page can beat that page's bound."""
  keys, lengths = _normal(0, (1, 128, K, D)), jnp.asarray([128])
  policy = make_policy("quest", budget_tokens=16, force_last=False)
  state = _filled(policy, keys, lengths, 16)
  q = _normal(1, (1, 1, K * G, D))
  products = jnp.einsum("kgd,tkd->kgt", q[0, 0].reshape(K, G, D), keys[0]).max(axis=1)
  highest, lowest = jnp.split(in_order(state[0])[0], 2, axis=-1)  # f[K, P, D]
  heads = q[0, 0].reshape(K, G, 1, D)
  scores = jnp.maximum(heads * highest[:, None], heads * lowest[:, None]).sum(axis=-1).max(axis=1)
  assert (scores >= products.reshape(K, 8, 16).max(axis=-1) - 1e-5).all()
  (sets,) = _chosen(policy, state, q, lengths)
  assert sets == [{int(best)} for best in scores.argmax(axis=-1)]


def test_permuted_pages_permute_the_choice():
  """(c)"""
  order = np.random.default_rng(2).permutation(8)
  keys, lengths = _normal(0, (1, 128, K, D)), jnp.asarray([128])
  moved = keys.reshape(1, 8, 16, K, D)[:, order].reshape(keys.shape)
  policy = make_policy("quest", budget_tokens=48, force_last=False)
  q = _normal(1, (1, 1, K * G, D))
  (before,) = _chosen(policy, _filled(policy, keys, lengths, 16), q, lengths)
  (after,) = _chosen(policy, _filled(policy, moved, lengths, 16), q, lengths)
  assert [{int(order[page]) for page in pages} for pages in after] == before


@pytest.mark.parametrize("chunk", [64, 128])
def test_bounds_kept_up_equal_bounds_computed_anew(chunk):
  """(d): after chunks of prefill and after every token, the last page partly filled."""
  policy = make_policy("quest", budget_tokens=32)
  config = CacheConfig(3, 192, 16)
  runner = prepare(MODEL, policy, "resident", config, chunk_tokens=chunk)
  rows = matrix.tokens_of((150, 127, 3), seed=4)
  cache = prefill(runner, PARAMS, [row[:-20] or row for row in rows])[1]
  for step in range(22):
    keys = np.asarray(matrix.paged_keys(cache, 0))  # f[B, K, P, C, D]
    found = np.asarray(in_order(cache.policy_state[0]))
    for row, length in enumerate(cache.lengths.tolist()):
      for page in range(-(-length // 16)):
        held = keys[row, :, page, : length - page * 16]  # f[K, C, D]
        expected = np.concatenate([held.max(axis=1), held.min(axis=1)], axis=-1)
        np.testing.assert_array_equal(found[row, :, page], expected)
    cache = steps.decode_step(runner, PARAMS, cache, jnp.full(3, step, jnp.int32))[1]


def test_pages_of_one_token_make_it_exact_top_k():
  """(e): at page size 1 the score is q.k itself. The cache has no such pages, the policy has."""
  policy = make_policy("quest", budget_tokens=5, page_size=1, group="none", force_last=False)
  keys, lengths = _normal(0, (1, 40, K, D)), jnp.asarray([40])
  state = ((in_panels(jnp.concatenate([keys, keys], axis=-1).transpose(0, 2, 3, 1)),),)
  q = _normal(1, (1, 1, K * G, D))
  (found,) = _chosen(policy, state, q, lengths)
  products = jnp.einsum("kgd,tkd->kgt", q[0, 0].reshape(K, G, D), keys[0]).reshape(K * G, 40)
  assert found == [set(np.argsort(-head)[:5].tolist()) for head in np.asarray(products)]


def test_one_page_is_the_newest():
  keys, lengths = _normal(0, (B, 128, K, D)), jnp.asarray([128, 33])
  policy = make_policy("quest", budget_tokens=31)
  found = _chosen(policy, _filled(policy, keys, lengths, 16), _normal(1, (B, 1, K * G, D)), lengths)
  assert found == [[{7}] * K, [{2}] * K]


def test_the_first_layers_are_dense():
  config = CacheConfig(1, 64)
  for count in (0, 1, 2, 3):
    plan = make_policy("quest", dense_layers=count).register(MODEL.config, config)[0]
    assert plan.select_layers == tuple(range(count, 3))


def test_bounds_in_segments():
  """More pages than the first segment holds: the same choice as from one segment."""
  page_size, pages = 8, 700
  keys, lengths = _normal(0, (1, pages * page_size, K, D)), jnp.asarray([pages * page_size - 3])
  policy = make_policy("quest", budget_tokens=24, page_size=page_size)
  state = _filled(policy, keys, lengths, page_size)
  assert [segment.shape[2::2] for segment in state[0]] == [(8, 64), (2, 64), (1, 60)]
  q = _normal(1, (1, 1, K * G, D))
  expected = _by_hand(q[0], keys[0], int(lengths[0]), page_size, 3, "max", True)
  assert _chosen(policy, state, q, lengths)[0] == expected


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"budget_tokens": 15}, "budget_tokens 15 is under one page of 16 tokens"),
    ({"budget_tokens": 32, "page_size": 64}, "budget_tokens 32 is under one page of 64 tokens"),
    ({"dense_layers": -1}, "policy 'quest': dense_layers -1 must be at least 0"),
    ({"group": "median"}, "unknown group 'median'; expected one of max, mean"),
    ({"pages": 3}, "policy 'quest' has no option pages; it has budget_tokens, page_size"),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy("quest", **options)
  assert "\n" not in str(caught.value)


def test_selection_under_jit_equals_selection_outside():
  keys, lengths = _normal(0, (B, 128, K, D)), jnp.asarray([128, 100])
  policy = make_policy("quest", budget_tokens=48)
  state, q = _filled(policy, keys, lengths, 16), _normal(1, (B, 1, K * G, D))
  k = jnp.zeros((B, 1, K, D))
  outside = policy.select(state, _inputs(q, k, lengths))[0]
  inside = jax.jit(lambda state, q: policy.select(state, _inputs(q, k, lengths))[0])(state, q)
  jax.tree.map(np.testing.assert_array_equal, outside, inside)


def test_selected_pages_names_only_pages_with_tokens_when_the_budget_holds_all():
  model, params = matrix.tiny_model(matrix.Shape(2, 2, 16))
  policy = make_policy("quest", budget_tokens=1024, page_size=16)
  runner = prepare(model, policy, "resident", CacheConfig(2, 256), chunk_tokens=64)
  out = generate(runner, params, [[1] * 40, [2] * 5], max_new_tokens=1)
  pages = selected_pages(runner, params, out.cache, [1, 1])
  for named in pages.values():
    assert (np.asarray(named) >= 0).sum(axis=-1).tolist() == [[3, 3], [1, 1]]


@pytest.mark.parametrize("group", GROUPS)
def test_pages_that_have_left_the_window_are_not_chosen(group):
  policy = make_policy("quest", budget_tokens=64, group=group)
  keys, lengths = _normal(0, (B, 160, K, D)), jnp.array([160, 130])
  state = _filled(policy, keys, lengths, 16)
  first = jnp.array([100, 64])  # pages 6 and 4 are the first with a token in sight
  inputs = _inputs(_normal(1, (B, 1, K * G, D)), keys[:, -1:], lengths, first=first)
  selection, _ = policy.select(state, inputs)
  pages = np.where(selection.mask[..., 0], selection.pages, -1)
  for row, (low, high) in enumerate([(6, 9), (4, 8)]):
    kept = [set(head[head >= 0].tolist()) for head in pages[row]]
    assert all(len(head) == 4 and low <= min(head) and max(head) <= high for head in kept), kept
