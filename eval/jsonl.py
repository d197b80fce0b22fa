"""Files with one JSON record a line, and errors that name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> list[Record]:
  """All records of a UTF-8 file; blank lines are passed over.

  Args:
    path: the file.
    fields: name -> type, or types, of what every record must have; it may have more.

  Raises:
    ValueError: no such file, no record in it, or a line that is not UTF-8, not a whole JSON object,
      or without one of the fields.
  """
  path = path.expanduser()
  if not path.is_file():
    raise ValueError(f"{path} is not a file; give the path of a .jsonl file")
  # Only a line feed ends a line: texts may hold the other characters that str.splitlines cuts at.
  lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
  records = [
    _record(line, f"{path}, line {number}", fields)
    for number, line in enumerate(lines, 1)
    if line.strip()
  ]
  if not records:
    raise ValueError(f"{path} is empty, expected one JSON record a line; get the file again")
  return records


def _record(line: bytes, place: str, fields: Mapping[str, type | tuple[type, ...]]) -> Record:
  try:
    record = json.loads(line.decode("utf-8"))
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{place} is not UTF-8 text (byte {error.start}); get the file again or convert it"
    ) from error
  except (json.JSONDecodeError, RecursionError) as error:
    raise ValueError(
      f"{place} is not a whole JSON record ({error}); the file may be cut off, get it again"
    ) from error
  if not isinstance(record, dict):
    raise ValueError(f"{place} is a JSON {type(record).__name__}, expected an object with fields")
  for name, kind in fields.items():
    if name not in record:
      raise ValueError(f"{place}: the record has no {name!r}, expected {', '.join(fields)}")
    if not isinstance(record[name], kind):
      wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
      raise ValueError(f"{place}: {name!r} is a {type(record[name]).__name__}, expected a {wanted}")
  return record
