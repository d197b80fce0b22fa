"""Policies that select pages, against their methods in the plainest terms."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine import steps
from kvjax.policies._digests import DIGESTS
from kvjax.policies._lists import where_due
from kvjax.policies._pages import best_pages, combine
from models import PRESETS, build, param_shapes
from pallas_kernels.page_scores import page_products
from tests.kvjax import matrix
from tests.kvjax.pages_by_hand import (
  CAPACITY,
  KEYS,
  MODEL,
  PROMPTS,
  QUERIES,
  B,
  D,
  G,
  K,
  best,
  decode,
  grouped,
  inputs_of,
  normal,
  prefilled,
  scores_of_page,
  scores_of_row,
)
from tests.panels import in_order, in_panels

OPTIONS = {"lserve": {"logical": 8}, "flexicache_adaptive": {"longest": 32}}  # at 64 tokens
FORMS = tuple(name for name in DIGESTS if name != "exact")


# Digests.


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_digests_score_as_the_formulas(form, poison):
  """Pages of 1 to 8 keys, slots without a key holding anything."""
  digest, counts = DIGESTS[form], np.arange(1, 9)
  keys, q = normal(2, (1, K, 8, 8, D)), normal(3, (1, K, G, D))
  valid = np.broadcast_to(np.arange(8) < counts[:, None], keys.shape[:-1])
  keys = np.where(valid[..., None], keys, np.float32(poison))
  digests = digest.of_pages(jnp.asarray(keys), jnp.asarray(valid))
  assert digests.shape == (1, K, 8, digest.size(D))
  products = page_products(
    digest.queries(jnp.asarray(q)), (in_panels(digests.swapaxes(2, 3)),), jnp.int32(8)
  )
  found = np.asarray(digest.scores(products))
  for k, g, page in np.ndindex(found.shape[1:]):
    expected = scores_of_page(form, q[0, k, g], keys[0, k, page, : counts[page]])
    np.testing.assert_allclose(found[0, k, g, page], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [name for name in FORMS if DIGESTS[name].extend])
def test_digests_grow_key_by_key(form):
  digest, keys = DIGESTS[form], jnp.asarray(normal(4, (B, K, 16, D)))
  grown = jnp.full((B, K, digest.size(D)), jnp.nan)  # of whoever had the page before
  for count in range(16):
    assert digest.extend is not None
    grown = digest.extend(grown, keys[:, :, count], jnp.full((B, K), count))
    valid = jnp.broadcast_to(jnp.arange(16) <= count, keys.shape[:-1])
    np.testing.assert_allclose(grown, digest.of_pages(keys, valid), rtol=1e-4, atol=1e-5)


def test_the_mean_of_a_page_never_beats_its_best_key():
  """Order of the forms that are sure: mean <= exact <= min-max; the cuboid lies in the bounds."""
  keys, q = normal(5, (200, 16, D)), normal(6, (200, D))
  found = {
    form: np.array([scores_of_page(form, *pair) for pair in zip(q, keys, strict=True)])
    for form in DIGESTS
  }
  assert (found["mean"] <= found["exact"]).all() and (found["exact"] <= found["minmax"]).all()
  assert (found["cuboid"] <= found["minmax"]).all()
  assert np.abs(found["mean_std"] - found["exact"]).mean() < (
    np.abs(found["minmax"] - found["exact"]).mean() / 4
  )


@pytest.mark.parametrize("score", FORMS)
def test_digests_of_a_bf16_cache(score):
  policy = make_policy("quest", budget_tokens=32, page_size=8, score=score)
  config = CacheConfig(1, 32, 8, "bfloat16")
  (kept,) = policy.register(MODEL.config, config)[1]
  keys, lengths = jnp.asarray(KEYS[:1, :32], jnp.bfloat16), jnp.array([27])
  positions = jnp.arange(32)[None]
  own = {"k": keys, "positions": positions, "valid": positions < 27}
  (kept,) = policy.preprocess((kept,), inputs_of(lengths, **own))
  own = {"k": keys[:, 27:28], "positions": jnp.array([[27]]), "valid": jnp.array([[True]])}
  (kept,) = policy.preprocess((kept,), inputs_of(lengths + 1, **own))
  (digests,) = getattr(kept, "digests", kept)
  assert digests.dtype == jnp.bfloat16
  whole = keys[:, 24:28].swapaxes(1, 2)
  expected = DIGESTS[score].of_pages(whole, jnp.ones(whole.shape[:-1], bool))
  np.testing.assert_allclose(
    *(jnp.float32(x) for x in (in_order((digests,))[:, :, 3], expected)), atol=0.05
  )


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("score", FORMS)
def test_digests_kept_up_equal_digests_computed_anew(score, page_size):
  """After ragged chunks with padding, and after tokens that fill and begin pages."""
  policy = make_policy("quest", budget_tokens=32, page_size=page_size, score=score, dense_layers=0)
  _, state = decode(policy, prefilled(policy, page_size), 20)
  digests = in_order(getattr(state[0], "digests", state[0]))
  for row, prompt in enumerate(PROMPTS):
    for page, at in enumerate(range(0, prompt + 20, page_size)):
      keys = KEYS[row, at : min(at + page_size, prompt + 20)].swapaxes(0, 1)
      expected = DIGESTS[score].of_pages(jnp.asarray(keys), jnp.ones(keys.shape[:-1], bool))
      np.testing.assert_allclose(digests[row, :, page], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("score", "vectors"), [("minmax", 2), ("mean_std", 2), ("mean", 1), ("exact", 0)]
)
def test_metadata_bytes(score, vectors):
  policy = make_policy("quest", budget_tokens=32, score=score)
  runner = prepare(MODEL, policy, "resident", CacheConfig(B, CAPACITY, 16), chunk_tokens=64)
  assert runner.decode_bytes.metadata == B * K * vectors * D * CAPACITY // 16 * 4


@pytest.mark.parametrize(("score", "size"), [("cuboid", 2 * D), ("outlier", 2 * D + 1)])
def test_metadata_bytes_with_the_keys_of_the_newest_page(score, size):
  policy = make_policy("quest", budget_tokens=32, score=score)
  runner = prepare(MODEL, policy, "resident", CacheConfig(B, CAPACITY, 16), chunk_tokens=64)
  assert runner.decode_bytes.metadata == B * K * 4 * (size * CAPACITY // 16 + 16 * D)


# Policies.


@pytest.mark.parametrize("score", DIGESTS)
def test_quest_with_every_score(score):
  policy = make_policy("quest", budget_tokens=24, page_size=8, score=score, dense_layers=0)
  for at, rows in enumerate(decode(policy, prefilled(policy, 8), 9)[0]):
    for row, prompt in enumerate(PROMPTS):
      length = prompt + at + 1
      scores = scores_of_row(score, QUERIES[at, row], KEYS[row, :length], 8).max(axis=1)
      last = {(length - 1) // 8}
      assert rows[row] == [set(best(head, last, 3)) for head in scores], (at, row)


@pytest.mark.parametrize("score", ["minmax", "mean"])
def test_a_second_look_ranks_candidates_by_their_keys(score):
  options = {"budget_tokens": 16, "page_size": 8, "score": score, "dense_layers": 0}
  policy = make_policy("quest", **options, candidates=2)
  for at, rows in enumerate(decode(policy, prefilled(policy, 8), 9)[0]):
    for row, prompt in enumerate(PROMPTS):
      length = prompt + at + 1
      last = {(length - 1) // 8}
      guess, exact = (
        scores_of_row(form, QUERIES[at, row], KEYS[row, :length], 8).max(axis=1)
        for form in (score, "exact")
      )
      for head in range(K):
        seen = best(guess[head], last, 4)
        known = [exact[head, page] if page in seen else -np.inf for page in range(len(exact[head]))]
        assert rows[row][head] == set(best(np.array(known), last, 2)), (at, row)


def test_a_second_look_at_all_pages_is_exact():
  options = {"budget_tokens": 24, "page_size": 8, "dense_layers": 0}
  guess = make_policy("quest", **options, score="mean", candidates=9)
  exact = make_policy("quest", **options, score="exact")
  expected = decode(exact, prefilled(exact, 8), 9)[0]
  assert decode(guess, prefilled(guess, 8), 9)[0] == expected


@pytest.mark.usefixtures("fully_optimized")
def test_a_second_look_gathers_its_candidates_alone():
  """No copy of all keys: 4 layers, of which 2 select."""
  config = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=4)
  policy = make_policy("quest", budget_tokens=256, candidates=3)
  runner = prepare(build(config), policy, "resident", CacheConfig(1, 8192, base_tokens=8192))
  state = jax.eval_shape(lambda: steps.empty_cache(runner))
  token = jax.ShapeDtypeStruct((1,), jnp.int32)
  step = steps.decode_step.lower(runner, param_shapes(config), state, token).compile()
  all_keys = 8192 * config.num_kv_heads * config.head_dim * 4
  assert step.memory_analysis().temp_size_in_bytes < all_keys / 2
  assert "copy(" in step.as_text() and "f32[1,3,512,16,64]" not in step.as_text()  # all, turned


def test_summed_probabilities_tell_far_pages_apart():
  """With a probability of exp(-200), let alone that of exp(-300), a f32 is at 0."""
  scores = jnp.array([0.0, 50.0, 100.0, 300.0]).reshape(1, 1, 1, 4)
  combined = combine(scores, jnp.ones((1, 1, 4), bool), "sum_probs", 1)
  assert best_pages(combined, None, 4).tolist() == [[[3, 2, 1, 0]]]
  wider = combine(16 * scores, jnp.ones((1, 1, 4), bool), "sum_probs", 256)
  np.testing.assert_allclose(combined, wider, rtol=1e-6)


@pytest.mark.parametrize("lists", [1, 2])
def test_arkvale(lists):
  options = {"budget_tokens": 40, "page_size": 8, "lists": lists, "dense_layers": 0}
  policy = make_policy("arkvale", **options, sink_pages=1, window_pages=2)
  for at, rows in enumerate(decode(policy, prefilled(policy, 8), 9)[0]):
    for row, prompt in enumerate(PROMPTS):
      length = prompt + at + 1
      scores = scores_of_row("cuboid", QUERIES[at, row], KEYS[row, :length], 8)
      scores = scores.reshape(lists, -1, scores.shape[-1]).mean(axis=1).repeat(K // lists, axis=0)
      last = (length - 1) // 8
      assert rows[row] == [set(best(head, {0, last, last - 1}, 5)) for head in scores], (at, row)


@pytest.mark.parametrize("group", ["none", "max", "sum_probs"])
@pytest.mark.parametrize("streaming", [(), ((0, 1),)], ids=["retrieval", "streaming"])
def test_lserve(streaming, group):
  """Lists of five pages of 8 made of parts of 4, renewed at lengths that 3 divides."""
  options = {"budget_tokens": 40, "page_size": 8, "logical": 4, "period": 3, "group": group}
  options |= {"streaming_heads": streaming, "sink_tokens": 8, "local_tokens": 9}
  policy = make_policy("lserve", **options)
  listed = {}
  for at, rows in enumerate(decode(policy, prefilled(policy, 8), 30)[0]):
    for row, prompt in enumerate(PROMPTS):
      length = prompt + at + 1
      last = (length - 1) // 8
      if length % 3 == 0 or at == 0:
        parts = scores_of_row("minmax", QUERIES[at, row], KEYS[row, :length], 4)
        whole = [parts[..., at : at + 2].max(axis=-1) for at in range(0, parts.shape[-1], 2)]
        whole = grouped(np.stack(whole, axis=-1), group, D)
        ends = [0, *range(max(last - 2, 0), last + 1)]
        listed[row] = (
          [
            ends if (0, head * K // len(whole)) in streaming else best(scores, {last}, 5)
            for head, scores in enumerate(whole)
          ],
          last,
        )
      lists, known = listed[row]
      born = range(known + 1, last + 1)
      expected = [{*one[: 5 - len(born)], *born} for one in lists]
      assert rows[row] == expected, (at, row)


def test_streaming_heads_stream_whatever_the_capacity():
  """In a cache for the budget and no more, and in one with room for another page."""
  options = {"budget_tokens": 160, "page_size": 16, "sink_tokens": 16, "local_tokens": 16}
  policy = make_policy("lserve", **options, streaming_heads=((0, 1),))
  model, params = matrix.tiny_model(matrix.Shape(K, G, D))
  lengths, rows = (127, 50), matrix.tokens_of((131, 54))
  runs = []
  for capacity in (160, 176):
    runner = prepare(model, policy, "resident", CacheConfig(2, capacity, 16), chunk_tokens=64)
    runs.append(matrix.teacher_forced(runner, params, rows, lengths))
  tight, roomy = runs
  for layer, seen in tight.attended.items():
    np.testing.assert_array_equal(seen, roomy.attended[layer])
  np.testing.assert_allclose(tight.logits, roomy.logits, rtol=1e-5, atol=1e-5)
  retrieval, streaming = np.split(tight.attended[0][:, 0], 2, axis=1)  # bool[steps, G, T]
  assert retrieval[..., :128].all()
  assert streaming[..., :16].all() and not streaming[..., 16:96].any()
  assert streaming[..., 96:128].all()


@pytest.mark.parametrize("as_given", [list, np.array], ids=["lists", "array"])
@pytest.mark.parametrize(
  ("name", "option", "more"),
  [
    ("flexicache", "unstable_heads", {"period": 5}),
    ("lserve", "streaming_heads", {"logical": 8, "sink_tokens": 8, "local_tokens": 8}),
  ],
)
def test_heads_may_be_given_as_lists_and_arrays(name, option, more, as_given):
  def chosen(heads):
    policy = make_policy(name, budget_tokens=32, page_size=8, **more, **{option: heads})
    return decode(policy, prefilled(policy, 8), 6)[0], policy.joins_heads

  plain = chosen(((0, 1), (2, 0)))
  assert plain[1] and plain != chosen(())
  assert chosen(as_given([[0, 1], [2, 0]])) == plain


@pytest.mark.parametrize("unstable", [(), ((0, 1),), ((0, 0), (0, 1)), ((1, 0),)], ids=str)
def test_flexicache(unstable):
  """Lists of three pages, renewed every fifth step and used from the next one on."""
  options = {"budget_tokens": 24, "page_size": 8, "period": 5, "unstable_heads": unstable}
  policy = make_policy("flexicache", **options)
  listed = {}
  for at, rows in enumerate(decode(policy, prefilled(policy, 8), 24)[0]):
    for row, prompt in enumerate(PROMPTS):
      length, step = prompt + at + 1, at + 1
      last = (length - 1) // 8
      scores = scores_of_row("minmax", QUERIES[at, row], KEYS[row, :length], 8).max(axis=1)
      ranked = [best(head, {last}, 3) for head in scores]
      if step == 1:
        listed[row] = ranked, last
      lists, known = listed[row]
      born = range(known + 1, last + 1)
      for head in range(K):
        older = {*lists[head][: 3 - len(born)], *born}
        assert rows[row][head] == (set(ranked[head]) if (0, head) in unstable else older)
      if step % 5 == 0:
        listed[row] = ranked, last


def test_flexicache_that_ranks_at_every_step_is_quest():
  """algorithms.md 4, test (c)."""
  quest = make_policy("quest", budget_tokens=24, page_size=8, dense_layers=0)
  expected = decode(quest, prefilled(quest, 8), 20)[0]
  everyone = tuple((0, head) for head in range(K))
  for options in ({"period": 1}, {"period": 4, "unstable_heads": everyone}):
    policy = make_policy("flexicache", budget_tokens=24, page_size=8, **options)
    assert decode(policy, prefilled(policy, 8), 20)[0] == expected


def test_lserve_with_one_part_a_page_and_period_1_is_quest():
  quest = make_policy("quest", budget_tokens=24, page_size=8, dense_layers=0, group="none")
  policy = make_policy("lserve", budget_tokens=24, page_size=8, logical=8, period=1)
  expected = decode(quest, prefilled(quest, 8), 20)[0]
  assert decode(policy, prefilled(policy, 8), 20)[0] == expected


def test_no_page_is_ranked_where_no_row_is_due():
  ran = []

  @jax.jit
  def lists(due, new, listed):
    def rank():
      jax.debug.callback(lambda _: ran.append(1), new)
      return new

    return where_due(due, rank, listed)

  new, old = jnp.ones((2, 1, 3), jnp.int32), jnp.zeros((2, 1, 3), jnp.int32)
  for due in ([False, False], [False, True], [True, True]):
    found = lists(jnp.array(due), new, old)
    jax.effects_barrier()
    np.testing.assert_array_equal(found[:, 0, 0], np.array(due, int))
    assert len(ran) == any(due), due
    ran.clear()


@pytest.mark.parametrize("name", ["arkvale", "lserve", "flexicache", "flexicache_adaptive"])
def test_rows_shorter_than_the_budget_see_all_their_pages(name):
  policy = make_policy(name, budget_tokens=64, page_size=8, **OPTIONS.get(name, {}))
  for at, rows in enumerate(decode(policy, prefilled(policy, 8), 14)[0]):
    for row, prompt in enumerate(PROMPTS):
      everything = set(range(-(-(prompt + at + 1) // 8)))
      assert all(head == everything for head in rows[row]), (at, row)


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("quest", {"score": "median"}, "unknown score 'median'; expected one of minmax, cuboid"),
    ("quest", {"candidates": 0}, "candidates 0 with group 'max': expected 1, or more"),
    ("quest", {"candidates": 2, "group": "none"}, "candidates 2 with group 'none'"),
    ("arkvale", {"budget_tokens": 48}, "budget_tokens 48 has no room for the 4 pages of 16 tokens"),
    ("arkvale", {"dense_layers": -1}, "dense_layers -1 must be at least 0; give 0 for none"),
    ("arkvale", {"window_pages": 0}, "sink_pages 2, window_pages 0 and lists 1 must be at least"),
    ("lserve", {"logical": 24}, "logical 24 does not divide the page_size 64"),
    ("lserve", {"period": 65}, "period 65 must be from 1 to the page_size 64"),
    ("lserve", {"sink_tokens": -1}, "sink_tokens -1 and local_tokens 256 must be at least 0"),
    ("lserve", {"local_tokens": -1}, "sink_tokens 128 and local_tokens -1 must be at least 0"),
    ("lserve", {"group": "sum"}, "unknown group 'sum'; expected one of max"),
    (
      "lserve",
      {"budget_tokens": 448, "streaming_heads": ((0, 0),)},
      "budget_tokens 448 has no room for the 8 pages of 64 tokens",
    ),
    ("flexicache", {"budget_tokens": 16}, "budget_tokens 16 has no room for the 2 pages of 16"),
    ("flexicache", {"period": 0}, "period 0 must be at least 1"),
  ],
)
def test_options_that_are_refused(name, options, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy(name, **options)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("arkvale", {"lists": 3}, "arkvale's 3 lists do not divide the 2 KV heads"),
    ("lserve", {"streaming_heads": ((0, 2),)}, "streaming_heads names KV head 2 of layer 0"),
    ("flexicache", {"unstable_heads": ((3, 0),)}, "unstable_heads names KV head 0 of layer 3"),
  ],
)
def test_models_that_are_refused(name, options, message):
  policy = make_policy(name, page_size=16, **options)
  with pytest.raises(ValueError, match=message):
    prepare(MODEL, policy, "resident", CacheConfig(1, 64))
