"""Rows against dense, means over tasks, and the tables of them."""

from __future__ import annotations

import pytest

from eval import summary


def _row(policy, task, score, **fields):
  costs = {"tpot_s_p50": 0.1, "device_kv_bytes": 100, "metadata_bytes": 1, "window_tokens": None}
  counts = {"num_examples": 4, "limit_hits": 1, "decode_tokens_per_s": 10.0}
  row = (
    {"policy": policy, "store": "resident", "task": task, "metric": "f1", "score": score}
    | costs
    | counts
  )
  relative = {"dense_score": None, "retention": None, "speedup_vs_dense": None}
  budget = None if policy == "dense" else 64
  row |= {"budget_tokens": budget, "question_in_window": None, "metric": "f1"}
  return row | relative | fields


def test_differences_to_dense_task_by_task():
  rows = [_row("dense", "a", 1.0), _row("dense", "b", 0.5, tpot_s_p50=0.3)]
  for row in (_row("quest", "a", 0.25, tpot_s_p50=0.05), _row("quest", "b", 0.75)):
    rows.append(summary.compare(row, rows))
  assert rows[2]["retention"] == 0.25 and rows[2]["speedup_vs_dense"] == 2.0
  assert rows[3]["dense_score"] == 0.5 and rows[3]["retention"] == 1.5
  assert "0.25 (-0.75)" in summary.tables(rows) and "0.75 (+0.25)" in summary.tables(rows)
  dense, quest = summary.means(rows)
  assert dense["score"] == 0.75 and quest["score"] == 0.5
  assert quest["retention"] == pytest.approx(2 / 3)
  assert quest["speedup_vs_dense"] == pytest.approx(2.5)  # as in reports: the median of both tasks
  assert "2 of 8" in summary.tables(rows)  # answers that were cut at their limit
  assert quest["tpot_s_p50"] == pytest.approx(0.075) and dense["tpot_s_p50"] == pytest.approx(0.2)


def test_without_dense_nothing_is_compared():
  row = summary.compare(_row("quest", "a", 0.25), [])
  assert row["dense_score"] is None
  assert "0.25" in summary.tables([row]) and "(" not in summary.tables([row])


def test_each_metric_of_a_task_has_its_own_dense_row():
  dense = [_row("dense", "a", score, metric=metric) for metric, score in (("f1", 1.0), ("em", 0.5))]
  for metric, retention in (("f1", 0.25), ("em", 0.5)):
    row = summary.compare(_row("quest", "a", 0.25, metric=metric), dense)
    assert row["retention"] == retention
  row = summary.compare(
    _row("quest", "a", None, metric="nll"), [_row("dense", "a", None, metric="nll")]
  )
  assert row["retention"] is None and row["speedup_vs_dense"] == 1.0


def test_answers_that_end_at_once_have_no_speed():
  row = summary.compare(_row("dense", "a", 0.5, tpot_s_p50=None, decode_tokens_per_s=None), [])
  assert row["speedup_vs_dense"] is None and row["dense_score"] == 0.5
  assert summary.means([row])[0]["decode_tokens_per_s"] is None
  assert "-" in summary.tables([row]).splitlines()[-1]


def test_in_how_many_tasks_the_question_was_in_the_window():
  rows = [
    _row("snapkv", task, 1.0, window_tokens=32, question_in_window=inside)
    for task, inside in (("a", True), ("b", False), ("c", True))
  ]
  assert "2 of 3 tasks (last 32 tokens)" in summary.tables(rows)
