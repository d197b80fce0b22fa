"""One page from one or several runs: what ran, tables, plots, answers.

    python -m eval.report runs/needle-20261129-224100
    python -m eval.report runs/a runs/b --out=compared.html

Writes a page that needs nothing but itself, and the plots in it as PNG files beside it; prints the
means. Rows are compared only where command, model and device are the same; others have tables and
plots of their own on the page.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

from eval import cli, plots, report_html, report_tables
from eval.plots import Spread
from eval.report_rows import Case, Group, group_runs, means, read_run
from eval.results import Row, write_atomically
from eval.tables import table

_PAGE = "report.html"
_MAPS_IN_A_PICTURE = 12
_TERMINAL = (
  *("policy", "tasks", "score", "retention", "ttft_s_p50", "tpot_s_p50", "tpot_s_p99"),
  *("decode_tokens_per_s", "speedup_vs_dense", "device_kv_bytes", "metadata_bytes", "limit hits"),
)


class Plot(NamedTuple):
  """A picture of a group.

  Attributes:
    name: of its file, after those of the page and the group.
    caption: what it shows.
    draw: writes it, given title and path.
    folded: it is seen only when the reader asks for it.
  """

  name: str
  caption: str
  draw: Callable[[str, Path], None]
  folded: bool = False


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_string("out", None, f"The page; by default {_PAGE} in the first of the folders.")


def main(args: flags.FlagValues, arguments: Sequence[str]) -> None:
  """Reads the runs, writes the page and its plots, prints the means."""
  folders = [Path(one).expanduser() for one in arguments]
  path, tables = _write(folders, Path(args.out).expanduser() if args.out else None)
  print(f"{tables}\n\nwritten to {path}")


def write(*folders: Path, out: Path | None = None) -> Path:
  """Makes the page of some runs.

  Args:
    folders: each holds manifest.json, results.jsonl and, if it is not old, predictions.jsonl.
    out: of the page, which replaces an older one; by default report.html in the first folder. The
      plots lie beside it as STEM-GROUP-NAME.png.

  Returns:
    The path of the page.

  Raises:
    ValueError: no folder, one that is no run, one without rows or with damaged ones, or a page that
      cannot be written there. Nothing is written then.
  """
  return _write(folders, out)[0]


def _write(folders: Sequence[Path], out: Path | None) -> tuple[Path, str]:
  """Path of the page, and tables for the terminal."""
  if not folders:
    raise ValueError("no run given, expected folders: python -m eval.report RUN_DIR...")
  twice = next((one for one in folders if list(folders).count(one) > 1), None)
  if twice:
    raise ValueError(f"{twice} comes twice; name each run once")
  runs = [read_run(folder) for folder in folders]
  out = folders[0] / _PAGE if out is None else out
  _check_out(out)
  groups = group_runs(runs)
  parts, pictures = [report_html.what_ran(runs)], {}
  if len(groups) > 1:
    parts.insert(0, report_html.contents(groups))
  for place, group in enumerate(groups, 1):
    drawn = list(_drawn(group))
    stem = out.stem if len(groups) == 1 else f"{out.stem}-{place}"
    pictures |= {f"{stem}-{plot.name}.png": picture for plot, picture in drawn}
    parts += [
      report_html.group_head(place, group),
      *(_shown(plot, picture) for plot, picture in drawn),
      report_tables.task_scores(group),
      report_html.answers(group),
    ]
  models = ", ".join(dict.fromkeys(group.model.partition(" (")[0] for group in groups))
  page = report_html.page(f"kvjax evaluation: {models}", parts)
  for name, picture in pictures.items():
    write_atomically(out.with_name(name), picture)
  write_atomically(out, page)
  return out, "\n\n".join(map(_terminal, groups))


def _check_out(out: Path) -> None:
  if out.suffix != ".html":
    raise ValueError(f"--out={out}: expected a name that ends with .html")
  if out.is_dir():
    raise ValueError(f"--out={out} is a folder; name a file")
  if not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
    kind = "cannot be written to" if out.parent.is_dir() else "is not a folder"
    raise ValueError(f"{out} cannot be written: {out.parent} {kind}; choose another --out")


def _terminal(group: Group) -> str:
  rows = []
  for case in group.cases:
    row = means(case)
    percent = {name: report_tables.shown(name, row[name]) for name in ("score", "retention")}
    percent["limit hits"] = report_tables.shown("limit_ratio", row["limit_ratio"])
    rows.append(row | percent | {"policy": case.label, "tasks": row["num_tasks"]})
  return f"{report_html.heading(group)}\n{table(rows, _TERMINAL)}"


def _shown(plot: Plot, picture: bytes) -> str:
  inside = report_html.figure(plot.caption, picture)
  summary = plot.caption.partition(". ")[0]
  return report_html.folded(summary, inside) if plot.folded else inside


def _drawn(group: Group) -> Iterator[tuple[Plot, bytes]]:
  title = f"{group.model}, {group.command}{' (simulated)' * group.simulated}\n{group.device}"
  with tempfile.TemporaryDirectory() as folder:
    for plot in _plots(group):
      path = Path(folder) / f"{plot.name}.png"
      plot.draw(title, path)
      yield plot, path.read_bytes()


def _plots(group: Group) -> Iterator[Plot]:
  """Those that there is something for."""
  rows = [means(case) for case in group.cases]
  scored = [row for row in rows if row["score"] is not None]
  timed = [row for row in scored if row["decode_tokens_per_s"]]
  if timed:
    yield Plot(
      "accuracy_speed",
      "Mean score against decode speed; a line joins the budgets of a policy.",
      lambda title, path: plots.accuracy_against_speed(timed, title, path),
    )
  sized = [row | {"metadata_bytes": row["metadata_bytes"] or 0} for row in scored]
  sized = [row for row in sized if row["device_kv_bytes"] is not None]
  if sized:
    yield Plot(
      "accuracy_bytes",
      "Mean score against bytes on the device while decoding.",
      lambda title, path: plots.accuracy_against_bytes(sized, title, path),
    )
  compared = _compared(group)
  if compared:
    yield Plot(
      "deltas",
      "Score minus that of dense, task by task.",
      lambda title, path: plots.deltas(compared, title, path),
    )
  panels = _latencies(group.cases)
  if panels:
    yield Plot(
      "latency",
      _latency_caption(panels),
      lambda title, path: plots.latencies(panels, title, path),
    )
  yield from _head_plots(group)


def _compared(group: Group) -> list[Row]:
  return [
    row | {"policy": case.series, "store": None}
    for case in group.cases
    for row in case.rows
    if case.rows[0]["policy"] != "dense"
    and row.get("score") is not None
    and row.get("dense_score") is not None
  ]


def _latencies(cases: Sequence[Case]) -> dict[str, list[Spread]]:
  """What was timed: of all predictions, or of older runs the percentiles that rows have."""
  panels = {
    "TTFT": [_spread(case, "ttft_s", _ttft(case)) for case in cases],
    "TPOT": [_spread(case, "tpot_s", _steps(case)) for case in cases],
  }
  return {
    name: spreads
    for name, spreads in panels.items()
    if any(mark is not None for spread in spreads for mark in spread.marks)
  }


def _ttft(case: Case) -> list[float]:
  return [one["ttft_s"] for one in case.predictions if one.get("ttft_s") is not None]


def _steps(case: Case) -> list[float]:
  return [second for one in case.predictions for second in one.get("step_s") or ()]


def _spread(case: Case, name: str, samples: list[float]) -> Spread:
  wanted = tuple(plots.PERCENTILES)
  if samples:
    return Spread(case.label, samples, [float(np.percentile(samples, q)) for q in wanted])
  row = means(case)
  return Spread(case.label, [], [row[f"{name}_p{q}"] for q in wanted])


def _latency_caption(panels: dict[str, list[Spread]]) -> str:
  marks = "Time to the first token (TTFT) and per output token (TPOT): p50, p90 and p99"
  if not any(len(spread.samples) for spreads in panels.values() for spread in spreads):
    return f"{marks}, medians over tasks; single times were not kept."
  return f"{marks} of all examples; line: least to most; box: middle half."


def _head_plots(group: Group) -> Iterator[Plot]:
  """Maps by name, one for each case: of many tasks there would be pictures by the dozen."""
  by_name: dict[str, dict[str, np.ndarray]] = {}
  for case in group.cases:
    for name in dict.fromkeys(name for row in case.rows for name in row.get("head_maps") or {}):
      by_name.setdefault(name, {})[case.label] = _mean_map(case, name)
  for name, maps in by_name.items():
    labels, limits = list(maps), _limits(maps.values())  # the same colors in all pictures
    for start in range(0, len(labels), _MAPS_IN_A_PICTURE):
      some = labels[start : start + _MAPS_IN_A_PICTURE]
      yield _head_plot(name, {one: maps[one] for one in some}, limits, start, len(labels))


def _mean_map(case: Case, name: str) -> np.ndarray:
  """f[layers, heads], over those tasks that have a number there; NaN where none has."""
  found = [row["head_maps"][name] for row in case.rows if name in (row.get("head_maps") or {})]
  maps = [np.array(one, float) for one in found]
  shapes = list(dict.fromkeys(one.shape for one in maps))
  if len(shapes) > 1:
    raise ValueError(
      f"{case.label}: head_maps {name!r} is {shapes[0]} of one task and {shapes[1]} of another, "
      "expected [layers][heads] of the same model; make reports of them apart"
    )
  return np.ma.masked_invalid(maps).mean(axis=0).filled(np.nan)


def _limits(maps: Iterable[np.ndarray]) -> tuple[float, float]:
  values = np.concatenate([one.ravel() for one in maps])
  known = values[np.isfinite(values)]
  return (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)


def _head_plot(
  name: str, maps: dict[str, np.ndarray], limits: tuple[float, float], start: int, total: int
) -> Plot:
  number, last = 1 + start // _MAPS_IN_A_PICTURE, start + len(maps)
  what = report_tables.header(name)
  some = "" if len(maps) == total else f", {start + 1} to {last} of {total}"
  return Plot(
    f"heads_{''.join(one if one.isalnum() else '_' for one in name)}_{number}",
    f"Layers and heads: {what}, mean over tasks{some}. Grey: nothing was measured there, as in "
    "layers that do not select.",
    lambda title, path: plots.head_maps(name, maps, limits, title, path),
    folded=True,
  )


if __name__ == "__main__":
  cli.run(main, define_flags, takes_arguments=True)
