"""Pictures of an item: panels side by side, with lines or bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from eval.plots import MARKERS, save, wrapped
from eval.results import Row


class Panel(NamedTuple):
  """What one panel shows.

  Attributes:
    x: name of the axis to the right.
    y: name of the axis upwards.
    lines: label -> (xs, ys). Where xs are words the panel has bars, the same words for each label.
    paper: the paper's number, a dotted line; None for none.
    log: axes that are logarithmic: "x", "y", "xy" or none.
  """

  x: str
  y: str
  lines: Mapping[str, tuple[Sequence[float] | Sequence[str], Sequence[float]]]
  paper: float | None = None
  log: str = ""


def bar_panels(rows: Sequence[Row], by: str, fields: Mapping[str, str]) -> list[Panel]:
  """For each field -> its name a panel with bars of every policy, by another field."""
  panels = []
  for field, name in fields.items():
    bars = {}
    for row in rows:
      words, heights = bars.setdefault(row["policy"], ([], []))
      words.append(row[by])
      heights.append(row[field])
    panels.append(Panel("", name, bars))
  return panels


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
  """Writes a PNG."""
  words = [len(xs) for panel in panels if _has_bars(panel) for xs, _ in panel.lines.values()]
  width = max(5.2, 0.95 * max(words, default=0))
  figure = Figure(figsize=(width * len(panels), 4.4), layout="constrained")
  columns = figure.subplots(1, len(panels), squeeze=False)[0]
  for axes, panel in zip(columns, panels, strict=True):
    (_bars if _has_bars(panel) else _lines)(axes, panel)
    if panel.paper is not None:
      axes.axhline(panel.paper, color="black", linestyle=":", linewidth=1, label="the paper")
    _scale(axes, panel.log)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
  figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, horizontalalignment="left")
  save(figure, path)


def _scale(axes: Axes, log: str) -> None:
  """Upwards from 0, or in logarithms, with numbers that are no powers of ten."""
  for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
    if name in log:
      axes.set(**{f"{name}scale": "log"})
      low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
      if high < 5 * low:  # of 1, 2, 5, 10 there may be one or none
        axis.set_major_locator(MaxNLocator(6))
        axis.set_minor_locator(NullLocator())
      else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
      axis.set_major_formatter("{x:g}")
      axis.set_minor_formatter(NullFormatter())
  low, high = axes.get_ylim()
  if "y" in log:
    axes.set_ylim(low, high * (high / low) ** 0.08)
  else:
    axes.set_ylim(0, 1.08 * high)


def _has_bars(panel: Panel) -> bool:
  return any(isinstance(x, str) for xs, _ in panel.lines.values() for x in xs)


def _lines(axes: Axes, panel: Panel) -> None:
  """Hollow marks, as many points lie on each other."""
  for place, (label, (xs, ys)) in enumerate(panel.lines.items()):
    marker = MARKERS[place % len(MARKERS)]
    style = {"markersize": 5, "fillstyle": "none", "linewidth": 1}
    axes.plot(xs, ys, marker=marker, label=wrapped(label), **style)
  if all(isinstance(x, int) for xs, _ in panel.lines.values() for x in xs):
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _bars(axes: Axes, panel: Panel) -> None:
  width = 0.8 / len(panel.lines)
  words: Sequence[float] | Sequence[str] = ()
  for place, (label, (words, heights)) in enumerate(panel.lines.items()):
    at = [group + (place - (len(panel.lines) - 1) / 2) * width for group in range(len(words))]
    bars = axes.bar(at, heights, width, label=wrapped(label))
    axes.bar_label(bars, fmt="%.2f", fontsize=7)
  names = [wrapped(str(word), 15) for word in words]
  axes.set_xticks(range(len(names)), names, fontsize=7)
