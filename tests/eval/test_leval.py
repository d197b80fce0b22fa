"""L-Eval's files and prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import jsonl, leval, leval_prompts, run_leval, suite, tasks
from models import tokenizer
from tests.models.test_tokenizer import CHATML, INFO, PATH

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "leval"
DOCUMENT = " ".join(f"word{n}" for n in range(600))
ROOM = 9000


@pytest.fixture(scope="module")
def chat():
  return tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)


def _record(questions=("What {is} it?", "And why?"), answers=("two words", "c"), **fields):
  record = {"input": "A {tale}.", "instructions": [*questions], "outputs": [*answers]}
  return record | {"evaluation": "exam", "source": "x"} | fields


def _examples(words, name, *records, most=ROOM):
  return list(suite.examples(run_leval.SUITE, words, name, records, most))


def _text(words, example):
  return words.decode(example.prompt_ids, skip_special=False)


@pytest.mark.parametrize("folder", leval.FOLDERS)
def test_layouts(tmp_path, folder):
  path = tmp_path / folder / "tpo.jsonl"
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("{}")
  assert leval.find(tmp_path, "tpo") == path
  with pytest.raises(ValueError, match=r"quality.jsonl is missing, also in Closed-ended-tasks"):
    leval.find(tmp_path, "quality")


def test_an_exam(chat):
  first, second = _examples(chat, "quality", _record())
  text = _text(chat, first)
  assert text.startswith(
    "<|im_start|>system\nNow you are given a very long document. Please follow"
  )
  assert "there is only a sinlge correct option." in text  # as the authors spell it
  asked = (
    "Document is as follows. A {tale}. \nQuestion: What {is} it?.  Please directly give the answer "
    "without any additional output or explanation "
  )
  end = "<|im_end|>\n<|im_start|>assistant\n\nAnswer:"
  assert text.endswith(f"<|im_start|>user\n{asked}{end}")
  assert (first.id, second.id) == ("0-0", "0-1") and first.references == ("two words",)
  assert first.new_tokens == 512 and first.chat
  tail = asked[asked.index("Question") :] + end
  assert first.question_tokens == len(chat.encode(tail))


def test_an_open_question_says_how_long_the_answer_is(chat):
  first, second = _examples(chat, "multidoc_qa", _record(evaluation="f1"))
  assert "A {tale}. Instruction: What {is} it? \nAnswer this question with 2 words.<" in _text(
    chat, first
  )
  assert "Answer this question with 1 words." in _text(chat, second)
  assert "required paragraph" in _text(chat, first)


@pytest.mark.parametrize("name", ["gsm100", "codeU", "topic_retrieval_longchat"])
def test_a_question_right_behind_the_document(chat, name):
  text = _text(chat, _examples(chat, name, _record())[0])
  end = "user\nA {tale}.\n\nWhat {is} it?<|im_end|>\n<|im_start|>assistant\n"
  assert text.endswith(end)
  assert leval_prompts._SYSTEM[name].strip() in text


def test_statements_are_asked_about_twice(chat):
  said = "It is so, based on the world described in the document."
  examples = _examples(chat, "sci_fi", _record([said], ["True [fact: False]"]))
  assert [one.id for one in examples] == ["0-0", "0-0-fact"]
  assert [one.references for one in examples] == [("true",), ("false",)]
  story, fact = (_text(chat, one) for one in examples)
  assert "A {tale}." in story and "described in the document.." in story
  assert "tale" not in fact and "system" not in fact
  assert "It is so, based on the real-world knowledge and facts" in fact
  assert fact.endswith("assistant\n\nAnswer:")
  right = [tasks.score("sci_fi", "It's true.", one.references) for one in examples]
  assert right == [1.0, 0.0]


def test_documents_for_judges_are_left_out(chat):
  records = [_record(evaluation=one) for one in ("LLM", "f1", "human")]
  assert [one.id for one in _examples(chat, "financial_qa", *records)] == ["1-0", "1-1"]


@pytest.mark.parametrize("most", [1700, 3000])
@pytest.mark.parametrize("name", ["quality", "codeU"])
def test_a_document_is_cut_by_words(chat, name, most):
  asked = ("Why?", "Why is that so? " * 9)
  examples = _examples(chat, name, _record(asked, input=DOCUMENT), most=most)
  assert all(len(one.prompt_ids) <= most for one in examples)
  kept = [
    [word for word in _text(chat, one).replace(".", " ").split() if word.startswith("word")]
    for one in examples
  ]
  assert kept[0] == kept[1]  # what the longer question has room for
  words = DOCUMENT.split(" ")
  count = len(kept[0])
  assert 0 < count < 600
  assert kept[0] == (words[-count:] if name == "codeU" else words[:count])


def test_bad_records(chat):
  with pytest.raises(ValueError, match="quality, record 0: 2 instructions and 1 outputs"):
    _examples(chat, "quality", _record(answers=["a"]))
  with pytest.raises(ValueError, match="gsm100, record 1 has no instructions, expected at least"):
    _examples(chat, "gsm100", _record(), _record([], []))
  for blank in ("", " \n"):
    with pytest.raises(ValueError, match="gsm100, record 0: instruction 1 is blank, expected a"):
      _examples(chat, "gsm100", _record(["Why?", blank]))
  with pytest.raises(ValueError, match=r"60 tokens has no room .*quality.*--prompt_tokens"):
    _examples(chat, "quality", _record(), most=60)
  with pytest.raises(ValueError, match="unknown task 'qualty'"):
    _examples(chat, "qualty", _record())


def test_metrics_by_the_name_of_a_task():
  assert tasks.metric("tpo") == "exact_match" and tasks.metric("meeting_summ") == "rougeL"
  assert tasks.score("coursera", "A.", ("AB",)) == 0.25


@pytest.mark.skipif(not SHARED.exists(), reason="L-Eval's data is not at hand (GPL-3.0)")
@pytest.mark.parametrize("name", ["sci_fi", "gsm100", "scientific_qa"])
def test_real_files(chat, name):
  records = jsonl.read(leval.find(SHARED, name), leval.FIELDS)[:1]
  example = next(suite.examples(run_leval.SUITE, chat, name, records, 9000))
  assert 7000 < len(example.prompt_ids) <= 9000 and example.references[0]
