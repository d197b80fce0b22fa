"""Pictures of result rows, as PNG files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.results import write_atomically

_MARKERS = "osD^vPX*"
_MOST_LABELS = 7  # as many places as there are for labels of the same point


def label(row: Mapping[str, Any]) -> str:
  """policy@budget, or the policy alone where it has none."""
  budget = row.get("budget_tokens")
  return row["policy"] if budget is None else f"{row['policy']}@{budget}"


def accuracy_against_speed(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
  """One point a row: decode speed to the right, share of right answers upwards.

  Args:
    rows: result rows with decode_tokens_per_s and score (0 to 1).
    title: what was asked of which model, where.
    path: of the PNG.
  """
  simulated = any(row.get("simulated") for row in rows)
  speeds = [row["decode_tokens_per_s"] for row in rows]
  _accuracy(rows, speeds, "decode speed, tokens/s" + " (simulated)" * simulated, title, path)


def accuracy_against_bytes(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
  """One point a row: bytes on the device to the right, share of right answers upwards.

  Args:
    rows: result rows with device_kv_bytes, metadata_bytes and score (0 to 1).
    title: what was asked of which model, where.
    path: of the PNG.
  """
  megabytes = [(row["device_kv_bytes"] + row["metadata_bytes"]) / 1e6 for row in rows]
  _accuracy(rows, megabytes, "keys, values and metadata on the device, MB", title, path)


def deltas(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
  """Score minus that of dense: a line for each policy and budget, a column for each task.

  Args:
    rows: result rows with task, score and dense_score (0 to 1), one for each line and column.
    title: what was asked of which model, where.
    path: of the PNG.
  """
  shown = [row for row in rows if row["policy"] != "dense" and row["dense_score"] is not None]
  tasks = list(dict.fromkeys(row["task"] for row in rows))
  lines = list(dict.fromkeys(_case(row) for row in shown))
  grid = np.full((len(lines), len(tasks)), np.nan)
  for row in shown:
    grid[lines.index(_case(row)), tasks.index(row["task"])] = row["score"] - row["dense_score"]
  longest = max(map(len, lines), default=0)  # 8 points high, a character is 0.07 inches wide
  size = (1.4 + 0.9 * len(tasks) + 0.07 * longest, 2.4 + 0.32 * len(lines))
  figure = Figure(figsize=size, layout="constrained")
  axes = figure.subplots()
  picture = axes.imshow(grid, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
  for (line, task), delta in np.ndenumerate(grid):
    if np.isfinite(delta):
      color = "white" if abs(delta) > 0.6 else "black"
      axes.text(task, line, f"{delta:+.2f}", ha="center", va="center", fontsize=8, color=color)
  axes.set_xticks(range(len(tasks)), [name.replace("_", "\n") for name in tasks], fontsize=8)
  axes.set_yticks(range(len(lines)), lines, fontsize=8)
  figure.suptitle(f"score minus that of dense\n{title}", fontsize=9)
  figure.colorbar(picture, ax=axes, shrink=0.8)
  _save(figure, path)


def _accuracy(
  rows: Sequence[Mapping[str, Any]], xs: Sequence[float], name: str, title: str, path: Path
) -> None:
  """Few points have labels; of many, a line joins those of a policy and a legend names it."""
  many = len(rows) > _MOST_LABELS
  figure = Figure(figsize=(8.4 if many else 6.4, 4.2), layout="constrained")
  axes = figure.subplots()
  (_draw_lines if many else _draw_labelled)(axes, rows, xs)
  if many:
    figure.legend(loc="outside right upper", fontsize=8, title="larger mark: more tokens")
  axes.set(xlim=(0, 1.15 * max(xs)), ylim=(-12, 112), yticks=range(0, 101, 25))
  axes.set_xlabel(name)
  axes.set_ylabel("right answers, %")
  axes.set_title(title, fontsize=10)
  axes.grid(alpha=0.3)
  _save(figure, path)


def _draw_labelled(axes: Axes, rows: Sequence[Mapping[str, Any]], xs: Sequence[float]) -> None:
  policies = list(dict.fromkeys(row["policy"] for row in rows))
  for row, x, place in zip(rows, xs, _label_places(rows, xs), strict=True):
    kind, y = policies.index(row["policy"]), 100 * row["score"]
    axes.plot(x, y, _MARKERS[kind % len(_MARKERS)], color=f"C{kind}", markersize=9)
    axes.annotate(
      label(row), (x, y), (0, place), textcoords="offset points", ha="center", va="center"
    )


def _draw_lines(axes: Axes, rows: Sequence[Mapping[str, Any]], xs: Sequence[float]) -> None:
  """Hollow marks, as many points lie on each other."""
  lines: dict[str, list[tuple[int, float, float]]] = {}
  for row, x in zip(rows, xs, strict=True):
    point = (row.get("budget_tokens") or 0, x, 100 * row["score"])
    lines.setdefault(row["policy"], []).append(point)
  for kind, (policy, by_budget) in enumerate(lines.items()):
    points = [(x, y) for _, x, y in sorted(by_budget)]
    color, marker = f"C{kind}", _MARKERS[kind % len(_MARKERS)]
    axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.6)
    for size, (x, y) in enumerate(points):
      name = None if size else policy
      style = {"fillstyle": "none", "linestyle": "none", "markersize": 6 + 2 * size}
      axes.plot(x, y, marker=marker, color=color, label=name, **style)


def _label_places(rows: Sequence[Mapping[str, Any]], xs: Sequence[float]) -> list[int]:
  """Points above (or below) each point for its label, so that neighbours do not overlap."""
  reach = 0.25 * max(xs)  # about a label's width
  places: list[int] = []
  for index, row in enumerate(rows):
    taken = {
      place
      for other, x, place in zip(rows[:index], xs, places, strict=False)
      if abs(x - xs[index]) < reach and abs(other["score"] - row["score"]) < 0.15
    }
    places.append(next(place for place in (14, -14, 26, -26, 38, -38, 50) if place not in taken))
  return places


def _case(row: Mapping[str, Any]) -> str:
  return f"{label(row)} {row['store']}"


def _save(figure: Figure, path: Path) -> None:
  picture = io.BytesIO()
  figure.savefig(picture, format="png", dpi=150)
  write_atomically(path, picture.getvalue())
