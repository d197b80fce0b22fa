"""Figure 3: how many of the tokens selected now were selected in the steps before.

The paper names the ratio and not its definition. Ours: of the tokens that a KV head selects at a
step, the share that it selected in at least one of the last W steps, summed over heads and steps
before it is divided; the first W steps are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from scripts.reproduce_opkv.case import Case, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproduce_opkv.following import follow
from scripts.reproducing import Comparison, Item

WINDOWS = (1, 2, 4, 8)
PAPER_LAYER = 7
COLUMNS = ("policy", "layer", *(f"reuse_{window}_ratio" for window in WINDOWS))


def run(case: Case) -> list[Row]:
  """A row for each policy and selecting layer; ratios of windows that are too long are None."""
  rows = []
  for spec in case.policies:
    followed = follow(case, spec)
    for place, layer in enumerate(followed.layers):
      selected = followed.selected[:, place]
      by_step = {window: reused(selected, window) for window in WINDOWS}
      rows.append(
        row_of(case, followed.runner, "reuse")
        | {"layer": layer, "reuse_by_step": _shares(by_step[1]).tolist()}
        | {f"reuse_{window}_ratio": _share(counts) for window, counts in by_step.items()}
      )
  return rows


def reused(selected: np.ndarray, window: int) -> np.ndarray:
  """i64[S - W, 2] of bool[S, K, T]: tokens selected at a step, and those of them that were before.

  It is empty where there are no W steps before the last.
  """
  recent = [selected[window - back : -back] for back in range(1, window + 1)]
  before = np.logical_or.reduce(recent)
  now = selected[window:]
  return np.stack([now.sum(axis=(1, 2)), (now & before).sum(axis=(1, 2))], axis=1)


def _shares(counts: np.ndarray) -> np.ndarray:
  return counts[:, 1] / np.maximum(counts[:, 0], 1)


def _share(counts: np.ndarray) -> float | None:
  now, again = counts.sum(axis=0)
  return float(again / now) if now else None


def nearest_to_the_papers(rows: Sequence[Row]) -> list[Row]:
  """Of each policy the row of the selecting layer that is nearest to layer 7."""
  nearest = {}
  for row in sorted(rows, key=lambda row: abs(row["layer"] - PAPER_LAYER)):
    nearest.setdefault(row["policy"], row)
  return list(nearest.values())


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """By layer and window, and step by step in the paper's layer."""
  layers = {}
  for row in rows:
    for window in WINDOWS:
      ratio = row[f"reuse_{window}_ratio"]
      if ratio is not None:
        xs, ys = layers.setdefault(f"{row['policy']}, last {window}", ([], []))
        xs.append(row["layer"])
        ys.append(ratio)
  steps = {
    f"{row['policy']}, layer {row['layer']}": (
      range(1, 1 + len(row["reuse_by_step"])),
      row["reuse_by_step"],
    )
    for row in nearest_to_the_papers(rows)
  }
  y = "share selected before"
  draw([Panel("layer", y, layers), Panel("step", f"{y}, in the last step", steps)], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper's layer."""
  return [
    Comparison(
      "Fig. 3",
      f"tokens selected again in the next step, {row['policy']}, layer {row['layer']}",
      "very high (InfiniGen, layer 7; a curve without numbers)",
      f"{row['reuse_1_ratio']:.2f}",
      "another model, and a window of one step; "
      + ", ".join(f"{row[f'reuse_{w}_ratio']:.2f} over {w}" for w in _longer(row)),
    )
    for row in nearest_to_the_papers(rows)
    if row["reuse_1_ratio"] is not None
  ]


def _longer(row: Row) -> list[int]:
  return [window for window in WINDOWS[1:] if row[f"reuse_{window}_ratio"] is not None]


ITEM = Item(run, plot, compare, COLUMNS)
