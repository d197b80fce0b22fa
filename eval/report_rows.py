"""Run folders as a report sees them: read, checked, and grouped so that like stands beside like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eval import jsonl
from eval.means import over_tasks
from eval.results import MANIFEST, PREDICTIONS, RESULTS, ROW_FIELDS, Row

_NEEDED = ("policy", "task")
_TEXTS = ("model", "store", "device", "kernels", "metric", "page_score")
_NUMBERS = tuple(name for name in ROW_FIELDS if name not in (*_NEEDED, *_TEXTS))
_PREDICTION_NUMBERS = ("budget_tokens", "page_size", "score", "ttft_s")
# What cases of the same policy and budget may differ in, and how their names say so.
_DIFFERENCES = {
  "page_score": "{}",
  "store": "{}",
  "page_size": "pages of {}",
  "batch_size": "batch {}",
  "run": "[{}]",
}
# Flags that runs may differ in and still be compared.
_COMPARED = ("policies", "stores", "budget_tokens", "page_size", "tasks", "scores", "page_sizes")


class Run(NamedTuple):
  """What a folder holds.

  Attributes:
    name: of the folder.
    manifest: of `results.make_manifest`; older ones may lack fields.
    rows: of results.jsonl.
    predictions: of predictions.jsonl; none where there is no such file.
    torn: files whose last line was cut off, which was left out.
  """

  name: str
  manifest: dict[str, Any]
  rows: list[Row]
  predictions: list[Row]
  torn: tuple[str, ...] = ()


class Case(NamedTuple):
  """One policy with one store and budget.

  Attributes:
    series: policy, and what tells it from others of that name; the same for all of its budgets.
    budget_tokens: None where the policy has none.
    rows: one for each task.
    predictions: what it answered, as predictions.jsonl has it; of older runs what rows kept.
  """

  series: str
  budget_tokens: int | None
  rows: list[Row]
  predictions: list[Row]

  @property
  def label(self) -> str:
    """series@budget, or the series alone."""
    return self.series if self.budget_tokens is None else f"{self.series}@{self.budget_tokens}"


class Group(NamedTuple):
  """What may be compared: the rows of one model, device and command, all simulated or none.

  Attributes:
    model: name, and the beginning of the hash where it is known.
    device: with cores or number of devices.
    command: as run_needle.
    simulated: made by a cost model.
    cases: in the order of the rows.
    notes: sentences about what keeps numbers from being comparable.
  """

  model: str
  device: str
  command: str
  simulated: bool
  cases: list[Case]
  notes: list[str]

  @property
  def tasks(self) -> list[str]:
    """In the order of the rows."""
    return list(dict.fromkeys(row["task"] for case in self.cases for row in case.rows))


def read_run(folder: Path) -> Run:
  """Reads and checks a run folder.

  A last line without its end, which a run leaves that was killed or that still writes, is left out.

  Raises:
    ValueError: no run folder, no finished row, or a line or field that cannot be read.
  """
  if not folder.is_dir():
    raise ValueError(f"{folder} is not a folder; name the folder of a run (its --out_dir)")
  if not (folder / MANIFEST).is_file():
    raise ValueError(f"{folder} is no run: it has no {MANIFEST}; name the --out_dir of a run")
  try:
    manifest = json.loads((folder / MANIFEST).read_bytes())
  except (ValueError, RecursionError):
    manifest = None
  if not isinstance(manifest, dict):
    raise ValueError(f"{folder / MANIFEST} is damaged, expected a JSON object; run again")
  files = {name: _read_lines(folder / name) for name in (RESULTS, PREDICTIONS)}
  rows, predictions = (lines for lines, _ in files.values())
  if not rows:
    raise ValueError(f"{folder} has no finished rows in {RESULTS}; wait for its first task")
  for number, row in rows:
    where = f"{folder / RESULTS}: line {number}"
    _check(row, _NUMBERS, where)
    _check_maps(row.get("head_maps"), where)
  for number, row in predictions:
    where = f"{folder / PREDICTIONS}: line {number}"
    _check(row, _PREDICTION_NUMBERS, where)
    steps = row.get("step_s") or []
    if not isinstance(steps, list) or not all(isinstance(one, int | float) for one in steps):
      raise ValueError(f"{where}: step_s is not a list of numbers; delete the line")
  torn = tuple(name for name, (_, cut) in files.items() if cut)
  name = folder.resolve().name
  return Run(name, manifest, [row for _, row in rows], [row for _, row in predictions], torn)


def group_runs(runs: Sequence[Run]) -> list[Group]:
  """All rows, in groups of what may be compared."""
  groups: dict[tuple[str, str, str, bool], list[tuple[Run, Row]]] = {}
  for run in runs:
    for row in run.rows:
      key = (_model(run, row), _device(run, row), command_of(run), bool(row.get("simulated")))
      groups.setdefault(key, []).append((run, row))
  return [_group(key, pairs) for key, pairs in groups.items()]


def command_of(run: Run) -> str:
  """run_needle for run_needle.py."""
  return str(run.manifest.get("command", "-")).removesuffix(".py")


def means(case: Case) -> Row:
  """`eval.means.over_tasks` of a case, under its name."""
  return over_tasks(case.rows) | {"policy": case.series}


def _read_lines(path: Path) -> tuple[list[tuple[int, Row]], bool]:
  """Numbered objects, and whether a torn last line was left out."""
  if not path.exists():
    return [], False
  found, lines = [], path.read_bytes().split(b"\n")
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = jsonl.measured(line)
    except (ValueError, RecursionError):
      if number == len(lines):
        return found, True
      row = None
    if not isinstance(row, dict):
      raise ValueError(f"{path}: line {number} is damaged, expected a JSON object; delete the line")
    found.append((number, row))
  return found, False


def _check(row: Row, numbers: Sequence[str], where: str) -> None:
  for name in _NEEDED:
    if not isinstance(row.get(name), str):
      raise ValueError(f"{where} has no {name}, expected a name; delete the line")
  for name in _TEXTS:
    if not isinstance(row.get(name), str | None):
      raise ValueError(f"{where}: {name} is {row[name]!r}, expected a name or null")
  for name in numbers:
    if not isinstance(row.get(name), int | float | None):
      raise ValueError(f"{where}: {name} is {row[name]!r}, expected a number or null")


def _check_maps(maps: Any, where: str) -> None:
  try:
    if all(np.array(one, float).ndim == 2 for one in (maps or {}).values()):
      return
  except (AttributeError, TypeError, ValueError):
    pass
  raise ValueError(f"{where}: head_maps is not name -> [layers][heads] of numbers")


def _model(run: Run, row: Row) -> str:
  known = run.manifest.get("model")
  known = known if isinstance(known, dict) else {}
  name = row.get("model") or known.get("name") or "unknown model"
  same = known.get("sha256") and name == known.get("name")
  return f"{name} ({str(known['sha256'])[:8]})" if same else str(name)


def _device(run: Run, row: Row) -> str:
  name = row.get("device") or run.manifest.get("device") or "unknown device"
  count, cores = run.manifest.get("num_devices") or 1, run.manifest.get("cores")
  several = f"{count} x {name}" if count != 1 else str(name)
  on_cpu = cores is not None and run.manifest.get("backend") == "cpu"
  return f"{several}, {cores} cores" if on_cpu else several


def _group(key: tuple[str, str, str, bool], pairs: list[tuple[Run, Row]]) -> Group:
  runs = list({id(run): run for run, _ in pairs}.values())
  names = _run_names(runs)
  rows = [row | {"run": names[id(run)]} for run, row in pairs]
  rows = _told_apart(rows)
  fields = [name for name in _DIFFERENCES if name != "run"]
  if len({(_identity(row, fields), row["task"]) for row in rows}) < len(rows):
    fields.append("run")  # the same was measured by several of them
  by_case: dict[tuple, dict[str, Row]] = {}
  twice = 0
  for row in rows:
    of_case = by_case.setdefault(_identity(row, fields), {})
    twice += row["task"] in of_case
    of_case[row["task"]] = row
  firsts = [next(iter(one.values())) for one in by_case.values()]
  cases = [
    Case(_series(first, firsts, fields), first.get("budget_tokens"), list(one.values()), [])
    for first, one in zip(firsts, by_case.values(), strict=True)
  ]
  cases = [case._replace(predictions=_answers(case, runs, names, cases)) for case in cases]
  return Group(*key, cases, _notes(cases, runs, twice))


def _run_names(runs: Sequence[Run]) -> dict[int, str]:
  """Names of folders, numbered where several have the same."""
  names = [run.name for run in runs]
  return {
    id(run): f"{run.name} {place}" if names.count(run.name) > 1 else run.name
    for place, run in enumerate(runs, 1)
  }


def _told_apart(rows: list[Row]) -> list[Row]:
  """Tasks that a run measured at several lengths carry the length in their name."""
  fields, lengths = (*_DIFFERENCES, "task"), {}
  for row in rows:
    lengths.setdefault(_identity(row, fields), set()).add(row.get("prompt_tokens"))
  several = {identity[-1] for identity, found in lengths.items() if len(found) > 1}
  return [
    row | {"task": f"{row['task']} {row.get('prompt_tokens') or 0:,} tokens"}
    if row["task"] in several
    else row
    for row in rows
  ]


def _identity(row: Row, fields: Sequence[str]) -> tuple:
  return tuple(row.get(name) for name in ("policy", "budget_tokens", *fields))


def _series(row: Row, rows: Sequence[Row], fields: Sequence[str]) -> str:
  """The policy with what it needs to be told from others of its name, at this or another budget."""
  same = [one for one in rows if one["policy"] == row["policy"]]

  def varies(name: str) -> bool:
    values: dict[Any, set] = {}
    for one in same:
      values.setdefault(one.get("budget_tokens"), set()).add(one.get(name))
    return any(len(found) > 1 for found in values.values())

  told = [_DIFFERENCES[name].format(row.get(name)) for name in fields if varies(name)]
  return ", ".join([row["policy"], *told])


def _answers(
  case: Case, runs: Sequence[Run], names: Mapping[int, str], cases: Sequence[Case]
) -> list[Row]:
  """Predictions of a case; none where they do not say whether they are of it or of another."""
  fields = ("store", "page_size")
  mine = _identity(case.rows[0], fields)
  alike = [one for one in cases if _identity(one.rows[0], fields) == mine]
  of_runs = [{row["run"] for row in one.rows} for one in alike]
  if sum(map(len, of_runs)) > len(set().union(*of_runs)):
    return []
  sources = {row["run"] for row in case.rows}
  found = [
    prediction
    for run in runs
    if names[id(run)] in sources
    for prediction in run.predictions
    if _identity(prediction, fields) == mine
  ]
  return found or [_from_row(row, place, one) for row in case.rows for place, one in _kept(row)]


def _kept(row: Row) -> list[tuple[int, Row]]:
  answers = row.get("answers")
  answers = answers if isinstance(answers, list) else []
  return [(place, one) for place, one in enumerate(answers) if isinstance(one, dict)]


def _from_row(row: Row, place: int, answer: Row) -> Row:
  """An answer that a row holds, in the words of predictions.jsonl."""
  score = answer.get("score", answer.get("correct"))
  return {
    "task": row["task"],
    "id": str(place),
    "pred": answer.get("given"),
    "answers": answer.get("expected"),
    "score": float(score) if isinstance(score, int | float) else None,
  }


def _notes(cases: Sequence[Case], runs: Sequence[Run], twice: int) -> list[str]:
  notes = []
  if len({frozenset(row["task"] for row in case.rows) for case in cases}) > 1:
    notes.append("Not all were measured on the same tasks: their means cannot be compared.")
  if twice:
    notes.append(f"{twice} rows were measured again in the same run; the later ones are shown.")
  differing = _differing(runs)
  if differing:
    notes.append(f"The runs differ in {', '.join(differing)}.")
  return notes


def _differing(runs: Sequence[Run]) -> list[str]:
  """What was not the same in all of the runs and may move a number."""
  kinds = [run.manifest.get("flags") for run in runs]
  flags = [kind if isinstance(kind, dict) else {} for kind in kinds]
  names = dict.fromkeys(name for kind in flags for name in kind)
  found = [
    f"--{name}"
    for name in names
    if name not in (*_COMPARED, "out_dir", "model")
    and any(kind.get(name) != flags[0].get(name) for kind in flags)
  ]
  first = runs[0].manifest
  return found + [
    name
    for name in ("commit", "versions", "data", "cpu")
    if any(run.manifest.get(name) != first.get(name) for run in runs)
  ]
