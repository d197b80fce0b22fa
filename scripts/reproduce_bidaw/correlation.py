"""Figure 12: the longer an answer, the greater the lower bound of the distance to the next turn.

Two estimates of the bound, `by_group` and `by_length` (see `kvjax.sim.trace_statistics`), of the
whole workload and of each hour. The second is the paper's; it grows by itself where long answers
are rare, which --trace=control shows, so look at the first too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from kvjax.sim import trace_statistics
from kvjax.sim.workloads import Workload
from scripts.reproduce_bidaw.case import Case, distances_of, label_of, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

HOUR_S, LEAST_TURNS = 3600, 1000  # an hour with fewer says little of 20 groups
WHOLE = "whole"
COLUMNS = (
  *("trace", "users_per_minute", "hour", "turns", "group_spearman", "length_spearman"),
  "plain_spearman",
)


def run(case: Case) -> list[Row]:
  """A row for each rate and hour, and one for the whole.

  Raises:
    ValueError: a workload in which too few turns continue a conversation.
  """
  return [row for workload in case.workloads for row in _rows(case, workload)]


def _rows(case: Case, workload: Workload) -> Iterator[Row]:
  distances = distances_of(case, workload)
  answers = trace_statistics.answers_before(workload)
  continues = workload.previous >= 0
  if continues.sum() < trace_statistics.GROUPS:
    raise ValueError(
      f"{continues.sum()} turns of {workload.name} continue a conversation, which makes no "
      f"{trace_statistics.GROUPS} groups; expected a trace of conversations, and more of it"
    )
  for hour, inside in _hours(workload, continues):
    kept = inside & continues
    grouped = trace_statistics.by_group(answers[kept], distances[kept])
    by_length = trace_statistics.by_length(answers[kept], distances[kept])
    yield row_of(
      case,
      "correlation",
      workload,
      hour=hour,
      turns=int(kept.sum()),
      group_spearman=grouped.spearman,
      length_spearman=by_length.spearman,
      plain_spearman=trace_statistics.spearman(answers[kept], distances[kept]),
      by_group=[column.tolist() for column in grouped],
      by_length=[column.tolist() for column in by_length],
    )


def _hours(workload: Workload, continues: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
  yield WHOLE, np.ones(len(workload), bool)
  hours = (workload.arrival_s // HOUR_S).astype(np.int64)
  if hours[0] < hours[-1]:
    for hour in np.unique(hours[continues]).tolist():
      inside = hours == hour
      if (inside & continues).sum() >= LEAST_TURNS:
        yield str(hour), inside


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Both bounds of the whole."""
  whole = [row for row in rows if row["hour"] == WHOLE]
  panels = []
  for name, words in (
    ("by_group", f"{trace_statistics.PERCENTILE}th percentile of the distance, GB"),
    ("by_length", "least distance of each length, GB"),
  ):
    lines = {
      label_of(row): (row[name][0], [distance / 1e9 for distance in row[name][1]]) for row in whole
    }
    panels.append(Panel("tokens of the answer before", words, lines))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper's twelve hours beside ours, of each rate."""
  ours = []
  for label in dict.fromkeys(map(label_of, rows)):
    mine = [row for row in rows if label_of(row) == label]
    hours = [row for row in mine if row["hour"] != WHOLE] or mine
    spans = [_span([row[f"{name}_spearman"] for row in hours]) for name in ("length", "group")]
    ours.append(f"{label}: {spans[0]} by length, {spans[1]} by group")
  return [
    Comparison(
      "Fig. 12",
      "Spearman of answer length and the lower bound of the reuse distance, by hour",
      "0.94 to 0.98",
      "; ".join(ours),
      "another trace; by length is the paper's estimate, which is 0.4 to 0.7 even where answers "
      "say nothing (--trace=control), as rare lengths have few distances; by group has both signs "
      "there",
    )
  ]


def _span(values: Sequence[float | None]) -> str:
  known = [value for value in values if value is not None]
  if not known:
    return "none"
  low, high = min(known), max(known)
  return f"{low:.2f}" if len(known) == 1 else f"{low:.2f} to {high:.2f}"


ITEM = Item(run, plot, compare, COLUMNS)
