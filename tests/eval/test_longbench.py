"""LongBench's files and prompts: what is read, what is asked, and what a cut leaves."""

from __future__ import annotations

import json

import pytest

from eval import jsonl, longbench, longbench_prompts, prompts, run_longbench, suite, tasks
from models import tokenizer
from tests.models.test_tokenizer import CHATML, INFO, PATH

RECORD = {
  "input": "Who {came}?",
  "context": "Zoë and the cat came in.",
  "answers": ["Zoë", "the cat"],
  "length": 6,
  "dataset": "qasper",
  "language": "en",
  "all_classes": None,
  "_id": "a1",
}


@pytest.fixture(scope="module")
def plain():
  return tokenizer.from_gguf(INFO, PATH)


@pytest.fixture(scope="module")
def chat():
  return tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)


def _write(folder, lines, name="qasper"):
  path = folder / f"{name}.jsonl"
  text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
  path.write_text(text, encoding="utf-8")
  return path


def _one(words, name="qasper", tokens=5000, **fields):
  return next(suite.examples(run_longbench.SUITE, words, name, [RECORD | fields], tokens))


def test_tasks():
  assert len(longbench.TASKS) == 21 and len(longbench.TASKS_E) == 13
  templates = longbench_prompts._templates()
  assert list(templates) == list(longbench.TASKS)
  assert all("{context}" in one for one in templates.values())
  assert "asconcisely" in templates["narrativeqa"]  # as the authors wrote it
  assert longbench.task_of("trec_e") is longbench.TASKS["trec"]
  with pytest.raises(ValueError, match="unknown task 'musique_e'"):
    longbench.task_of("musique_e")


def test_records_are_read_as_they_are(tmp_path):
  record = RECORD | {"context": "one\u2028two\x85three"}
  path = tmp_path / "qasper.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" + json.dumps(record, ensure_ascii=False).encode() + b"\n\n")
  assert longbench.find(tmp_path, "qasper") == path
  assert jsonl.read(path, longbench.FIELDS) == [record]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"input": "a", "con', "line 2 is not a whole JSON record .*cut off"),
    ("[1]", "line 2 is a JSON list"),
    ({"input": "a"}, "line 2: the record has no 'context', expected input, context"),
    (RECORD | {"answers": "Zoë"}, "line 2: 'answers' is \"Zoë\", expected list"),
    (RECORD | {"answers": ["a", 3]}, r"line 2: 'answers' is \[\"a\", 3\], expected list\[str\]"),
    (RECORD | {"all_classes": 1}, r"'all_classes' is 1, expected list\[str\] \| None"),
    (RECORD | {"length": "1"}, "'length' is \"1\", expected int"),
    (RECORD | {"length": True}, "'length' is true, expected int"),
    (RECORD | {"input": "x\ud800y"}, r"line 2 has half a surrogate pair, '\\ud800', which is no"),
    ("[" * 100_000, "line 2 is not a whole JSON record"),
    ('{"length": ' + "9" * 5000 + "}", "line 2 is not a whole JSON record"),
  ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
  path = _write(tmp_path, [RECORD, line])
  with pytest.raises(ValueError, match=f"qasper.jsonl.*{message}") as error:
    jsonl.read(path, longbench.FIELDS)
  assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
  with pytest.raises(ValueError, match=r"qasper.jsonl is missing.*--download"):
    longbench.find(tmp_path, "qasper")
  with pytest.raises(ValueError, match="unknown task 'qaspr'"):
    longbench.find(tmp_path, "qaspr")
  with pytest.raises(ValueError, match="is empty"):
    jsonl.read(_write(tmp_path, [" "]), {})
  path = tmp_path / "latin.jsonl"
  path.write_bytes(b"{}\n" + '{"input": "Zoë"}'.encode("latin-1"))
  with pytest.raises(ValueError, match="line 2 is not UTF-8 text"):
    jsonl.read(path, {})


def test_a_prompt_in_the_chat_template(chat):
  example = _one(chat)
  text = chat.decode(example.prompt_ids, skip_special=False)
  assert text.startswith("<|im_start|>user\nYou are given a scientific article and a question.")
  assert "\n\nArticle: Zoë and the cat came in.\n\n" in text and "Question: Who {came}?" in text
  assert text.endswith("Answer:<|im_end|>\n<|im_start|>assistant\n") and example.chat
  assert (example.task, example.id, example.length) == ("qasper", "0", 6)
  assert example.references == ("Zoë", "the cat") and example.new_tokens == 128
  tail = text[text.index("Answer the question based on the above") :]
  assert example.question_tokens == len(chat.encode(tail))


