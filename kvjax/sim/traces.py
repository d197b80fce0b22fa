"""Reads traces of requests: four public formats, told apart by how a file begins.

| format | a line | conversation |
| --- | --- | --- |
| interactive (Bidaw's) | `user_id time_stamp query_length response_length round_index` | user |
| Mooncake | JSON: timestamp (ms), input_length, output_length, hash_ids of 512 tokens | by prefix |
| Qwen-Bailian | JSON: chat_id, parent_chat_id, timestamp (s), lengths, hash_ids of 16 | by parent |
| Azure | `TIMESTAMP,ContextTokens,GeneratedTokens` | every request alone |

The first has a header and lengths of the new question and answer alone. In the others a prompt
holds what was said before. Who continues whom, and how much of the prompt is history:

* Mooncake does not say who continues whom. Block 0 is a system prompt that all share. A request
  whose first two or more blocks were seen before continues the latest request that holds the last
  of these; conversations that fork stay one.
* History is what the turn before had read and made, if the prompt has room for that and a question.
  If it has not, only the shared blocks are, as for two prompts about one document.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.sim.workloads import Turn, Workload, from_turns

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16  # tokens of a hash id
_INTERACTIVE = "user_id time_stamp query_length response_length round_index"
_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
_FORMATS = (
  f"a header {_INTERACTIVE!r} (Bidaw) or {_AZURE!r} (Azure), or JSON with hash_ids (Mooncake) and "
  "chat_id (Qwen-Bailian)"
)
_Lines = Iterable[tuple[int, str]]  # number from 1, text


def read_trace(path: Path | str) -> Workload:
  """A workload from a file in one of the formats above.

  Raises:
    ValueError: a file of another format or without requests, or a line that is not of its format:
      with the file, the line, and what was expected.
    OSError: there is no such file.
  """
  path = Path(path).expanduser()
  with path.open(encoding="utf-8-sig") as file:
    try:
      first = file.readline().strip()
      file.seek(0)
      lines = ((n, text.strip()) for n, text in enumerate(file, 1) if text.strip())
      return from_turns(path.name, _reader(path, first)(lines, path))
    except UnicodeDecodeError:
      raise ValueError(f"{path} is not text; expected {_FORMATS}") from None


def _reader(path: Path, first: str) -> Callable[[_Lines, Path], Iterator[Turn]]:
  """Which format it is."""
  if first.startswith("user_id"):
    return _interactive
  if first == _AZURE:
    return _azure
  if first.startswith("{"):
    fields = _json(first, f"{path}:1")
    if "chat_id" in fields:
      return _bailian
    if "hash_ids" in fields:
      return _mooncake
  raise ValueError(f"{path} is no known trace: it begins with {first[:60]!r}; expected {_FORMATS}")


def _interactive(lines: _Lines, path: Path) -> Iterator[Turn]:
  histories: dict[int, int] = {}
  for number, text in lines:
    if number == 1:
      continue
    where, fields = f"{path}:{number}", text.split()
    if len(fields) != 5:
      raise ValueError(f"{where} has {len(fields)} fields; expected {_INTERACTIVE}")
    user = _count(fields[0], "user_id", where)
    query = _count(fields[2], "query_length", where, least=1)
    answer = _count(fields[3], "response_length", where)
    history = histories.get(user, 0)
    histories[user] = history + query + answer
    yield Turn(user, _number(fields[1], "time_stamp", where), query, answer, history)


def _azure(lines: _Lines, path: Path) -> Iterator[Turn]:
  begin = None
  for number, text in lines:
    if number == 1:
      continue
    where, fields = f"{path}:{number}", text.split(",")
    if len(fields) != 3:
      raise ValueError(f"{where} has {len(fields)} fields; expected {_AZURE}")
    try:
      time = datetime.datetime.fromisoformat(fields[0])
      begin = time if begin is None else begin
      seconds = (time - begin).total_seconds()
    except (ValueError, TypeError):  # no time, or one with a zone after others without
      raise ValueError(
        f"{where}: TIMESTAMP is {fields[0]!r}; expected one like 2023-11-16 18:15:46.6805900"
      ) from None
    query = _count(fields[1], "ContextTokens", where, least=1)
    answer = _count(fields[2], "GeneratedTokens", where)
    yield Turn(number - 2, seconds, query, answer, 0)


class _Asked(NamedTuple):
  """A request that others may continue."""

  conversation: int
  total_tokens: int
  blocks: tuple[int, ...]


def _mooncake(lines: _Lines, path: Path) -> Iterator[Turn]:
  holds: dict[int, _Asked] = {}  # block -> the latest request that has it
  for number, text in lines:
    where = f"{path}:{number}"
    fields = _json(text, where)
    read, made, blocks = _lengths(fields, where)
    shared = next((n for n, block in enumerate(blocks) if block not in holds), len(blocks))
    parent = holds[blocks[shared - 1]] if shared > 1 else None
    conversation = number - 1 if parent is None else parent.conversation
    history = 0 if parent is None else _history(parent, read, shared * MOONCAKE_BLOCK)
    holds |= dict.fromkeys(blocks, _Asked(conversation, read + made, ()))
    time = _number(fields.get("timestamp"), "timestamp", where) / 1000
    yield Turn(conversation, time, read - history, made, history)


def _bailian(lines: _Lines, path: Path) -> Iterator[Turn]:
  asked: dict[int, _Asked] = {}  # chat -> request
  for number, text in lines:
    where = f"{path}:{number}"
    fields = _json(text, where)
    read, made, blocks = _lengths(fields, where)
    chat = _count(fields.get("chat_id"), "chat_id", where)
    # -1 for a first turn; a parent from before the trace begins is not there either.
    parent = asked.get(_count(fields.get("parent_chat_id"), "parent_chat_id", where, least=-1))
    history = 0
    if parent is not None:
      pairs = enumerate(zip(blocks, parent.blocks, strict=False))
      most = min(len(blocks), len(parent.blocks))
      shared = next((n for n, (mine, theirs) in pairs if mine != theirs), most)
      history = _history(parent, read, shared * BAILIAN_BLOCK)
    conversation = chat if parent is None else parent.conversation
    asked[chat] = _Asked(conversation, read + made, blocks)
    time = _number(fields.get("timestamp"), "timestamp", where)
    yield Turn(conversation, time, read - history, made, history)


def _history(parent: _Asked, read: int, shared_tokens: int) -> int:
  """Tokens of a prompt of `read` that need not be read again."""
  whole = parent.total_tokens
  return whole if whole < read else min(shared_tokens, read - 1)


def _lengths(fields: Mapping[str, Any], where: str) -> tuple[int, int, tuple[int, ...]]:
  """Prompt, answer, and blocks of the prompt."""
  blocks = fields.get("hash_ids")
  if not isinstance(blocks, list):
    raise ValueError(f"{where}: hash_ids is {blocks!r}; expected a list of whole numbers")
  return (
    _count(fields.get("input_length"), "input_length", where, least=1),
    _count(fields.get("output_length"), "output_length", where),
    tuple(_count(block, "hash_ids", where) for block in blocks),
  )


def _json(text: str, where: str) -> dict[str, Any]:
  try:
    fields = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f"{where} is not JSON ({error.msg}); expected one object a line") from None
  if not isinstance(fields, dict):
    raise ValueError(f"{where} is a JSON {type(fields).__name__}; expected an object")
  return fields


def _count(value: Any, name: str, where: str, least: int = 0) -> int:
  try:
    count = int(value)
    whole = not isinstance(value, float) or value == count
  except (TypeError, ValueError, OverflowError):
    count, whole = least, False
  if not whole or count < least:
    raise ValueError(f"{where}: {name} is {value!r}; expected a whole number of {least} or more")
  return count


def _number(value: Any, name: str, where: str) -> float:
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not math.isfinite(number):
    raise ValueError(f"{where}: {name} is {value!r}; expected a number")
  return number
