"""Prompts with one needle: wording, length, place, seeds."""

from __future__ import annotations

import dataclasses
import re

import pytest

from eval import needle
from models import tokenizer
from tests.models.test_tokenizer import CHATML, INFO, PATH

TEXT = " ".join(f"Sentence number {n} of the book ends here." for n in range(400))


@pytest.fixture(scope="module")
def words():
  return tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)


def test_wording(words):
  (one,) = needle.build_prompts(words, TEXT, tokens=900, depths=[0.5], digits=[5])
  prompt = words.decode(one.prompt_ids, skip_special=False)
  pattern = (
    r"<\|im_start\|>user\nA special magic number is hidden within the following text\. Make sure "
    r"to memorize it\. I will quiz you about the number afterwards\.\n(?P<before>.*\.) One of the "
    rf"special magic numbers for {one.key} is: {one.answer}\. (?P<after>.*\.)\nWhat is the special "
    rf"magic number for {one.key} mentioned in the provided text\?<\|im_end\|>\n<\|im_start\|>"
    rf"assistant\nThe special magic number for {one.key} mentioned in the provided text is"
  )
  match = re.fullmatch(pattern, prompt)
  assert match
  assert f"{match['before']} {match['after']}" == TEXT[: len(match["before"] + match["after"]) + 1]


def test_one_prompt_for_each_length_and_depth(words):
  needles = needle.build_prompts(words, TEXT, tokens=2000, depths=(0.2, 0.6), digits=(5, 7))
  assert [(one.digits, one.depth) for one in needles] == [(5, 0.2), (5, 0.6), (7, 0.2), (7, 0.6)]
  assert len({one.key for one in needles}) == 4
  sentence = len(words.encode(" Sentence number 100 of the book ends here."))
  for one in needles:
    assert len(one.answer) == one.digits and one.answer[0] != "0" and one.answer.isdecimal()
    assert one.tokens == len(one.prompt_ids)
    assert 2000 - sentence <= one.tokens <= 2000
    prompt = words.decode(one.prompt_ids)
    assert prompt.count(one.answer) == 1
    assert prompt.index(one.answer) / len(prompt) == pytest.approx(one.depth, abs=0.1)


def test_seeds(words):
  def answers(seed):
    return [(n.key, n.answer) for n in needle.build_prompts(words, TEXT, tokens=700, seed=seed)]

  assert answers(1) == answers(1) != answers(2)


@pytest.mark.parametrize(("depth", "count"), [(0.0, 0), (1.0, -1)])
def test_at_the_ends(words, depth, count):
  (one,) = needle.build_prompts(words, TEXT, tokens=900, depths=[depth], digits=[5])
  haystack = words.decode(one.prompt_ids).split("\n")[2]
  sentences = haystack.split(". ")
  assert one.answer in sentences[count]


def test_exact_fit_uses_the_whole_text(words):
  short = TEXT[:420].rpartition(" ")[0]
  case = {"depths": [0.5], "digits": [5]}
  with pytest.raises(ValueError, match="the text is too short") as caught:
    needle.build_prompts(words, short, tokens=5000, **case)
  most = int(re.search(r"has (\d+) tokens", str(caught.value))[1])
  assert needle.build_prompts(words, short, tokens=most, **case)[0].tokens == most
  assert "\n" not in str(caught.value)


def test_no_room_for_the_question(words):
  with pytest.raises(ValueError, match="a prompt of 50 tokens has no room"):
    needle.build_prompts(words, TEXT, tokens=50)


def test_without_a_chat_template(words):
  plain = dataclasses.replace(words, chat_template=None)
  (one,) = needle.build_prompts(plain, TEXT, tokens=900, depths=[0.5], digits=[5])
  prompt = words.decode(one.prompt_ids)
  assert prompt.startswith("A special magic number")
  assert prompt.endswith(
    f"provided text? The special magic number for {one.key} mentioned in the provided text is"
  )


@pytest.mark.parametrize(
  ("text", "pieces"),
  [
    (
      'He said "Go." Then (so it is!) he went.',
      ['He said "Go." ', "Then (so it is!) ", "he went."],
    ),
    ("3.14 is pi. Yes", ["3.14 is pi. ", "Yes"]),
    ("你好。再见。", ["你好。", "再见。"]),
    ("word " * 400, ["word " * 160, "word " * 160, "word " * 80]),
    ("x" * 2000, ["x" * 800, "x" * 800, "x" * 400]),
  ],
)
def test_sentences_lose_nothing(text, pieces):
  found = needle._SENTENCE.findall(text)
  assert found == pieces
  assert "".join(found) == text


def test_found():
  assert needle.found("12345", " 12345.")
  assert not needle.found("12345", "1234 5")
