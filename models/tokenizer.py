"""Text to ids and back, with the vocabulary, merges and chat template of the model's own file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from models.chat_template import Message, render
from models.safetensors_reader import read_json

# GGUF names the splitting rule and does not describe it. A rule is a pattern of words, or None for
# single digits first and then the words of GPT-2.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # contractions
  r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"  # letters, with one other character before them
  r"|\p{{N}}{digits}"
  r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES = {
  "smollm": None,
  "smollm2": None,
  "qwen2": _WORDS.format(digits=""),
  "llama-bpe": _WORDS.format(digits="{1,3}"),
}
_LLAMA3 = "llama-bpe"  # starts every text with its first token, and takes whole known words
# token_type values of GGUF
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BLANK = "\u2581"  # what SentencePiece writes for a space


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """BPE of one model, over bytes or as SentencePiece has it.

  Attributes:
    backend: the compiled vocabulary and merges.
    bos_id: id that starts a text, if the model has one.
    eos_ids: ids that end generation.
    add_bos: `encode` puts `bos_id` in front, as the model's files ask.
    chat_template: Jinja source, if the model has one.
  """

  backend: tokenizers.Tokenizer
  bos_id: int | None
  eos_ids: tuple[int, ...]
  add_bos: bool
  chat_template: str | None

  @property
  def vocab_size(self) -> int:
    """Number of ids, special ones included."""
    return self.backend.get_vocab_size(with_added_tokens=True)

  def encode(self, text: str) -> list[int]:
    """Ids of a text; special tokens written out in it become their single id.

    The text of `chat` may start with the token that starts a text: it is not added twice.
    """
    ids = self.backend.encode(text, add_special_tokens=False).ids
    if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
      return [self.bos_id, *ids]
    return ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of ids; bytes that are not UTF-8 become the replacement character."""
    return self.backend.decode(list(map(int, ids)), skip_special_tokens=skip_special)

  def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """The prompt of a conversation, to be given to `encode`.

    Args:
      messages: each with "role" and "content".
      add_generation_prompt: ends where the assistant's answer begins.

    Raises:
      ValueError: the model has no chat template, or it refuses the messages.
    """
    if self.chat_template is None:
      raise ValueError("the model has no chat template; give it the plain text of the prompt")
    return render(
      self.chat_template,
      messages,
      add_generation_prompt=add_generation_prompt,
      bos_token=self._token(self.bos_id),
      eos_token=self._token(self.eos_ids[0] if self.eos_ids else None),
    )

  def _token(self, token_id: int | None) -> str:
    return "" if token_id is None else self.backend.id_to_token(token_id) or ""


def from_gguf(info: Mapping[str, Any], path: Path) -> Tokenizer | None:
  """The tokenizer in the metadata of a GGUF file, None when it holds none.

  Raises:
    ValueError: a kind of tokenizer or a splitting rule that is not known here.
  """
  kind = info.get("tokenizer.ggml.model")
  if kind is None:
    return None
  if kind == "llama":
    backend, add_bos = _sentencepiece_bpe(info, path), True
  elif kind == "gpt2":
    rule = _rule(info, path)
    backend, add_bos = _byte_level_bpe(info, rule, path), rule == _LLAMA3
  else:
    raise ValueError(
      f"{path}: unknown tokenizer {kind!r}, expected 'gpt2' (byte-level BPE) or 'llama' "
      "(SentencePiece BPE)"
    )
  eos_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
  stops = (info.get(f"tokenizer.ggml.{key}") for key in eos_keys)
  return Tokenizer(
    backend=backend,
    bos_id=info.get("tokenizer.ggml.bos_token_id"),
    eos_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
    add_bos=bool(info.get("tokenizer.ggml.add_bos_token", add_bos)),
    chat_template=info.get("tokenizer.chat_template"),
  )


def from_folder(folder: Path) -> Tokenizer | None:
  """The tokenizer of a Hugging Face folder, None when it holds no tokenizer.json.

  Ids that end generation are those of generation_config.json, of the tokenizer's own end token,
  and, when neither says anything, of config.json.

  Raises:
    ValueError: a file is damaged.
  """
  path = folder / "tokenizer.json"
  if not path.exists():
    return None
  try:
    backend = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the library raises plain Exception
    raise ValueError(f"{path} is not a readable tokenizer ({error}); download it again") from error
  tokens = _optional_json(folder / "special_tokens_map.json")
  tokens |= _optional_json(folder / "tokenizer_config.json")
  bos_id = _token_id(backend, tokens.get("bos_token"))
  # Without a word on it, the file's own post-processing says whether a text gets a first token.
  start = backend.encode("", add_special_tokens=True).ids[:1]
  add_bos = tokens.get("add_bos_token")
  return Tokenizer(
    backend=backend,
    bos_id=bos_id,
    eos_ids=_stop_ids(folder, _token_id(backend, tokens.get("eos_token"))),
    add_bos=bos_id is not None and (start == [bos_id] if add_bos is None else bool(add_bos)),
    chat_template=_folder_template(folder, tokens.get("chat_template")),
  )


