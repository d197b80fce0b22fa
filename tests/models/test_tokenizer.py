"""Tokenizers out of GGUF metadata and out of Hugging Face folders, and chat templates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tokenizers
from tokenizers import pre_tokenizers, processors

import models
from models import tokenizer
from tests.models import tiny
from tests.models.llama2c import DATA, read_words

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "i n"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
INFO = {
  "tokenizer.ggml.model": "gpt2",
  "tokenizer.ggml.pre": "smollm",
  "tokenizer.ggml.tokens": TOKENS,
  "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
  "tokenizer.ggml.merges": MERGES,
  "tokenizer.ggml.bos_token_id": 1,
  "tokenizer.ggml.eos_token_id": 2,
}
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATH = Path("a.gguf")
TEXTS = ["", "the tin", " in the  12 tins\n\n\t", "Zoë 漢字 🙂", "a<|im_end|>b<|im_start|>", "3.14"]


@pytest.fixture(scope="module")
def words():
  return tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(words, text):
  ids = words.encode(text)
  assert words.decode(ids, skip_special=False) == text
  assert all(0 <= one < words.vocab_size for one in ids)
  plain = text.replace("<|im_end|>", "").replace("<|im_start|>", "")
  assert words.decode(ids) == plain


def test_merges_special_tokens_and_digits(words):
  index = {token: i for i, token in enumerate(TOKENS)}
  assert words.encode(" the<|im_end|>in") == [index["Ġthe"], 2, index["in"]]
  assert words.encode("12") == [index["1"], index["2"]]  # the merge never sees two digits at once
  assert words.vocab_size == len(TOKENS)
  assert words.bos_id == 1 and words.eos_ids == (2,) and not words.add_bos


PIECES = {  # of "I'm 12345, ok?!\n\n  end"
  "smollm": ["I", "'m", "Ġ", "1", "2", "3", "4", "5", ",", "Ġok", "?!", "ĊĊĠ", "Ġend"],
  "qwen2": ["I", "'m", "Ġ", "1", "2", "3", "4", "5", ",", "Ġok", "?!ĊĊ", "Ġ", "Ġend"],
  "llama-bpe": ["I", "'m", "Ġ", "123", "45", ",", "Ġok", "?!ĊĊ", "Ġ", "Ġend"],
}


@pytest.mark.parametrize("rule", PIECES)
def test_splitting_rules(rule):
  found = tokenizer.from_gguf(INFO | {"tokenizer.ggml.pre": rule}, PATH)
  pieces = found.backend.pre_tokenizer.pre_tokenize_str("I'm 12345, ok?!\n\n  end")
  assert [piece for piece, _ in pieces] == PIECES[rule]
  for text in TEXTS:
    assert found.decode(found.encode(text), skip_special=False).endswith(text)


def test_what_is_special_about_qwen2_and_llama3():
  info = INFO | {"tokenizer.ggml.tokens": [*TOKENS, "zq"], "tokenizer.ggml.token_type": None}
  qwen2, llama3 = (
    tokenizer.from_gguf(info | {"tokenizer.ggml.pre": rule}, PATH)
    for rule in ("qwen2", "llama-bpe")
  )
  assert llama3.encode("zq") == [1, len(TOKENS)]  # a whole word that no merge leads to
  assert qwen2.encode("zq") == [TOKENS.index("z"), TOKENS.index("q")]
  assert qwen2.encode("e\u0301") == qwen2.encode("\u00e9")
  assert llama3.encode("e\u0301") != llama3.encode("\u00e9")


@pytest.fixture(scope="module")
def pieces():
  """The vocabulary of stories260K as SentencePiece has it, and another implementation of it."""
  reference = read_words(DATA / "tok512.bin", 512)
  tokens = [piece.decode().replace(" ", "\u2581") for piece in reference.pieces]
  tokens[:3] = "<unk>", "<s>", "</s>"
  info = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.scores": reference.scores,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 253,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
  }
  return info, reference


@pytest.mark.parametrize(
  "text",
  [
    "Once upon a time, there was a little girl named Lily.",
    " two  blanks",
    "Zoë said 100%\n\tfür 漢",
    "aaaaaaaaaaa",
    "a",
    " ",
    "the<0x41>the",
  ],
)
def test_sentencepiece(pieces, text):
  info, reference = pieces
  found = tokenizer.from_gguf(info, PATH)
  assert found.encode(text) == reference.encode(text)
  assert found.decode(found.encode(text)) == text
  bare = tokenizer.from_gguf(
    info | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}, PATH
  )
  assert bare.encode(f" {text}") == reference.encode(text)[1:]
  assert bare.decode(bare.encode(text)) == text


def test_special_tokens_of_sentencepiece(pieces):
  found = tokenizer.from_gguf(pieces[0], PATH)
  ids = found.encode("<s>the</s>")
  assert ids[0] == 1 and ids[-1] == 2 and 1 not in ids[1:]
  assert found.decode(ids) == "the" and found.vocab_size == 512


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"tokenizer.ggml.scores": None}, "lacks tokenizer.ggml.tokens or tokenizer.ggml.scores"),
    ({"tokenizer.ggml.scores": [0.0]}, "scores has 1 entries for 512 tokens"),
  ],
)
def test_sentencepiece_that_is_refused(pieces, changes, expected):
  with pytest.raises(ValueError, match=rf"a\.gguf: .*{expected}"):
    tokenizer.from_gguf(pieces[0] | changes, PATH)


def test_bos_exactly_once(words):
  assert words.encode("in")[0] != 1
  adding = tokenizer.from_gguf(INFO | {"tokenizer.ggml.add_bos_token": True}, PATH)
  assert adding.encode("in") == [1, *words.encode("in")]
  assert adding.encode("<|im_start|>in") == [1, *words.encode("in")]
  assert adding.encode("") == [1]


def test_chat(words):
  messages = [{"role": "user", "content": "tin & <b>"}]
  closed = "<|im_start|>user\ntin & <b><|im_end|>\n"
  assert words.chat(messages, add_generation_prompt=False) == closed
  assert words.chat(messages) == closed + "<|im_start|>assistant\n"


def test_chat_without_a_template(words):
  with pytest.raises(ValueError, match="no chat template"):
    dataclasses.replace(words, chat_template=None).chat([])


@pytest.mark.parametrize(
  ("template", "expected"),
  [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% for %}", "chat template refused"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe|not safely callable"),
  ],
)
def test_chat_templates_that_refuse(words, template, expected):
  with pytest.raises(ValueError, match=expected):
    dataclasses.replace(words, chat_template=template).chat([{"role": "user", "content": "x"}])


def test_template_variables(words):
  template = "{{ bos_token }}{{ eos_token }}{{ messages[0] | tojson }}"
  text = dataclasses.replace(words, chat_template=template).chat([{"role": "é<"}])
  assert text == '<|im_start|><|im_end|>{"role": "é<"}'


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"tokenizer.ggml.pre": "tekken"}, "unknown pre-tokenizer 'tekken', expected one of smollm"),
    ({"tokenizer.ggml.model": "t5"}, "unknown tokenizer 't5', expected 'gpt2'"),
    ({"tokenizer.ggml.merges": ["q zz"]}, "vocabulary and merges do not fit"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for"),
    ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.tokens or"),
  ],
)
def test_gguf_tokenizers_that_are_refused(changes, expected):
  with pytest.raises(ValueError, match=rf"a\.gguf: .*{expected}"):
    tokenizer.from_gguf(INFO | changes, PATH)


def test_through_a_gguf_file(tmp_path):
  config = dataclasses.replace(tiny.CONFIG, vocab_size=len(TOKENS))
  extra = INFO | {"tokenizer.chat_template": CHATML}
  path = tiny.write_gguf(tmp_path / "a.gguf", config, tiny.tensors(config), extra=extra)
  loaded = models.load(str(path))
  assert loaded.model.config.vocab_size == loaded.tokenizer.vocab_size == len(TOKENS)
  assert loaded.tokenizer.decode(loaded.tokenizer.encode("the tin")) == "the tin"


def test_vocabulary_that_does_not_fit_the_embedding(tmp_path):
  config = dataclasses.replace(tiny.CONFIG, vocab_size=len(TOKENS) - 1)
  extra = INFO | {"llama.vocab_size": config.vocab_size}
  path = tiny.write_gguf(tmp_path / "a.gguf", config, tiny.tensors(config), extra=extra)
  with pytest.raises(ValueError, match="tokenizer has 264 ids and the embedding 263 rows"):
    models.load(str(path))


@pytest.fixture
def folder(tmp_path, words):
  """A hub folder with the same vocabulary."""
  path = tiny.write_folder(tmp_path / "hub", tiny.CONFIG, tiny.tensors(), eos_token_id=0)
  words.backend.save(str(path / "tokenizer.json"))
  return path


def test_folder_alone(folder, words):
  found = models.load(str(folder)).tokenizer
  for text in TEXTS:
    assert found.encode(text) == words.encode(text)
    assert found.decode(found.encode(text), skip_special=False) == text
  assert found.bos_id is None and found.chat_template is None
  assert found.eos_ids == (0,)  # of config.json, since nothing else says


def test_folder_with_everything(folder):
  tiny.write_json(folder / "special_tokens_map.json", {"bos_token": "<|endoftext|>"})
  template = [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]
  tiny.write_json(
    folder / "tokenizer_config.json",
    {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": True}
    | {"chat_template": template},
  )
  tiny.write_json(folder / "generation_config.json", {"eos_token_id": [0, 2]})
  found = tokenizer.from_folder(folder)
  assert (found.bos_id, found.eos_ids, found.add_bos) == (1, (0, 2), True)
  assert found.chat_template == CHATML
  (folder / "chat_template.jinja").write_text("{{ bos_token }}hello")
  found = tokenizer.from_folder(folder)
  assert found.chat([]) == "<|im_start|>hello"
  assert found.encode(found.chat([])).count(1) == 1


def test_folder_whose_post_processor_adds_bos(folder):
  backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  backend.post_processor = processors.TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
  )
  backend.save(str(folder / "tokenizer.json"))
  tiny.write_json(folder / "tokenizer_config.json", {"bos_token": "<|im_start|>"})
  found = tokenizer.from_folder(folder)
  assert found.add_bos and found.encode("in").count(1) == 1
  named = {"bos_token": "<|im_start|>", "add_bos_token": False}
  tiny.write_json(folder / "tokenizer_config.json", named)
  assert not tokenizer.from_folder(folder).add_bos


def test_damaged_tokenizer_json(folder):
  (folder / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
    models.load(str(folder))
