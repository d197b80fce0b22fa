"""A file of lines that is the truth of a run: each says what one thing gave, and what it took.

Lines are only ever added, on the disk before the next is computed (`results.append_lines`), and
rows are made of them, so that a run can be cut short anywhere and gone on with. One that was cut
short in the midst of a line leaves it without its end, and then it does not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from eval import jsonl

Line = dict[str, Any]
Key = tuple[str, str, int | None, str, str]
Fields = Mapping[str, tuple[type, ...]]  # name -> what JSON may hold there

# What every line has. output_tokens come after prompt_tokens, of which the first is the prefill's
# and every other one a step's; stopped: one more step ended them. ttft_s (to the first of them) and
# step_s are seconds of a whole batch, which all lines of a `batch` share and which count once;
# ttft_s is null where the prefill was another line's.
FIELDS: Fields = {
  "policy": (str,),
  "store": (str,),
  "budget_tokens": (int, NoneType),
  "page_size": (int,),
  "task": (str,),
  "id": (str,),
  "stopped": (bool,),
  "prompt_tokens": (int,),
  "output_tokens": (int,),
  "ttft_s": (float, int, NoneType),
  "step_s": (list,),
  "batch": (str,),
}
ELEMENTS: Fields = {"step_s": (float, int)}  # of the fields that are lists


def key_of(line: Line) -> Key:
  """Policy, store, budget, task and id, of which there is one line."""
  names = ("policy", "store", "budget_tokens", "task", "id")
  return tuple(line[name] for name in names)  # pyrefly: ignore[bad-return]


def read(path: Path, fields: Fields, elements: Fields) -> list[Line]:
  """The lines of a file, of several with one key the first; a last one without its end is left out.

  Args:
    path: the file.
    fields: what every line has, `FIELDS` among it.
    elements: what the lists among these fields hold.

  Raises:
    ValueError: any other line is not whole, or without one of the fields.
  """
  *lines, _ = path.read_bytes().split(b"\n")
  found = []
  for number, text in enumerate(lines, 1):
    line = _parsed(text, fields, elements)
    if isinstance(line, str):
      raise ValueError(f"{path}, line {number}: {line}; mend or delete the line")
    found.append(line)
  return unique(found)


def unique(lines: Iterable[Line]) -> list[Line]:
  """The first of the lines of each key."""
  found: dict[Key, Line] = {}
  for line in lines:
    found.setdefault(key_of(line), line)
  return list(found.values())


def cut_torn_line(path: Path) -> None:
  """Cuts off what `read` leaves out, so that whole lines can follow."""
  if path.exists():
    whole = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole[0] + whole[1]))


def _parsed(text: bytes, fields: Fields, elements: Fields) -> Line | str:
  """The line, or what is wrong with it."""
  try:
    line = jsonl.measured(text)
  except (ValueError, RecursionError):
    return "not JSON"
  if not isinstance(line, dict):
    return "not a JSON object"
  for name, kinds in fields.items():
    if name not in line:
      return f"no field {name!r}"
    if type(line[name]) not in kinds:
      expected = " or ".join(kind.__name__ for kind in kinds)
      return f"{name} is a {type(line[name]).__name__}, expected {expected}"
  for name, kinds in elements.items():
    if isinstance(line[name], list) and any(type(one) not in kinds for one in line[name]):
      return f"{name} is not a list of {' or '.join(kind.__name__ for kind in kinds)}"
  return line
