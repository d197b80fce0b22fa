"""Scores a file of predictions, by the metrics of LongBench or L-Eval alone.

    python -m eval.score --suite=longbench --task=qasper --predictions=qasper.jsonl
    python -m eval.score --suite=longbench --task=qasper_e --predictions=qasper.jsonl
    python -m eval.score --suite=leval --task=tpo --predictions=tpo.pred.jsonl
    python -m eval.score --suite=longbench --predictions=RUN/predictions.jsonl --out_dir=scored

Reads what the official scripts write (LongBench's pred, answers, all_classes and length; L-Eval's
gt, evaluation and NAME_pred), and the predictions.jsonl of our own runs, in which lines say their
task: these are scored for each policy, store and budget, each question once; a last line that was
being written when a run was killed does not count. Tasks of LongBench-E, TASK_e, are scored
by length too. Scores are times 100, as the official ones. For L-Eval's ROUGE tasks the score is
ROUGE-L, and the authors' total, the geometric mean of all three, stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from eval import cli, jsonl, leval, longbench, metrics, predictions, results, tables
from eval.jsonl import Record

SCORES = "scores.json"
_CASE = ("policy", "store", "budget_tokens")
_SUITES = {"longbench": longbench.NAMES, "leval": leval.NAMES}


class Line(NamedTuple):
  """One prediction.

  Attributes:
    case: its task; policy, store and budget too where it is of a run of ours.
    prediction: the answer.
    references: right answers.
    classes: what a classifying task chooses from.
    length: words of the context, or None.
  """

  case: tuple[Any, ...]
  prediction: str
  references: list[str]
  classes: list[str]
  length: int | None


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_enum("suite", "longbench", list(_SUITES), "Whose metrics.")
  flags.DEFINE_string("task", None, "Name of the task; default: all that the lines name.")
  flags.DEFINE_string("predictions", None, "The .jsonl file.", required=True)
  flags.DEFINE_string("out_dir", None, f"Folder for {SCORES}; default: the table alone.")


def main(args: flags.FlagValues) -> None:
  """Reads, scores, prints, and writes where that was asked for."""
  path = Path(args.predictions).expanduser()
  out_dir = args.out_dir and Path(args.out_dir).expanduser()
  if out_dir and (out_dir / SCORES).exists():
    raise ValueError(f"{out_dir} already holds {SCORES}; choose another --out_dir")
  rows = score(args.suite, args.task, path)
  print(tables.table(map(_shown, rows), tuple(rows[0])))
  if out_dir:
    out_dir.mkdir(parents=True, exist_ok=True)
    content = {"predictions": path.name, "suite": args.suite, "scores": rows}
    results.write_atomically(out_dir / SCORES, json.dumps(content, indent=2) + "\n")
    print(f"\n{SCORES} is in {out_dir}")


def score(suite: str, task: str | None, path: Path) -> list[Record]:
  """A row for each task, policy, store and budget: records and scores, times 100.

  Args:
    suite: "longbench" or "leval".
    task: its only task to score; None for every one that the lines name.
    path: the predictions.

  Raises:
    ValueError: no such task, a file without predictions of it, or a damaged line.
  """
  if task is not None:
    (longbench if suite == "longbench" else leval).task_of(task)
  groups: dict[tuple[Any, ...], list[Line]] = {}
  for line in _read(suite, task, path):
    groups.setdefault(line.case, []).append(line)
  return [_row(suite, group, path) for group in groups.values()]


def _read(suite: str, task: str | None, path: Path) -> list[Line]:
  first = jsonl.first(path)
  if "task" in first and "policy" in first:
    return _own(suite, task, path)
  if task is None:
    raise ValueError(f"the lines of {path} do not name their task; give --task")
  if suite == "longbench":
    return _official_longbench(task, path)
  return _official_leval(task, path, first)


def _own(suite: str, task: str | None, path: Path) -> list[Line]:
  records = predictions.read(path.expanduser())
  wanted = _SUITES[suite] if task is None else (task,)
  lines = [
    Line(
      (one["task"], *(one[name] for name in _CASE)),
      one["pred"],
      one["answers"],
      one["all_classes"] or [],
      one["length"],
    )
    for one in records
    if one["task"] in wanted
  ]
  if not lines:
    there = ", ".join(sorted({one["task"] for one in records})) or "none"
    raise ValueError(f"{path} has no predictions of {task or suite}; its tasks are {there}")
  return lines


def _official_longbench(task: str, path: Path) -> list[Line]:
  kinds: dict[str, Any] = {"pred": str, "answers": list[str]}
  if longbench.task_of(task).metric == "classification":
    kinds["all_classes"] = list[str]
  if task in longbench.TASKS_E:
    kinds["length"] = int
  return [
    Line((task,), one["pred"], one["answers"], one.get("all_classes") or [], one.get("length"))
    for one in jsonl.read(path, kinds)
  ]


def _official_leval(task: str, path: Path, first: Record) -> list[Line]:
  """The field with the predictions is the first whose name has "_pred" in it, or "pred"."""
  name = next((one for one in first if "_pred" in one), "pred")
  records = jsonl.read(path, {"gt": str, "evaluation": str, name: str})
  lines = [
    Line((task,), one[name], [one["gt"]], [], None)
    for one in records
    if one["evaluation"] in leval.METRICS
  ]
  if not lines:
    raise ValueError(
      f"{path} has no predictions whose evaluation is {', '.join(leval.METRICS)}; others need a "
      "judge"
    )
  return lines


def _row(suite: str, lines: Sequence[Line], path: Path) -> Record:
  task, *case = lines[0].case
  row = {"task": task} | dict(zip(_CASE, case, strict=False)) | {"records": len(lines)}
  if suite == "leval" and leval.TASKS[task].metric == "rougeL":
    return row | _rouge(lines, path)
  if suite == "leval":
    values = _scored(lines, path, lambda one: leval.score(task, one.prediction, one.references))
  else:
    values = _scored(
      lines,
      path,
      lambda one: longbench.score(task, one.prediction, one.references, one.classes),
    )
  row["score"] = _mean(values)
  return row | (_by_length(lines, values) if task in longbench.TASKS_E else {})


def _scored[Value](
  lines: Sequence[Line], path: Path, compare: Callable[[Line], Value]
) -> list[Value]:
  values = []
  for number, line in enumerate(lines, 1):
    try:
      if not line.references:
        raise ValueError("it has no answers, expected at least one")
      values.append(compare(line))
    except ValueError as error:
      raise ValueError(f"{path}, prediction {number} of {line.case[0]}: {error}") from error
  return values


def _rouge(lines: Sequence[Line], path: Path) -> Record:
  found = _scored(lines, path, lambda one: metrics.rouge(one.prediction, one.references[0]))
  means = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
  total = (means["rouge1"] * means["rouge2"] * means["rougeL"]) ** (1 / 3)
  shown = {"score": means["rougeL"]} | means | {"geometric_mean": total}
  return {name: round(100 * value, 2) for name, value in shown.items()}


def _by_length(lines: Sequence[Line], values: Sequence[float]) -> Record:
  """Score of each bucket, None where no record is of that length."""
  found = {name: [] for name in longbench.BUCKETS}
  for line, value in zip(lines, values, strict=True):
    found[longbench.bucket(line.length or 0)].append(value)
  return {name: _mean(bucket) if bucket else None for name, bucket in found.items()}


def _mean(values: Sequence[float]) -> float:
  return round(100 * sum(values) / len(values), 2)


def _shown(row: Record) -> Record:
  return {name: f"{one:6.2f}" if isinstance(one, float) else one for name, one in row.items()}


if __name__ == "__main__":
  cli.run(main, define_flags)