def _rule(info: Mapping[str, Any], path: Path) -> str:
  rule = info.get("tokenizer.ggml.pre")
  if rule not in _RULES:
    raise ValueError(
      f"{path}: unknown pre-tokenizer {rule!r}, expected one of {', '.join(_RULES)}; "
      "use the model's folder with tokenizer.json instead"
    )
  return str(rule)


def _byte_level_bpe(info: Mapping[str, Any], rule: str, path: Path) -> tokenizers.Tokenizer:
  tokens, merges = _lists(info, path, "tokens", "merges")
  pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
  bpe = _bpe(tokens, pairs, path, ignore_merges=rule == _LLAMA3)
  backend = tokenizers.Tokenizer(bpe)
  if rule == "qwen2":
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = _splitter(_RULES[rule])
  backend.decoder = decoders.ByteLevel()
  return _with_added_tokens(backend, tokens, info, path)


def _sentencepiece_bpe(info: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
  """BPE whose next merge is the one that makes the token of the best score."""
  tokens, scores = _lists(info, path, "tokens", "scores")
  types = _types(info, tokens, path)
  if len(scores) != len(tokens):
    raise ValueError(
      f"{path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; get the "
      "file again"
    )
  known = set(tokens)
  ranked = sorted(zip(scores, tokens, types, strict=True), key=lambda one: -one[0])
  pairs = [
    (token[:cut], token[cut:])
    for _, token, kind in ranked
    if kind == _NORMAL
    for cut in range(1, len(token))
    if token[:cut] in known and token[cut:] in known
  ]
  unknown = next(
    (token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None
  )
  bpe = _bpe(tokens, pairs, path, unk_token=unknown, fuse_unk=True, byte_fallback=True)
  backend = tokenizers.Tokenizer(bpe)
  blanks, strip = [normalizers.Replace(" ", _BLANK)], []
  if info.get("tokenizer.ggml.add_space_prefix", True):
    blanks, strip = [normalizers.Prepend(_BLANK), *blanks], [decoders.Strip(" ", 1, 0)]
  backend.normalizer = normalizers.Sequence(blanks)
  backend.decoder = decoders.Sequence(
    [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
  )
  return _with_added_tokens(backend, tokens, info, path)


def _bpe(tokens: list[str], pairs: list[tuple[str, str]], path: Path, **options) -> models.BPE:
  vocab = {token: index for index, token in enumerate(tokens)}
  try:
    return models.BPE(vocab=vocab, merges=pairs, **options)
  except Exception as error:  # the library raises plain Exception
    raise ValueError(f"{path}: vocabulary and merges do not fit together: {error}") from error


def _lists(info: Mapping[str, Any], path: Path, *names: str) -> list[list[Any]]:
  keys = [f"tokenizer.ggml.{name}" for name in names]
  if any(info.get(key) is None for key in keys):
    raise ValueError(f"{path}: metadata lacks {' or '.join(keys)}")
  return [info[key] for key in keys]


def _types(info: Mapping[str, Any], tokens: list[str], path: Path) -> list[int]:
  types = info.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
  if len(types) != len(tokens):
    raise ValueError(
      f"{path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; get "
      "the file again"
    )
  return types


def _with_added_tokens(
  backend: tokenizers.Tokenizer, tokens: list[str], info: Mapping[str, Any], path: Path
) -> tokenizers.Tokenizer:
  """The backend that takes special tokens, and those of the user, as one wherever they stand."""
  named = list(zip(tokens, _types(info, tokens, path), strict=True))
  for special, kinds in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
    added = [
      tokenizers.AddedToken(token, special=special, normalized=False)
      for token, kind in named
      if kind in kinds
    ]
    (backend.add_special_tokens if special else backend.add_tokens)(added)
  return backend


def _splitter(pattern: str | None) -> pre_tokenizers.PreTokenizer:
  first = pre_tokenizers.Digits(individual_digits=True)
  if pattern is not None:
    first = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
  return pre_tokenizers.Sequence([first, to_bytes])


def _stop_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
  stops = _as_ids(_optional_json(folder / "generation_config.json").get("eos_token_id"))
  if eos_id is not None:
    stops = [*stops, eos_id]
  if not stops:
    stops = _as_ids(_optional_json(folder / "config.json").get("eos_token_id"))
  return tuple(dict.fromkeys(stops))


def _as_ids(value: int | list[int] | None) -> list[int]:
  if value is None:
    return []
  return [value] if isinstance(value, int) else list(value)


def _token_id(backend: tokenizers.Tokenizer, token: str | dict[str, Any] | None) -> int | None:
  if isinstance(token, dict):
    token = token.get("content")
  return None if token is None else backend.token_to_id(token)


def _folder_template(folder: Path, configured: str | list[dict[str, str]] | None) -> str | None:
  path = folder / "chat_template.jinja"
  if path.exists():
    return path.read_text(encoding="utf-8")
  if isinstance(configured, list):
    return {one["name"]: one["template"] for one in configured}.get("default")
  return configured


def _optional_json(path: Path) -> dict[str, Any]:
  return read_json(path) if path.exists() else {}
