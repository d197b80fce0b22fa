"""Pictures of result rows, as PNG files."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from eval.results import write_atomically

MARKERS = "osD^vPX*"
_MOST_LABELS = 7  # as many places as there are for labels of the same point
_WIDEST_LABEL = 20  # characters that fit beside a point
_LINE = 30  # characters of a line of a label in a legend
_ROW_LINE = 46  # and beside a row
PERCENTILES = {50: "o", 90: "|", 99: "D"}


class Spread(NamedTuple):
  """Times of one policy.

  Attributes:
    label: policy@budget.
    samples: seconds; empty where single times were not kept.
    marks: their 50th, 90th and 99th percentile in seconds; None where unknown.
  """

  label: str
  samples: Sequence[float]
  marks: Sequence[float | None]


def label(row: Mapping[str, Any]) -> str:
  """policy@budget, or the policy alone where it has none."""
  budget = row.get("budget_tokens")
  return row["policy"] if budget is None else f"{row['policy']}@{budget}"


def wrapped(text: str, most: int = _LINE) -> str:
  """A label in lines that are not long, of files only the names; safe to draw."""
  text = re.sub(r"(^|=)[^\s:=,]*/", r"\1", text)
  lines = [""]
  for part in re.findall(rf"[^:, -]{{1,{most - 1}}}[:, -]?|.", text):
    if len(lines[-1]) + len(part) > most:
      lines.append("")
    lines[-1] += part
  return "\n".join(lines).replace("$", r"\$")  # which would begin a formula


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
  labels = [wrapped(line, _ROW_LINE) for line in lines]
  width, height = _room(labels)
  columns = ["\n".join(re.split(r"[_ ]", wrapped(name))) for name in tasks]
  width = max(6.4, width + 1.4 + 0.9 * len(tasks))
  figure = Figure(figsize=(width, 2.4 + height), layout="constrained")
  axes = figure.subplots()
  picture = axes.imshow(grid, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
  for (line, task), delta in np.ndenumerate(grid):
    if np.isfinite(delta):
      color = "white" if abs(delta) > 0.6 else "black"
      axes.text(task, line, f"{delta:+.2f}", ha="center", va="center", fontsize=8, color=color)
  axes.set_xticks(range(len(tasks)), columns, fontsize=8)
  axes.set_yticks(range(len(lines)), labels, fontsize=8)
  _head(figure, f"score minus that of dense (scores from 0 to 1)\n{title}")
  figure.colorbar(picture, ax=axes, shrink=0.8)
  save(figure, path)


def latencies(panels: Mapping[str, Sequence[Spread]], title: str, path: Path) -> None:
  """How long things took: from the least to the most, a box for the middle half, percentiles.

  Args:
    panels: what was timed -> one for each policy, in the same order; side by side.
    title: what was asked of which model, where.
    path: of the PNG.
  """
  labels = [wrapped(one.label, _ROW_LINE) for one in next(iter(panels.values()))]
  width, height = _room(labels)
  size = (width + 1 + 4 * len(panels), 1.8 + height)
  figure = Figure(figsize=size, layout="constrained")
  columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
  for axes, (name, spreads) in zip(columns, panels.items(), strict=True):
    _draw_spreads(axes, name, spreads)
  columns[0].set_yticks(range(len(labels)), labels, fontsize=8)
  columns[0].set_ylim(len(labels) - 0.4, -0.6)
  drawn = [
    Line2D([], [], color="black", marker=marker, linestyle="none", label=f"p{q}")
    for q, marker in PERCENTILES.items()
  ]
  figure.legend(handles=drawn, loc="outside lower center", ncols=len(drawn), fontsize=8)
  _head(figure, title)
  save(figure, path)


def head_maps(
  name: str, maps: Mapping[str, Any], limits: tuple[float, float], title: str, path: Path
) -> None:
  """A value of every layer and head, as a heat map for each label.

  Args:
    name: of the value; one that ends with _ratio is drawn in percent.
    maps: label -> values [layers][heads]; None is grey.
    limits: least and greatest value that has a color of its own.
    title: what was asked of which model, where.
    path: of the PNG.
  """
  scale = 100 if name.endswith("_ratio") else 1
  grids = {one: scale * np.array(values, float).T for one, values in maps.items()}
  heads = max(len(grid) for grid in grids.values())
  across = min(len(grids), 3)
  down = -(-len(grids) // across)
  size = (max(6.4, 1 + across * 3.6), 1.2 + down * (0.9 + min(2.0, 0.14 * heads)))
  figure = Figure(figsize=size, layout="constrained")
  panels = figure.subplots(down, across, squeeze=False)
  colors = ScalarMappable(Normalize(scale * limits[0], scale * limits[1]))
  for axes, (one, grid) in zip(panels.flat, grids.items(), strict=False):
    axes.imshow(grid, aspect="auto", norm=colors.norm)
    axes.set_facecolor("0.85")
    axes.set_title(wrapped(one), fontsize=8)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel("head", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.tick_params(labelsize=7)
  for axes in panels.flat[len(grids) :]:
    axes.set_axis_off()
  label = name.removesuffix("_ratio").replace("_", " ") + ", %" * (scale == 100)
  bar = figure.colorbar(colors, ax=panels, shrink=min(1, 1.5 / down))
  bar.set_label(_title(label), fontsize=8)
  bar.ax.tick_params(labelsize=7)
  _head(figure, title)
  save(figure, path)


def save(figure: Figure, path: Path) -> None:
  """Writes a figure, whole or not at all. Characters that the font lacks become boxes, and a
  busy machine takes long to find a place for a legend, both silently."""
  picture = io.BytesIO()
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")
    warnings.filterwarnings("ignore", r"Creating legend with loc=.best. can be slow")
    figure.savefig(picture, format="png", dpi=150)
  write_atomically(path, picture.getvalue())


def _accuracy(
  rows: Sequence[Mapping[str, Any]], xs: Sequence[float], name: str, title: str, path: Path
) -> None:
  """Few points have labels; of many, a line joins those of a policy and a legend names it."""
  long = any(len(label(row)) > _WIDEST_LABEL for row in rows)
  many = long or len(rows) > _MOST_LABELS
  policies = dict.fromkeys(row["policy"] for row in rows)
  # What a legend needs: a line of 8 points is 0.15 inches high.
  needs = 1.4 + 0.15 * sum(wrapped(one).count("\n") + 1 for one in policies)
  size = (11.0, max(5.2, needs)) if many else (6.4, 4.2)
  figure = Figure(figsize=size, layout="constrained")
  axes = figure.subplots()
  (_draw_lines if many else _draw_labelled)(axes, rows, xs)
  if many:
    figure.legend(
      loc="outside right upper", fontsize=8, title="larger mark: more tokens", title_fontsize=8
    )
  top = _top(100 * max(row["score"] for row in rows))
  around = 0.04 if many else _around(_label_places(rows, xs))
  axes.set(xlim=(0, (1.05 if many else 1.15) * max(xs) or 1))
  axes.set_ylim(-around * top, (1 + around) * top)
  axes.set_yticks(np.linspace(0, top, 6))
  axes.set_xlabel(name)
  axes.set_ylabel("score, %")
  axes.set_title(_title(title), fontsize=9, loc="left")
  axes.grid(alpha=0.3)
  save(figure, path)


def _around(places: Sequence[int]) -> float:
  """Room above and below the scores for labels so far from their points, beside that of scores."""
  share = (max(map(abs, places)) + 8) / 240  # of the height of the axes, in points
  return share / (1 - 2 * share)


def _top(highest: float) -> int:
  """The end of an axis of percentages: 100, or less where all are low."""
  return next(end for end in (5, 10, 20, 50, 100) if highest <= end or end == 100)


def _head(figure: Figure, title: str) -> None:
  """At the left, where a narrow screen shows it of a wide picture."""
  figure.suptitle(_title(title), fontsize=9, x=0.01, horizontalalignment="left")


def _title(text: str) -> str:
  return text.replace("$", r"\$")


def _room(labels: Sequence[str]) -> tuple[float, float]:
  """Inches that labels beside rows of a plot need; 8 points high, a character is 0.07 wide."""
  longest = max((len(line) for one in labels for line in one.split("\n")), default=0)
  lines = max((one.count("\n") + 1 for one in labels), default=1)
  return 0.07 * longest, len(labels) * max(0.3, 0.13 * lines + 0.08)


def _draw_spreads(axes: Axes, name: str, spreads: Sequence[Spread]) -> None:
  seconds = [one for spread in spreads for one in (*spread.samples, *spread.marks) if one]
  scale, unit = (1, "s") if max(seconds, default=1) >= 1 else (1e3, "ms")
  for place, spread in enumerate(spreads):
    color = f"C{place % 10}"
    if len(spread.samples):
      low, first, third, high = scale * np.percentile(spread.samples, (0, 25, 75, 100))
      axes.plot([low, high], [place, place], color=color, linewidth=1)
      axes.barh(place, third - first, 0.5, first, color=color, alpha=0.35)
    for mark, value in zip(PERCENTILES.values(), spread.marks, strict=True):
      if value is not None:
        axes.plot(scale * value, place, mark, color=color, markersize=14 if mark == "|" else 6)
  axes.set_xlabel(f"{name}, {unit}")
  axes.grid(axis="x", alpha=0.3)
  if seconds and max(seconds) > 20 * min(seconds):
    _logarithmic(axes)
  else:
    axes.set_xlim(0, 1.05 * scale * max(seconds, default=1))


def _logarithmic(axes: Axes) -> None:
  """With as many numbers as there is room for, and no powers of ten."""
  axes.set_xscale("log")
  low, high = axes.get_xlim()
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
  axes.xaxis.set_major_formatter("{x:g}")
  axes.xaxis.set_minor_formatter(NullFormatter())
  axes.tick_params(axis="x", labelsize=8)


def _draw_labelled(axes: Axes, rows: Sequence[Mapping[str, Any]], xs: Sequence[float]) -> None:
  policies = list(dict.fromkeys(row["policy"] for row in rows))
  for row, x, place in zip(rows, xs, _label_places(rows, xs), strict=True):
    kind, y = policies.index(row["policy"]), 100 * row["score"]
    axes.plot(x, y, MARKERS[kind % len(MARKERS)], color=f"C{kind}", markersize=9)
    axes.annotate(
      _title(label(row)), (x, y), (0, place), textcoords="offset points", ha="center", va="center"
    )


def _draw_lines(axes: Axes, rows: Sequence[Mapping[str, Any]], xs: Sequence[float]) -> None:
  """Hollow marks, as many points lie on each other."""
  lines: dict[str, list[tuple[int, float, float]]] = {}
  for row, x in zip(rows, xs, strict=True):
    point = (row.get("budget_tokens") or 0, x, 100 * row["score"])
    lines.setdefault(row["policy"], []).append(point)
  for kind, (policy, by_budget) in enumerate(lines.items()):
    points = [(x, y) for _, x, y in sorted(by_budget)]
    color, marker = f"C{kind}", MARKERS[kind % len(MARKERS)]
    if policy == "dense":  # what the others are measured against
      color = "black"
      axes.axhline(points[0][1], color=color, linewidth=0.8, linestyle=":")
    axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.6)
    for size, (x, y) in enumerate(points):
      name = None if size else wrapped(policy)
      style = {"fillstyle": "none", "linestyle": "none", "markersize": 6 + 2 * size}
      axes.plot(x, y, marker=marker, color=color, label=name, **style)


def _label_places(rows: Sequence[Mapping[str, Any]], xs: Sequence[float]) -> list[int]:
  """Points above (or below) each point for its label, so that neighbours do not overlap."""
  reach = 0.25 * max(xs)  # about a label's width
  near = 0.0015 * _top(100 * max(row["score"] for row in rows))  # and height
  places: list[int] = []
  for index, row in enumerate(rows):
    taken = {
      place
      for other, x, place in zip(rows[:index], xs, places, strict=False)
      if abs(x - xs[index]) < reach and abs(other["score"] - row["score"]) < near
    }
    places.append(next(place for place in (14, -14, 26, -26, 38, -38, 50) if place not in taken))
  return places


def _case(row: Mapping[str, Any]) -> str:
  return f"{label(row)} {row.get('store') or ''}".strip()
