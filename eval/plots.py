"""Pictures of result rows, as PNG files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.results import write_atomically

_MARKERS = "osD^vPX*"


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
  figure = Figure(figsize=(6.4, 4.2), layout="constrained")
  axes = figure.subplots()
  simulated = any(row.get("simulated") for row in rows)
  policies = list(dict.fromkeys(row["policy"] for row in rows))
  for row, place in zip(rows, _label_places(rows), strict=True):
    x, y = row["decode_tokens_per_s"], 100 * row["score"]
    kind = policies.index(row["policy"])
    axes.plot(x, y, _MARKERS[kind % len(_MARKERS)], color=f"C{kind}", markersize=9)
    axes.annotate(
      label(row), (x, y), (0, place), textcoords="offset points", ha="center", va="center"
    )
  fastest = max(row["decode_tokens_per_s"] for row in rows)
  axes.set(xlim=(0, 1.15 * fastest), ylim=(-12, 112), yticks=range(0, 101, 25))
  axes.set_xlabel("decode speed, tokens/s" + (" (simulated)" if simulated else ""))
  axes.set_ylabel("right answers, %")
  axes.set_title(title, fontsize=10)
  axes.grid(alpha=0.3)
  picture = io.BytesIO()
  figure.savefig(picture, format="png", dpi=150)
  write_atomically(path, picture.getvalue())


def _label_places(rows: Sequence[Mapping[str, Any]]) -> list[int]:
  """Points above (or below) each point for its label, so that neighbours do not overlap."""
  reach = 0.25 * max(row["decode_tokens_per_s"] for row in rows)  # about a label's width
  places: list[int] = []
  for index, row in enumerate(rows):
    taken = {
      place
      for other, place in zip(rows[:index], places, strict=True)
      if abs(other["decode_tokens_per_s"] - row["decode_tokens_per_s"]) < reach
      and abs(other["score"] - row["score"]) < 0.15
    }
    places.append(next(place for place in (14, -14, 26, -26, 38, -38, 50) if place not in taken))
  return places
