"""Figure 1: overlap beyond chance (RCO) of two lists of a head, by the steps between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from scripts.heads_profile import mean_by_distance, telling_layer
from scripts.reproduce_flexicache.case import Case, groups_of, mean_of, row_of, unstable_mask
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

DISTANCES = (1, 2, 4, 8, 15, 24, 32, 48, 63)
SHOWN = (1, 4, 15)
COLUMNS = ("budget_tokens", "heads", "num_heads", *(f"rco_{steps}_ratio" for steps in SHOWN))


def run(case: Case) -> list[Row]:
  """A row for each kind of heads, and for each head of the layer that shows most."""
  steps = min(len(trace.mass) for trace in case.traces)
  distances = [distance for distance in DISTANCES if distance < steps]
  rows = []
  for pages in case.budgets:
    overlap, unstable = mean_by_distance(case.traces, pages, distances), unstable_mask(case, pages)
    layer = telling_layer(1 - overlap[len(distances) // 2], np.argwhere(unstable).tolist())
    kinds = groups_of(case, pages)
    for head in range(case.config.num_kv_heads):
      mask = np.zeros_like(unstable)
      mask[layer, head] = True
      kind = "unstable" if unstable[layer, head] else "stable"
      kinds.append((f"layer {layer}, head {head}, {kind}", mask))
    for name, mask in kinds:
      means = overlap[:, mask].mean(axis=1)
      by_distance = dict(zip(distances, means.tolist(), strict=True))
      rows.append(
        row_of(case, "rco", pages, heads=name, num_heads=int(mask.sum()), distances=distances)
        | {"rco_by_distance": means.tolist()}
        | {f"rco_{one}_ratio": by_distance.get(one) for one in SHOWN}
      )
  return rows


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """A panel for each budget."""
  panels = [
    Panel(
      "steps between two lists",
      f"RCO at {budget:,} tokens",
      {
        f"{row['heads']}": (row["distances"], row["rco_by_distance"])
        for row in rows
        if row["budget_tokens"] == budget
      },
    )
    for budget in dict.fromkeys(row["budget_tokens"] for row in rows)
  ]
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Stable and unstable heads, near and far."""
  ours = []
  for kind in ("stable", "unstable"):
    near, far = (mean_of(rows, f"rco_{steps}_ratio", heads=kind) for steps in (1, 15))
    if near is not None and far is not None:
      ours.append(f"{kind} heads {near:.2f} after 1 step and {far:.2f} after 15")
  return [
    Comparison(
      "Fig. 1",
      "overlap beyond chance by distance",
      "stable heads high with a slow decay, unstable ones low (Llama-3.1-8B, layer 4; curves)",
      "; ".join(ours),
      "another model, and steps of a given text; heads are called unstable by these same traces",
    )
  ]


ITEM = Item(run, plot, compare, COLUMNS)
