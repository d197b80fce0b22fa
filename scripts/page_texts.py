"""Passages of long texts of several kinds, for profiles and traces of heads.

A text is a file: plain text (*.txt, *.md), of which passages begin where a seed says, or records
(*.jsonl) of LongBench, L-Eval, Lost in the Middle (key-value retrieval) or of dialogues. A record
is its document, what is asked and the reference answer, and a passage of records is the end of some
that follow each other: so the tokens that are decoded are an answer.

Two texts need no file: `king_james`, which is fetched, and `records`, keys and values at random.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval import texts
from models import Loaded
from scripts.profile_policy import check_tokens, passage


class Passage(NamedTuple):
  """Tokens of a text.

  Attributes:
    name: of the text.
    sha256: of the whole text.
    sample: which passage of it, from 0.
    tokens: the passage.
  """

  name: str
  sha256: str
  sample: int
  tokens: list[int]


def passages(loaded: Loaded, source: str, count: int, samples: int) -> list[Passage]:
  """So many passages of so many tokens of a text.

  Args:
    loaded: gives the tokenizer.
    source: path of a file, "king_james" or "records".
    count: tokens of each.
    samples: how many; other seeds or records for each.

  Raises:
    ValueError: there is no such file, it has none of the forms above, or the text is too short.
  """
  check_tokens(loaded, count)
  path = Path(source)
  if path.suffix == ".jsonl":
    text = texts.read_text(path)
    told = _told(text, path)
    found = [_end_of(loaded, told, sample, samples, count, path) for sample in range(samples)]
  else:
    made = {"king_james": texts.king_james, "records": _records}.get(source)
    text = made() if made else texts.read_text(path)
    found = [passage(loaded, text, count, seed) for seed in range(samples)]
  sha256 = hashlib.sha256(text.encode()).hexdigest()
  return [Passage(path.stem, sha256, sample, tokens) for sample, tokens in enumerate(found)]


def read_passages(
  loaded: Loaded, sources: Sequence[str], lengths: Sequence[int], steps: int, samples: int
) -> list[Passage]:
  """Passages of all texts and lengths, of the lengths and so many steps more.

  Raises:
    ValueError: no texts, or as `passages`.
  """
  if not sources:
    raise ValueError("--text_files is empty, expected texts separated by commas")
  return [
    one
    for source, length in itertools.product(sources, lengths)
    for one in passages(loaded, source, length + steps, samples)
  ]


def _records() -> str:
  """Keys and values that nothing but attention can tell, some of them asked for again."""
  rng = random.Random(0)
  told = [(f"{rng.getrandbits(64):016x}", f"{rng.getrandbits(64):016x}") for _ in range(2000)]
  lines = []
  for place, (key, value) in enumerate(told):
    lines.append(f'"{key}": "{value}",')
    if place > 10 and place % 4 == 0:
      key, value = told[rng.randrange(max(0, place - 100), place - 5)]
      lines.append(f'The value of "{key}" is "{value}".')
  return "\n".join(lines)


def _told(text: str, path: Path) -> list[str]:
  """The records of a file as running text."""
  try:
    records = [json.loads(line) for line in text.splitlines() if line.strip()]
    tell = next(tell for fields, tell in _FORMS if fields <= {*records[0]})
    return [tell(record) for record in records]
  except (ValueError, KeyError, TypeError, StopIteration) as error:
    forms = "; ".join(", ".join(sorted(fields)) for fields, _ in _FORMS)
    raise ValueError(
      f"{path} has no records of a known form; expected one JSON object a line with {forms}"
    ) from error


def _end_of(
  loaded: Loaded, told: list[str], sample: int, samples: int, count: int, path: Path
) -> list[int]:
  """The last tokens of records up to the one of this sample, as many as it takes."""
  assert loaded.tokenizer is not None
  last, tokens = (sample + 1) * len(told) // samples - 1, []
  for first in range(last, -1, -1):
    text = "\n\n".join(told[first : last + 1])
    if len(text) > 2 * count or not first:
      tokens = loaded.tokenizer.encode(text)[-count:]
    if len(tokens) == count:
      return tokens
  raise ValueError(
    f"{path} gives {len(tokens)} tokens up to record {last} and {count} are needed; take fewer "
    "samples or a shorter prompt"
  )


def _of_longbench(record: Mapping[str, Any]) -> str:
  return f"{record['context']}\n\nQuestion: {record['input']}\nAnswer: {record['answers'][0]}"


def _of_leval(record: Mapping[str, Any]) -> str:
  asked = zip(record["instructions"], record["outputs"], strict=True)
  said = [f"Question: {question}\nAnswer: {answer}" for question, answer in asked]
  return "\n\n".join([record["input"], *said])


def _of_kv_retrieval(record: Mapping[str, Any]) -> str:
  pairs = record["ordered_kv_records"]
  others = [pair for pair in pairs[5::20] if pair[0] != record["key"]]
  asked = [*others, (record["key"], record["value"])]
  said = [f'The value of "{key}" is "{value}".' for key, value in asked]
  return "\n".join([json.dumps(dict(pairs)), *said])


def _of_dialogue(record: Mapping[str, Any]) -> str:
  return "\n".join(f"{speaker}: {said}" for speaker, said in record["turns"])


_FORMS: tuple[tuple[set[str], Callable[[Mapping[str, Any]], str]], ...] = (
  ({"context", "input", "answers"}, _of_longbench),
  ({"input", "instructions", "outputs"}, _of_leval),
  ({"ordered_kv_records", "key", "value"}, _of_kv_retrieval),
  ({"turns"}, _of_dialogue),
)
