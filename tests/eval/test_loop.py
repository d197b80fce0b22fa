"""Batches: every example is answered once, whoever stands beside it, and times count once."""

from __future__ import annotations

import pytest

from eval import harness, lines, loop
from kvjax import Generation, generate, make_policy
from models import load
from tests.eval import questions


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  return load(str(questions.write_model(tmp_path_factory.mktemp("model"))))


def _policies():
  options = {"dense_layers": 0}
  return [
    (make_policy("dense"), "resident"),
    (make_policy("quest", budget_tokens=16, **options), "resident"),
  ]


def _measured(made):
  found, compile_s = [], {}
  for fresh in loop.answers(made, loop.batches_of(made), set(), compile_s, quiet=True):
    found += fresh
  return {lines.key_of(one): one for one in found}, loop.rows_of(made, found, compile_s)


@pytest.fixture(scope="module")
def policies():
  return _policies()  # made once, so that what is compiled for them is found again


@pytest.fixture(scope="module")
def alone(loaded, policies):
  return _measured(loop.make(loaded, policies, questions.examples()))


def _said(answers):
  return {
    key: (one["pred"], one["score"], one["stopped"], one["output_tokens"])
    for key, one in answers.items()
  }


@pytest.mark.parametrize("share_prefill", [False, True])
def test_batch_mates_do_not_matter(loaded, policies, alone, share_prefill):
  made = loop.make(
    loaded, policies, questions.examples(), batch_size=2, share_prefill=share_prefill
  )
  answers, rows = _measured(made)
  assert len(answers) == 14 and len({one["pred"] for one in answers.values()}) > 7
  assert _said(answers) == _said(alone[0])
  batches = {one["batch"] for one in answers.values()}
  assert batches == {"l2", "l0", "l1", "c1"}  # the longest first; of five the last is alone
  assert [row["score"] for row in rows] == [row["score"] for row in alone[1]]
  assert {row["batch_size"] for row in rows} == {2}
  assert all((row["ttft_s_p50"] is None) == share_prefill for row in rows)


def test_tokens_that_end_a_task(loaded, policies):
  """An answer that holds one ends before it; the others go on to their limit."""
  runner = loop.make(loaded, policies[:1], questions.examples()).runners[0]
  whole = {
    one.id: generate(runner, loaded.params, [one.prompt_ids], max_new_tokens=one.new_tokens).tokens[
      0
    ]
    for one in questions.examples()
  }
  first = {tokens[0] for tokens in whole.values()}  # which may not be a stop token
  stop = next(token for token in whole["l0"] if token not in first)
  answers = _measured(loop.make(loaded, policies[:1], questions.examples((stop,))))[0]
  for one in answers.values():
    tokens = whole[one["id"]]
    cut = tokens[: tokens.index(stop)] if stop in tokens else tokens
    assert one["pred"] == loaded.tokenizer.decode(cut)
    assert one["stopped"] == (stop in tokens) and one["output_tokens"] == len(cut)
  assert {one["stopped"] for one in answers.values()} == {True, False}


def test_a_runner_compiles_before_the_clock_runs_for_each_way_to_end(loaded, policies, monkeypatch):
  seen = []

  def generate(runner, params, prompts, *, max_new_tokens, sampling=None, **options):
    seen.append((max_new_tokens > 3, sampling))
    return Generation([[5, 6, 7]] * len(prompts), [False] * len(prompts), 1.0, [0.5], None)

  monkeypatch.setattr(harness, "generate", generate)
  ends = {"lookup": (7,), "chain": ()}
  examples = [one._replace(stop_ids=ends[one.task], new_tokens=9) for one in questions.examples()]
  _measured(loop.make(loaded, policies[:1], examples))
  compiled = [sampling for asked, sampling in seen if not asked]
  assert len(compiled) == 2 == len(set(compiled))
  first = {sampling: asked for asked, sampling in reversed(seen)}
  assert list(first.values()) == [False, False]


def _prediction(batch, ttft_s, step_s, output_tokens, stopped, **fields):
  times = {"batch": batch, "ttft_s": ttft_s, "step_s": step_s, "prompt_tokens": 10}
  return times | {"output_tokens": output_tokens, "stopped": stopped} | fields


def test_times_of_a_batch_count_once():
  together = [
    _prediction("0", 2.0, [0.5, 0.5], 3, False),  # the first of the prefill, then two steps
    _prediction("0", 2.0, [0.5, 0.5], 1, True),  # the first of the prefill, a stop token
    _prediction("9", 4.0, [1.0], 2, False),
  ]
  speeds = harness.speeds(together)
  assert speeds["prefill_tokens_per_s"] == 30 / 6.0
  assert speeds["ttft_s_p50"] == 2.0 and speeds["tpot_s_p50"] == 0.5
  assert speeds["decode_tokens_per_s"] == (2 + 1 + 1) / 2.0
  assert harness.speeds([_prediction("0", None, [], 0, True)]) == {}


def test_rows_say_what_came_back_from_the_host(loaded, alone):
  """The same answers, and the bytes of a batch counted once, though each of its lines has them."""
  policy = make_policy("quest", budget_tokens=16, dense_layers=0)
  made = loop.make(loaded, [(policy, "whole_page")], questions.examples(), batch_size=2)
  answers, rows = _measured(made)
  said = {one["id"]: one["pred"] for one in answers.values()}
  assert said == {one["id"]: one["pred"] for one in alone[0].values() if one["policy"] == "quest"}
  for row in rows:
    batches = {one["batch"]: one for one in answers.values() if one["task"] == row["task"]}
    steps = sum(len(one["step_s"]) for one in batches.values())
    moved = sum(one["recall"]["moved_bytes"] for one in batches.values())
    assert row["recall_bytes_per_step"] == moved / steps > 0
    assert row["page_hit_ratio"] == row["token_hit_ratio"] == 0  # nothing is used again
    assert row["host_kv_bytes"] == made.runners[0].decode_bytes.host > 0
  assert all(row["recall_bytes_per_step"] is None for row in alone[1])
