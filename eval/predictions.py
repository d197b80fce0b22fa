"""predictions.jsonl, the truth of a run: what every policy answered to every example.

A line is one answer under one policy, store and budget to one example of a task. `pred`, `answers`,
`all_classes` and `length` are LongBench's own names, so that its tools and `eval.score` read the
file. Lines are only ever added, a batch of answers at a time; a run that was cut short in the midst
of one leaves a last line without its end, which does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any

from eval import jsonl
from eval.results import PREDICTIONS, write_atomically

Prediction = dict[str, Any]
Key = tuple[str, str, int | None, str, str]

# Field -> what JSON may hold there. score is 0 to 1, stopped whether the model ended the answer;
# ttft_s and step_s are seconds of the whole batch, which all answers of a `batch` share and which
# count once; ttft_s is null where the prefill was shared. A batch is named after its first example.
FIELDS: dict[str, tuple[type, ...]] = {
  "policy": (str,),
  "store": (str,),
  "budget_tokens": (int, NoneType),
  "page_size": (int,),
  "task": (str,),
  "id": (str,),
  "pred": (str,),
  "answers": (list,),
  "all_classes": (list, NoneType),
  "length": (int, NoneType),
  "score": (float, int),
  "stopped": (bool,),
  "prompt_tokens": (int,),
  "output_tokens": (int,),
  "ttft_s": (float, int, NoneType),
  "step_s": (list,),
  "batch": (str,),
}
_ELEMENTS: dict[str, tuple[type, ...]] = {  # of the lists
  "answers": (str,),
  "all_classes": (str,),
  "step_s": (float, int),
}


def key_of(prediction: Prediction) -> Key:
  """Policy, store, budget, task and id, of which there is one answer."""
  names = ("policy", "store", "budget_tokens", "task", "id")
  return tuple(prediction[name] for name in names)  # pyrefly: ignore[bad-return]


def read(path: Path) -> list[Prediction]:
  """The answers of a file, of several to the same question the first.

  A last line without its end was being written when a run was killed, and is left out.

  Raises:
    ValueError: any other line is not whole, or no answer.
  """
  *lines, _ = path.read_bytes().split(b"\n")
  found = []
  for number, line in enumerate(lines, 1):
    prediction = _parsed(line)
    if isinstance(prediction, str):
      raise ValueError(f"{path}, line {number}: {prediction}; mend or delete the line")
    found.append(prediction)
  return _unique(found)


def read_run(out_dir: Path) -> list[Prediction]:
  """The answers of a run, those that processes of it have not merged yet among them.

  Raises:
    ValueError: see `read`.
  """
  return _unique(one for path in _files(out_dir) for one in read(path))


def cut_torn_line(path: Path) -> None:
  """Cuts off what `read` leaves out, so that whole lines can follow."""
  if path.exists():
    whole = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole[0] + whole[1]))


def file_of(out_dir: Path, process: int, num_processes: int) -> Path:
  """Where a process writes: predictions.jsonl when it is alone, else a file of its own."""
  return out_dir / (PREDICTIONS if num_processes == 1 else f"predictions-{process}.jsonl")


def merge(out_dir: Path) -> None:
  """Puts the answers of all processes into predictions.jsonl and removes their own files."""
  parts = [path for path in _files(out_dir) if path.name != PREDICTIONS]
  if parts:
    lines = (json.dumps(one, allow_nan=False) + "\n" for one in read_run(out_dir))
    write_atomically(out_dir / PREDICTIONS, "".join(lines))
    for path in parts:  # if this is cut short they are read again, as duplicates
      path.unlink()


def _files(out_dir: Path) -> list[Path]:
  """predictions.jsonl first, if there is one."""
  whole = out_dir / PREDICTIONS
  return [whole] * whole.exists() + sorted(out_dir.glob("predictions-*.jsonl"))


def _unique(predictions: Iterable[Prediction]) -> list[Prediction]:
  found: dict[Key, Prediction] = {}
  for prediction in predictions:
    found.setdefault(key_of(prediction), prediction)
  return list(found.values())


def _parsed(line: bytes) -> Prediction | str:
  """The prediction, or what is wrong with the line."""
  try:
    prediction = jsonl.measured(line)
  except (ValueError, RecursionError):
    return "not JSON"
  if not isinstance(prediction, dict):
    return "not a JSON object"
  for name, kinds in FIELDS.items():
    if name not in prediction:
      return f"no field {name!r}"
    if type(prediction[name]) not in kinds:
      expected = " or ".join(kind.__name__ for kind in kinds)
      return f"{name} is a {type(prediction[name]).__name__}, expected {expected}"
  for name, kinds in _ELEMENTS.items():
    if any(type(one) not in kinds for one in prediction[name] or ()):
      return f"{name} is not a list of {' or '.join(kind.__name__ for kind in kinds)}"
  return prediction
