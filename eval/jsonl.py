"""Files with one JSON record a line, and errors that name the file and the line."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Fields = Mapping[str, Any]  # name -> type: str, int, list[str], or several of them as int | None

_LARGEST = 1e30  # sums and products of such numbers are finite


def read(path: Path, fields: Fields) -> list[Record]:
  """All records of a UTF-8 file; blank lines are passed over.

  Args:
    path: the file.
    fields: what every record must have; it may have more.

  Raises:
    ValueError: no such file, no record in it, or a line that is not UTF-8, not a whole JSON object,
      or without one of the fields.
  """
  return list(_records(path, fields))


def first(path: Path) -> Record:
  """The first record of a file, whatever its fields and whatever follows it.

  Raises:
    ValueError: see `read`.
  """
  return next(_records(path, {}))


def measured(line: bytes) -> Any:
  """JSON in which numbers that no measurement gives are null: NaN, and those beyond 1e30.

  Raises:
    ValueError: the line is not JSON.
    RecursionError: it is nested too deeply.
  """
  return json.loads(
    line,
    parse_constant=lambda name: None,
    parse_float=lambda digits: _moderate(float(digits)),
    parse_int=lambda digits: _moderate(int(digits)),
  )


def _moderate[Number: (int, float)](value: Number) -> Number | None:
  return value if abs(value) <= _LARGEST else None


def _records(path: Path, fields: Fields) -> Iterator[Record]:
  path = path.expanduser()
  if not path.is_file():
    raise ValueError(f"{path} is not a file; give the path of a .jsonl file")
  # Only a line feed ends a line: texts may hold the other characters that str.splitlines cuts at.
  lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
  if not any(line.strip() for line in lines):
    raise ValueError(f"{path} is empty, expected one JSON record a line; get the file again")
  for number, line in enumerate(lines, 1):
    if line.strip():
      yield _record(line, f"{path}, line {number}", fields)


def _record(line: bytes, place: str, fields: Fields) -> Record:
  try:
    record = json.loads(line.decode("utf-8"))
    json.dumps(record, ensure_ascii=False).encode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{place} is not UTF-8 text (byte {error.start}); get the file again or convert it"
    ) from error
  except UnicodeEncodeError as error:
    raise ValueError(
      f"{place} has half a surrogate pair, {error.object[error.start]!r}, which is no character; "
      "mend the line or get the file again"
    ) from error
  except (ValueError, RecursionError) as error:  # a number of 5000 digits is no JSONDecodeError
    raise ValueError(
      f"{place} is not a whole JSON record ({error}); the file may be cut off, get it again"
    ) from error
  if not isinstance(record, dict):
    raise ValueError(f"{place} is a JSON {type(record).__name__}, expected an object with fields")
  for name, kind in fields.items():
    if name not in record:
      raise ValueError(f"{place}: the record has no {name!r}, expected {', '.join(fields)}")
    if not _fits(record[name], kind):
      wanted = kind.__name__ if isinstance(kind, type) and kind != list[str] else kind
      raise ValueError(f"{place}: {name!r} is {_short(record[name])}, expected {wanted}")
  return record


def _fits(value: Any, kind: Any) -> bool:
  if isinstance(kind, types.UnionType):
    return any(_fits(value, one) for one in kind.__args__)
  if kind == list[str]:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
  return type(value) is kind  # true is an int for isinstance


def _short(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 40 else f"{text[:40]}..."
