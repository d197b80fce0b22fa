"""predictions.jsonl, the truth of a run: what every policy answered to every example.

A line (`eval.lines`) is one answer under one policy, store and budget to one example of a task.
`pred`, `answers`, `all_classes` and `length` are LongBench's own names, so that its tools and
`eval.score` read the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType

from eval import lines
from eval.lines import Line
from eval.results import PREDICTIONS, write_atomically

Prediction = Line

# score is 0 to 1, stopped whether the model ended the answer. A batch is named after its first
# example; ttft_s is null where the prefill was shared.
FIELDS: lines.Fields = {
  **lines.FIELDS,
  "pred": (str,),
  "answers": (list,),
  "all_classes": (list, NoneType),
  "length": (int, NoneType),
  "score": (float, int),
}
_ELEMENTS: lines.Fields = {**lines.ELEMENTS, "answers": (str,), "all_classes": (str,)}


def read(path: Path) -> list[Prediction]:
  """The answers of a file, of several to the same question the first.

  Raises:
    ValueError: see `lines.read`.
  """
  return lines.read(path, FIELDS, _ELEMENTS)


def read_run(out_dir: Path) -> list[Prediction]:
  """The answers of a run, those that processes of it have not merged yet among them.

  Raises:
    ValueError: see `read`.
  """
  return lines.unique(one for path in _files(out_dir) for one in read(path))


def file_of(out_dir: Path, process: int, num_processes: int) -> Path:
  """Where a process writes: predictions.jsonl when it is alone, else a file of its own."""
  return out_dir / (PREDICTIONS if num_processes == 1 else f"predictions-{process}.jsonl")


def merge(out_dir: Path) -> None:
  """Puts the answers of all processes into predictions.jsonl and removes their own files."""
  parts = [path for path in _files(out_dir) if path.name != PREDICTIONS]
  if parts:
    whole = (json.dumps(one, allow_nan=False) + "\n" for one in read_run(out_dir))
    write_atomically(out_dir / PREDICTIONS, "".join(whole))
    for path in parts:  # if this is cut short they are read again, as duplicates
      path.unlink()


def _files(out_dir: Path) -> list[Path]:
  """predictions.jsonl first, if there is one."""
  whole = out_dir / PREDICTIONS
  return [whole] * whole.exists() + sorted(out_dir.glob("predictions-*.jsonl"))
