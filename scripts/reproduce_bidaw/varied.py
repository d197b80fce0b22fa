"""Systems on cases that differ by one number, as host memory or the disk's rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_bidaw.case import Case
from scripts.reproduce_bidaw.serving import (
  at_highest_rate,
  curve,
  every,
  is_hopeless,
  limit_s,
  sustained,
)
from scripts.reproduce_opkv.drawing import Panel, draw

SYSTEMS = ("cached_attention", "flashgen", "bidaw", "ideal")
_TOLD = SYSTEMS[:3]


def run(cases: Sequence[Case], item: str) -> list[Row]:
  """A row for each rate, case and system.

  Args:
    cases: with the same workloads; the one that is served fastest first.
    item: of the rows.
  """
  rows, hopeless = [], set[str]()
  for number in range(len(cases[0].workloads)):
    points = [(case, case.workloads[number]) for case in cases]
    added = every(points, SYSTEMS, item, hopeless)
    hopeless = {row["system"] for row in added[: len(SYSTEMS)] if is_hopeless(row)}
    rows += added
  return rows


def by_value(rows: Sequence[Row], field: str) -> dict[float, list[Row]]:
  """Rows by the number that differs, ascending."""
  values = sorted({row[field] for row in rows})
  return {value: [row for row in rows if row[field] == value] for value in values}


def plot(by: Mapping[float, Sequence[Row]], x: str, title: str, path: Path) -> None:
  """Mean latency by the number, which is in the unit of x, at the highest rate."""
  found = {value: at_highest_rate(rows) for value, rows in by.items()}
  lines = {}
  for name in SYSTEMS:
    ran = {value: of_it[name] for value, of_it in found.items() if name in of_it}
    lines[name] = [*ran], [row["mean_latency_s"] for row in ran.values()]
  draw([Panel(x, "mean latency, s", lines, log="y")], title, path)


def means(by: Mapping[float, Sequence[Row]], unit: str) -> str:
  """Mean latencies but for ideal's at the highest rate, in words."""
  return "; ".join(f"{_means(rows)} with {value:g} {unit}" for value, rows in by.items())


def _means(rows: Sequence[Row]) -> str:
  found = at_highest_rate(rows)
  return ", ".join(
    f"{found[name]['mean_latency_s']:.2f} s" if name in found else "not run" for name in _TOLD
  )


def rates(by: Mapping[float, Sequence[Row]], unit: str) -> str:
  """What all but ideal sustain, in words, and Bidaw over the better of the others."""
  parts = []
  for value, rows in by.items():
    limit = limit_s(rows[0]["trace"])
    found = [sustained(*curve(rows, name), limit) for name in _TOLD]
    *others, mine = (rate for rate, _ in found)
    texts = ", ".join(text for _, text in found)
    ratio = f" ({mine / max(others):.2f})" if mine > max(others) else ""  # else one rate alone
    parts.append(f"{texts}{ratio} with {value:g} {unit}")
  return "; ".join(parts)
