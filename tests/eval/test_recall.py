"""Synthetic recall: lengths, places, answers that follow from the facts and from nothing else."""

from __future__ import annotations

import random
import re

import pytest

from eval import recall

BOOK = recall.plain("\n".join(f"Sentence number {n} of the book ends here." for n in range(900)))


def _build(task, length=1024, seed=0, **options):
  return recall.build(task, BOOK, length, random.Random(seed), **options)


def _follow(task: str, facts: str, question: str) -> str:
  """The answer, worked out from the facts alone."""
  if task == "chain":
    links = dict(re.findall(r"\[([A-Z]{2})>([A-Z]{2})\]", facts))
    chain = [question[1:3]]
    while chain[-1] in links:
      chain.append(links[chain[-1]])
    return ">".join(chain[1:])
  pattern = {"lookup": r"\[([A-Z]{2})=(\d{4})\]", "passkey": r" The passkey ([A-Z]{2}): (\d{5})\."}
  (key,) = re.findall("[A-Z]{2}", question)
  return dict(re.findall(pattern[task], facts))[key]


@pytest.mark.parametrize("task", recall.TASKS)
@pytest.mark.parametrize("length", [128, 2048, 4000])
def test_length_prompt_and_answer(task, length):
  for seed in range(20):
    text = _build(task, length, seed)
    assert len(text.text) == len(text.text.encode("ascii")) == length
    assert text.prompt + text.answer == text.text  # one question: the answer is the end
    assert text.answer == _follow(task, *text.prompt.split("\n"))


@pytest.mark.parametrize("task", recall.TASKS)
def test_what_is_not_a_fact_is_the_book(task):
  context = _build(task, facts=6).prompt.partition("\n")[0]
  without, count = re.subn(r" \[[^]]*\]| The passkey ..: \d+\.", "", context)
  assert without in BOOK and count == 6


@pytest.mark.parametrize("task", recall.TASKS)
def test_many_questions(task):
  text = _build(task, facts=12, questions=4)
  facts, *lines = text.text.split("\n")
  assert len(lines) == len(set(lines)) == len(text.answers) == 4
  for (start, stop), line in zip(text.answers, lines, strict=True):
    question, answer = line[: start - stop], text.text[start:stop]
    assert line == question + answer and answer == _follow(task, facts, question)


@pytest.mark.parametrize("task", recall.TASKS)
def test_no_key_twice_and_no_answer_by_chance(task):
  answers = set()
  for seed in range(30):
    text = _build(task, 4000, seed)
    facts = re.findall(r"\[(..)[=>]|passkey (..):", text.prompt.partition("\n")[0])
    keys = ["".join(fact) for fact in facts]
    assert len(keys) == len(set(keys)) >= 30  # one for every 128 characters
    answers.add(text.answer)
  assert len(answers) == 30


@pytest.mark.parametrize("task", recall.TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth(task, depth):
  fact = r" \[[^]]*\]| The passkey ..: \d+\."
  for seed in range(10):
    text = _build(task, 4000, seed, depth=depth)
    context = text.prompt.partition("\n")[0]
    needed = f">{text.answer[-2:]}]" if task == "chain" else text.answer
    (match,) = (one for one in re.finditer(fact, context) if needed in one[0])
    before, book = (len(re.sub(fact, "", part)) for part in (context[: match.start()], context))
    assert before / book == pytest.approx(depth, abs=0.01)


def test_seeds():
  assert _build("chain", seed=3) == _build("chain", seed=3) != _build("chain", seed=4)


def test_plain():
  assert recall.plain("Ægir  said:\n“Go.”\n") == "gir said: Go."


@pytest.mark.parametrize(
  ("options", "complaint"),
  [
    ({"task": "riddle"}, "unknown task 'riddle', expected one of lookup, chain, passkey"),
    ({"task": "lookup", "facts": 3, "questions": 4}, "4 questions about 3 facts"),
    ({"task": "lookup", "questions": 0}, "0 questions about 8 facts"),
    ({"task": "lookup", "length": 64, "facts": 8}, "8 facts and 1 questions leave -"),
    ({"task": "lookup", "length": 100_000, "facts": 8}, f"for a book of {len(BOOK)}"),
  ],
)
def test_bad_input(options, complaint):
  with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
    _build(**options)
  assert "\n" not in str(caught.value)
