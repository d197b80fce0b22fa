"""The study of page scores: one prefill for all, judged by the plainest terms."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import pytest

from eval import page_scores, run_page_scores
from kvjax import CacheConfig, generate, make_policy, prepare
from kvjax.engine.generate import prefill
from tests.kvjax import matrix
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

MODEL, PARAMS = matrix.tiny_model(matrix.SHAPES[0])
CONFIG = MODEL.config
PROMPT, CAPACITY, STEPS = matrix.tokens_of([100])[0], 128, 5


@pytest.fixture(scope="module")
def captured():
  config = CacheConfig(1, CAPACITY, 8)
  runner = prepare(MODEL, page_scores.watcher(8, 2), "resident", config, chunk_tokens=64)
  return page_scores.capture(runner, PARAMS, PROMPT, STEPS)


def _quest(page_size, **options):
  policy = make_policy("quest", page_size=page_size, **options)
  return prepare(MODEL, policy, "resident", CacheConfig(1, CAPACITY, page_size), chunk_tokens=64)


def test_what_is_captured_is_dense_attention(captured):
  config = CacheConfig(1, CAPACITY, 16)
  dense = prepare(MODEL, make_policy("dense"), "resident", config, chunk_tokens=64)
  said = generate(dense, PARAMS, [PROMPT], max_new_tokens=STEPS + 1).tokens[0]
  assert captured.tokens == said
  assert captured.queries.shape == (STEPS, 1, CONFIG.num_heads, CONFIG.head_dim)
  assert captured.lengths.tolist() == [101, 102, 103, 104, 105]


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("score", ["minmax", "cuboid", "mean_std"])
def test_a_cache_with_new_digests_is_the_cache_of_a_prefill(captured, score, page_size):
  runner = _quest(page_size, budget_tokens=32, score=score)
  expected = prefill(runner, PARAMS, [PROMPT])[1]
  found = page_scores.redigested(runner, page_scores.repaged(captured.cache, page_size))
  used = -(-len(PROMPT) // page_size)
  for one, other in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
    assert one.shape == other.shape
  for one, other in zip(*(_digests(cache) for cache in (expected, found)), strict=True):
    np.testing.assert_allclose(one[..., :used], other[..., :used], rtol=1e-5, atol=1e-5)
  said = generate(runner, PARAMS, [PROMPT], max_new_tokens=STEPS + 1).tokens[0]
  assert page_scores.decoded(runner, PARAMS, captured, found) == said


def _digests(cache):
  return [segment for row in cache.policy_state for segment in getattr(row, "digests", row)]


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("score", ["exact", "mean"])
def test_recall_and_mass_by_hand(captured, score, dtype):
  """Pages of 8: budgets of two, of four and of all of them."""
  widths, cache = (2, 4, 16), captured.cache
  how = page_scores.Score(score, 1, None if score == "exact" else dtype)
  recall, mass = page_scores.judge_layers(how, widths, captured, cache)
  keys = np.asarray(matrix.paged_keys(cache, 0))[0]  # f[K, P, C, D]
  k, p, c, d = keys.shape
  queries = np.asarray(captured.queries).reshape(STEPS, k, -1, d)
  recalls, masses = [], []
  for step, length in enumerate(captured.lengths.tolist()):
    for head in range(k):
      held = keys[head].reshape(p * c, d)[:length]
      logits = queries[step, head] @ held.T  # f[G, T]
      weights = np.exp(logits / np.sqrt(d))
      weights = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0)
      pages = [slice(at, at + c) for at in range(0, length, c)]
      true = np.array([logits[:, page].max() for page in pages])
      means = np.array([(queries[step, head] @ held[page].mean(axis=0)).max() for page in pages])
      own, true = (
        np.argsort(-x[:-1]).tolist() for x in ((true if score == "exact" else means), true)
      )
      for width in widths:
        chosen = own[: width - 1]
        recalls.append(len(set(chosen) & set(true[: width - 1])) / (width - 1))
        masses.append(sum(weights[pages[page]].sum() for page in [*chosen, len(pages) - 1]))
  recalls = np.reshape(recalls, (-1, len(widths))).mean(axis=0)
  masses = np.reshape(masses, (STEPS, k, len(widths))).mean(axis=0)
  np.testing.assert_allclose(recall[:2], recalls[:2], atol=1e-6)
  np.testing.assert_allclose(mass[:, 0], masses.T, rtol=1e-5)  # one layer selects
  assert np.allclose(mass[-1], 1) and (score != "exact" or np.allclose(recall[:2], 1))


def test_a_second_look_at_all_pages_is_exact(captured):
  widths = (2, 4)
  for score, candidates in (("mean", 8), ("exact", 1)):
    how = page_scores.Score(score, candidates)
    recall, _ = page_scores.judge_layers(how, widths, captured, captured.cache)
    np.testing.assert_allclose(recall, 1)
  guess = page_scores.judge_layers(page_scores.Score("mean", 2), widths, captured, captured.cache)
  first = page_scores.judge_layers(page_scores.Score("mean", 1), widths, captured, captured.cache)
  assert (guess[0] > first[0]).all() and (guess[0] < 1).any()


def test_selecting_is_timed(captured):
  runner = _quest(16, budget_tokens=32)
  cache = page_scores.redigested(runner, page_scores.repaged(captured.cache, 16))
  assert page_scores.select_seconds(runner, captured, cache, repeats=1) > 0


# The command.


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
  """Flags that name a tiny model and a text."""
  folder = tmp_path_factory.mktemp("inputs")
  config = dataclasses.replace(tiny.tied(), max_tokens=1024, vocab_size=len(TOKENS), num_layers=3)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  model = tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)
  text = folder / "book.txt"
  text.write_text(" ".join(f"Sentence number {n} of the book ends here." for n in range(40)))
  return {
    "model": str(model),
    "text_file": str(text),
    "scores": ["mean*2", "mean/int8", "exact"],
    "budget_tokens": ["64", "128"],
    "page_sizes": ["8", "16"],
    "prompt_tokens": 800,
    "num_seeds": 1,
    "seed": 0,
    "max_new_tokens": 3,
  }


def test_the_rows_and_the_plot(arguments, tmp_path):
  run_page_scores.main(types.SimpleNamespace(**arguments, out_dir=str(tmp_path / "out")))
  names = sorted(path.name for path in (tmp_path / "out").iterdir())
  assert names == ["manifest.json", "page_scores.png", "results.jsonl"]
  rows = list(map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines()))
  cells = [(row["page_size"], row["page_score"], row["budget_tokens"]) for row in rows]
  assert cells == list(itertools.product((8, 16), arguments["scores"], (64, 128)))
  for row in rows:
    assert row["num_examples"] == 4 and row["dense_score"] is not None and row["select_s"] > 0
    assert 0 < row["mass_kept_ratio"] < 1 and 0 <= row["page_recall_ratio"] <= 1
    first, *others = row["head_maps"]["mass_kept_ratio"][1:]  # layers 0 and 1 do not select
    assert set(first) == {None} and np.isclose(np.mean(others), row["mass_kept_ratio"], atol=1e-3)
    assert row["page_score"] != "exact" or np.isclose(row["page_recall_ratio"], 1)
  key = tiny.CONFIG.num_kv_heads * tiny.CONFIG.head_dim  # numbers of one token, or of one mean
  for row in rows:  # one layer selects
    pages = rows[0]["digest_bytes"] // (4 * key) * 8 // row["page_size"]
    int8 = pages * (key + 4 * tiny.CONFIG.num_kv_heads) + row["page_size"] * 4 * key
    name, _, candidates = row["page_score"].partition("*")
    kept = {"mean": pages * 4 * key, "mean/int8": int8, "exact": 0}[name]
    assert row["digest_bytes"] == kept
    if kept:
      tokens = (2 + int(candidates or 0)) * row["budget_tokens"]
      assert row["read_bytes_per_step"] == kept + tokens * 4 * key


@pytest.mark.parametrize(
  ("change", "complaint"),
  [
    ({"scores": ["median"]}, r"'median' is not NAME, NAME\*N, NAME/int8 or NAME/int8\*N of minmax"),
    ({"scores": ["mean*"]}, r"--scores: 'mean\*' is not NAME, NAME\*N"),
    ({"scores": ["mean*0"]}, r"--scores: 'mean\*0' is not NAME, NAME\*N"),
    ({"scores": ["mean/int4"]}, r"--scores: 'mean/int4' is not NAME, NAME\*N"),
    ({"scores": ["mean*2/int8"]}, r"--scores: 'mean\*2/int8' is not NAME, NAME\*N"),
    ({"scores": ["exact/int8"]}, "--scores: 'exact/int8': exact keeps no digests; leave /int8 out"),
    ({"scores": []}, "--scores is empty, expected some of"),
    ({"page_sizes": ["12"]}, "--page_sizes=12: expected some of"),
    ({"budget_tokens": ["31"]}, "31 is under two pages of 16 tokens"),
    ({"model": "random:stories260k@8192"}, "has no tokenizer"),
    ({"max_new_tokens": 900}, "shorten the prompt"),
  ],
)
def test_bad_input(arguments, tmp_path, change, complaint):
  values = arguments | change | {"out_dir": str(tmp_path / "out")}
  with pytest.raises(ValueError, match=complaint) as caught:
    run_page_scores.main(types.SimpleNamespace(**values))
  assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_model_of_which_no_layer_selects_is_refused(arguments, tmp_path):
  config = dataclasses.replace(tiny.CONFIG, vocab_size=len(TOKENS), num_layers=2)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  model = tiny.write_gguf(tmp_path / "two.gguf", config, tiny.tensors(config), extra=extra)
  values = arguments | {"model": str(model), "out_dir": str(tmp_path / "out")}
  with pytest.raises(ValueError, match="has 2 layers, of which quest leaves the first 2 dense"):
    run_page_scores.main(types.SimpleNamespace(**values))
  assert not (tmp_path / "out").exists()