@pytest.mark.parametrize("name", ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"])
def test_a_prompt_without_it(chat, name):
  classes = ["a", "b"]
  example = _one(chat, name, all_classes=classes)
  text = chat.decode(example.prompt_ids, skip_special=False)
  assert "<|im" not in text and not example.chat and example.classes == ("a", "b")
  assert ("Who {came}?" in text) == (name != "lcc")
  newline = chat.encode("\n")
  assert example.stop_ids == (tuple(newline) if name == "samsum" else ())


@pytest.mark.parametrize("name", ["trec", "triviaqa", "samsum", "lsht"])
def test_an_empty_input(chat, name):
  example = _one(chat, name, input="")
  assert example.prompt_ids and example.question_tokens == 0


def test_a_model_without_a_template_gets_plain_text(plain, chat):
  example = _one(plain)
  assert not example.chat
  text = plain.decode(example.prompt_ids)
  assert f"<|im_start|>user\n{text}<|im_end|>" in chat.decode(
    _one(chat).prompt_ids, skip_special=False
  )


@pytest.mark.parametrize("name", ["qasper", "trec"])
@pytest.mark.parametrize("most", [200, 201])
def test_a_cut_keeps_both_ends_and_the_template(chat, name, most):
  words = " ".join(f"w{n}" for n in range(400))
  whole = _one(chat, name, context=words).prompt_ids
  example = _one(chat, name, most, context=words)
  around = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
  before, after = (len(chat.encode(one)) if name == "qasper" else 0 for one in around)
  half = (most - before - after) // 2
  assert example.prompt_ids == whole[: before + half] + whole[len(whole) - half - after :]
  assert len(example.prompt_ids) in (most, most - 1)


def test_ids_are_not_encoded_again(chat):
  text = "a" + "é" * 40  # cut within the bytes of a character, which no text could say
  ids = prompts.cut_middle(chat, text, text, 50)
  assert len(ids) == 50 and "\ufffd" in chat.decode(ids)


def test_the_token_that_starts_a_text_is_kept_once(plain):
  first = tokenizer.from_gguf(INFO | {"tokenizer.ggml.add_bos_token": True}, PATH)
  text = "abcdefghij" * 10
  ids = prompts.cut_middle(first, text, text, 21)
  assert ids == [first.bos_id, *plain.encode(text[:10]), *plain.encode(text[-10:])]


def test_templates_that_trim_or_change_a_message():
  trims = INFO | {"tokenizer.chat_template": "<|im_start|>{{ messages[0]['content'] | trim }}!"}
  words = tokenizer.from_gguf(trims, PATH)
  body = " " + "abcdefghij" * 10 + " "
  ids = prompts.cut_middle(words, prompts.conversation(words, body), body, 12)
  assert words.decode(ids, skip_special=False) == "<|im_start|>abcdefghij"[:-5] + "fghij!"
  with pytest.raises(ValueError, match="changes the text of messages"):
    prompts.cut_middle(words, body.upper(), body, 12)


def test_no_room(chat):
  with pytest.raises(ValueError, match=r"20 tokens have no room .* --prompt_tokens"):
    _one(chat, tokens=20)
  assert prompts.room("m", 100, None, 64) == 36 and prompts.room("m", 100, 30, 64) == 30
  with pytest.raises(ValueError, match=r"--prompt_tokens=40 .*at most 36"):
    prompts.room("m", 100, 40, 64)
  with pytest.raises(ValueError, match="leave no room"):
    prompts.room("m", 64, None, 64)


def test_system_messages(chat, plain):
  said = prompts.conversation(chat, "ask", "rule", "\nAnswer:")
  assert said.startswith("<|im_start|>system\nrule<|im_end|>\n<|im_start|>user\nask<|im_end|>")
  assert said.endswith("<|im_start|>assistant\n\nAnswer:")
  assert prompts.conversation(plain, "ask", "rule") == "rule\n\nask"
  refuses = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m['content'] }}]{% endfor %}"
  )
  forgets = "[{{ messages[-1]['content'] }}]"
  for template in (refuses, forgets):
    words = tokenizer.from_gguf(INFO | {"tokenizer.chat_template": template}, PATH)
    assert prompts.conversation(words, "ask", "rule") == "[rule\n\nask]"


def test_scores_by_the_name_of_a_task():
  assert tasks.score("qasper_e", "the cat", ("Zoë", "the cat")) == 1.0
  assert tasks.score("trec", "b", ("b",), ("a", "b")) == 1.0
  assert tasks.metric("lcc_e") == "code_similarity" and tasks.metric("qmsum") == "rouge_l"
