"""Metrics of L-Eval: hand-made answers, and golden scores where its data is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import exam, leval, metrics

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "leval"


@pytest.mark.parametrize(
  ("given", "one", "several"),
  [
    ("", "None", "None"),
    ("C", "C", "C"),
    ("AB", "AB", "AB"),
    ("DA", "D", "AD"),
    ("The answer is (C).", "C", "C"),
    ("B) and D)", "B", "BD"),
    ("A. C. D. Question: B.", "A", "ACD"),
    ("According to it, C.", "A", "AC"),
    ("It says: According to (C)", "A", "C"),
    ("it says CCB here", "C", "B"),  # the capital before a blank is the last of the word
    ("it is CB, here", "C", "CB"),
    ("no idea", "A", "A"),
  ],
)
def test_chosen_letters(given, one, several):
  assert exam.letters(given, several=False) == one
  assert exam.letters(given, several=True) == several


def test_right_letters():
  assert exam.right_letters("(B) Their own. A") == "B"
  assert exam.right_letters("ABD") == "ABD" and exam.right_letters("none") == "A"
  with pytest.raises(ValueError, match="blank"):
    exam.right_letters(" ")


def test_some_of_the_right_letters_are_a_quarter():
  assert leval.score("coursera", "A. C.", ["ACD"]) == 0.25
  assert leval.score("coursera", "A. B.", ["ACD"]) == 0.0
  assert leval.score("coursera", "DCA", ["ACD"]) == 1.0
  assert leval.score("tpo", "C.", ["C"]) == 1.0 and leval.score("quality", "D", ["(A) x"]) == 0.0


@pytest.mark.parametrize(
  ("text", "number"),
  [
    ("So 9 * 2 = $18. The answer is $1,800.50.", "1800"),
    ("7 eggs, then 8 apples\n\nand 9 pears", "8"),
    ("x =\n-5 degrees", "5"),
    ("none", ""),
  ],
)
def test_number(text, number):
  assert exam.number(text) == number


def test_gsm100():
  assert leval.score("gsm100", "The answer is 18.0", ["18"]) == 1.0
  assert leval.score("gsm100", "The answer is 180", ["18"]) == 0.0
  assert leval.score("gsm100", "none", ["18"]) == 0.0


def test_code():
  assert leval.score("codeU", "The final output is [1, 2.0]", ["[1, 2]"]) == 1.0
  assert leval.score("codeU", "I think that it would be\n[ [1 2] [3] ]", ["[[1, 2], [3]]"]) == 1.0
  # Behind "the final output" three words more than the reference has, the blank before them one.
  said = "the final output 1 2 3 4 5 6"
  assert leval.score("codeU", said, ["3"]) == 1.0 and leval.score("codeU", said, ["4"]) == 0.0
  assert leval.score("codeU", "5 1 2 3 4", ["5"]) == 0.0


def test_topics_are_looked_for_within_the_answer():
  topic = "The role of art"
  assert leval.score("topic_retrieval_longchat", 'It was "the ROLE of  art".', [topic]) == 1.0
  assert leval.score("topic_retrieval_longchat", "art", [topic]) == 0.0


def test_statements_about_a_story():
  both = "True [fact: False]"
  assert leval.score("sci_fi", "True. [fact: It is false]", [both]) == 1.0
  assert leval.score("sci_fi", "False, not true [fact: false]", [both]) == 0.5
  assert leval.score("sci_fi", "who knows [fact: who knows]", [both]) == 0.0
  assert leval.score("sci_fi", "Untrue", ["true"]) == 1.0  # "true" within a word is enough
  with pytest.raises(ValueError, match=r"no '\[fact: "):
    leval.score("sci_fi", "True", [both])


def test_open_tasks():
  assert leval.score("financial_qa", "in the year 2014", ["2014"]) == 2 * (1 / 3) / (4 / 3)
  assert leval.score("news_summ", "The cats sat.", ["the cat sat"]) == 2 / 3
  assert {task.metric for task in leval.TASKS.values()} == {"exact_match", "f1", "rougeL"}


def test_numbers_are_compared_as_such():
  assert exam.exact_match("3.0", "3") == 1.0 and exam.exact_match("30", "3") == 0.0


@pytest.mark.skipif(not SHARED.exists(), reason="L-Eval's data is not at hand (GPL-3.0)")
@pytest.mark.parametrize(
  "task",
  [
    *("quality", "gsm100", "topic_retrieval_longchat", "scientific_qa", "multidoc_qa"),
    *("legal_contract_qa", "gov_report_summ"),
  ],
)
def test_golden_scores(task):
  lines = (SHARED / "golden" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
  assert len(lines) > 10
  for line in lines:
    one = json.loads(line)
    if task == "gov_report_summ":
      scores = metrics.rouge(one["pred"], one["gt"])
      assert scores == pytest.approx(one["score"], abs=1e-6)
    else:
      score = leval.score(task, one["pred"], [one["gt"]])
      assert score == pytest.approx(one["score"], abs=1e-9)
