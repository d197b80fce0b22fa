"""Metrics of LongBench: golden scores of the official code, and its quirks one by one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from eval import longbench, metrics

GOLDEN = json.loads(
  (Path(__file__).parents[1] / "data" / "longbench" / "golden.json").read_text(encoding="utf-8")
)

EDGE = 494  # words of the longest two sentences that the official script can compare


@pytest.mark.parametrize("task", GOLDEN)
def test_golden_scores(task):
  assert len(GOLDEN[task]) >= 2
  for one in GOLDEN[task]:
    score = longbench.score(task, one["pred"], one["answers"], one["all_classes"] or ())
    assert score == one["score"], one["pred"][:60]


def test_golden_scores_are_of_all_kinds():
  assert len(GOLDEN) == 13
  scores = [one["score"] for task in GOLDEN.values() for one in task]
  assert 0.0 in scores and 1.0 in scores and len({*scores}) > 40


def test_f1_counts_words_as_often_as_both_have_them():
  assert metrics.qa_f1("The cat, a cat!", "cat cat dog") == 2 * 1.0 * (2 / 3) / (1.0 + 2 / 3)
  assert metrics.qa_f1("U.S.A.", "usa") == 1.0
  assert metrics.qa_f1("the", "a") == 0.0 == metrics.qa_f1("", "cat")
  assert metrics.qa_f1("theatre", "atre") == 0.0  # articles are whole words


def test_chinese_f1_leaves_out_marks_and_blanks():
  assert metrics.qa_f1_zh("厦门大学。", " 厦门大学！") == 1.0  # noqa: RUF001
  assert metrics.qa_f1_zh("。", "，") == 0.0  # noqa: RUF001


def test_classes_that_are_part_of_the_right_one_do_not_count():
  classes = ["Date", "Date of birth", "City"]
  assert metrics.classification("Date of birth", "Date of birth", classes) == 1.0
  assert metrics.classification("Date", "Date of birth", classes) == 0.0
  assert metrics.classification("City or Date of birth", "Date of birth", classes) == 0.5


def test_of_two_such_neighbours_the_second_is_passed_over():
  classes = ["a", "ab", "abc"]
  assert metrics.classification("abc", "abc", classes) == 0.5  # "ab" stays


def test_classes_are_needed():
  with pytest.raises(ValueError, match="all_classes"):
    longbench.score("trec", "City", ["City"])


def test_numbers():
  assert metrics.count("8, not 9 of 8", "8") == 2 / 3
  assert metrics.count("eight", "8") == 0.0
  assert metrics.retrieval("Paragraph 15. It is 15, not 1.", "Paragraph 15") == 2 / 3
  assert metrics.retrieval_zh("段落3", "段落3") == 1.0
  with pytest.raises(ValueError, match="'15' does not name a paragraph"):
    metrics.retrieval("15", "15")


def test_code_is_compared_with_the_first_line_that_is_code():
  code = "x = 1"
  assert metrics.code_similarity("\n```\n# one\n// two\nx = 1\ny", code) == 1.0
  assert metrics.code_similarity("x = 12", code) == 0.91
  assert metrics.code_similarity("\n\n", code) == 0.0  # no line
  assert metrics.code_similarity("#", "") == 1.0  # both are empty
  assert metrics.code_similarity("ab\n", "abcdefghijklmno") == 0.24  # 4/17 in whole hundredths


def test_rouge_counts_different_words():
  assert metrics.rouge_l("a b", "a b") == pytest.approx(1.0, abs=1e-8)
  assert metrics.rouge_l("a a a b", "a b") == pytest.approx(1.0, abs=1e-8)
  for nothing in ("", ".", "..."):
    assert metrics.rouge_l(nothing, "a b") == 0.0 == metrics.rouge_l("a b", nothing)


def _rouge_of_long_sentences(words):
  """Two sentences that begin with the same word: the package goes back over all words of both."""
  given, other = (" ".join(["x", *(f"{letter}{n}" for n in range(words))]) for letter in "ab")
  return metrics.rouge_l(given, other)


def test_rouge_of_sentences_that_are_too_long_is_zero():
  """As in the official script, wherever the caller stands: each word needs a frame."""

  def deep(frames):
    return deep(frames - 1) if frames else _rouge_of_long_sentences(EDGE)

  before = sys.getrecursionlimit()
  assert _rouge_of_long_sentences(EDGE) > 0 and deep(300) > 0
  assert _rouge_of_long_sentences(EDGE + 1) == 0.0
  assert sys.getrecursionlimit() == before


def test_google_rouge_has_three():
  scores = metrics.rouge("The cats sat.", "the cat sat")
  assert scores == {"rouge1": 2 / 3, "rouge2": 0.0, "rougeL": 2 / 3}


def test_the_best_of_several_answers_counts():
  assert longbench.score("hotpotqa", "Oslo", ["Bergen", "Oslo"]) == 1.0
  assert longbench.score("hotpotqa_e", "Oslo", []) == 0.0


def test_the_first_line_of_four_tasks():
  assert longbench.score("triviaqa", "\n\nOslo\nPassage: Rome", ["Oslo"]) == 1.0
  assert longbench.score("samsum", "\nAmy is ill\nDialogue: x", ["Amy is ill"]) > 0.99
  assert longbench.score("lsht", "军事\n体育", ["军事"], ["体育", "军事"]) == 1.0
  assert longbench.score("qasper", "Oslo\nRome", ["Oslo"]) == pytest.approx(2 / 3)


def test_lengths():
  assert [longbench.bucket(n) for n in (3999, 4000, 7999, 8000)] == [
    *("0-4k", "4-8k", "4-8k", "8k+")
  ]


@pytest.mark.parametrize("package", ["rouge", "jieba", "rouge_score"])
def test_a_missing_package_is_named(package, monkeypatch):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(importlib, "import_module", missing)
  metrics._jieba.cache_clear()
  metrics._rouge_scorer.cache_clear()
  compare = {"rouge": metrics.rouge_l, "jieba": metrics.qa_f1_zh, "rouge_score": metrics.rouge}
  with pytest.raises(ValueError, match=rf"package {package}; .*kvjax\[eval\]"):
    compare[package]("a", "b")
