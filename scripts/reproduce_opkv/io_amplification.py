"""Figure 2: tokens that come from the host for each token that is selected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from scripts.reproduce_opkv.case import Case, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproduce_opkv.driving import Counts, drive, moves
from scripts.reproduce_opkv.following import Followed, follow
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("policy", "store", "selected_ratio", "moved_per_selected", "moved_per_selected_cold"),
  *("random_moved_per_selected", "recall_bytes_per_step", "page_hit_ratio", "token_hit_ratio"),
)


def run(case: Case) -> list[Row]:
  """A row for each policy and store."""
  rows = []
  for spec in case.policies:
    followed = follow(case, spec)
    for store in case.stores:
      counts = drive(followed, store, case.page_size)
      rows.append(
        row_of(case, followed.runner, "io_amplification")
        | moves(counts, followed)
        | {
          "store": store,
          "selected_ratio": density(followed),
          "random_moved_per_selected": by_whole_pages(density(followed), case.page_size),
          "token_hit_ratio_by_step": _hits_by_step(counts),
        }
      )
  return rows


def density(followed: Followed) -> float:
  """Share of a list's tokens that is selected, over all steps, layers and KV heads."""
  steps, rows, heads, _ = followed.selected.shape
  there = followed.prompt_tokens + 1 + np.arange(steps)
  return float(followed.selected.sum() / (there.sum() * rows * heads))


def by_whole_pages(share: float, page_size: int) -> float:
  """Tokens that whole pages move for each selected one, if the share is strewn at random."""
  return (1 - (1 - share) ** page_size) / share


def _hits_by_step(counts: Counts) -> list[float]:
  resident, selected = counts["resident"].sum(axis=1), counts["selected"].sum(axis=1)
  return (resident / np.maximum(selected, 1)).tolist()


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Bars by store, and how the hits go on while a text grows."""
  bars, hits = {}, {}
  for row in rows:
    words, heights = bars.setdefault(row["policy"], ([], []))
    words.append(row["store"])
    heights.append(row["moved_per_selected"])
    series = row["token_hit_ratio_by_step"]
    if any(series):
      hits[f"{row['policy']} {row['store']}"] = (range(len(series)), series)
  panels = [Panel("store", "tokens moved for each selected one", bars, paper=4)]
  if hits:
    panels.append(Panel("step", "share of selected tokens on the device", hits))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper's amplification of whole pages, and its page hit ratio."""
  compared = []
  for row in rows:
    if row["store"] == "whole_page":
      compared.append(
        Comparison(
          "Fig. 2",
          f"tokens moved for each selected one by whole pages, {row['policy']}",
          "about 4 (InfiniGen)",
          f"{row['moved_per_selected']:.2f}",
          f"tokens strewn at random would give {row['random_moved_per_selected']:.2f} at the "
          f"{row['selected_ratio']:.1%} that are selected here (3.96 at 25 %); what is less comes "
          "of neighbours that are selected together",
        )
      )
    if row["store"] == "op_block":
      compared.append(
        Comparison(
          "sensitivity",
          f"OP blocks that serve again, {row['policy']}",
          "0.776 (InfiniGen, batch 8)",
          f"{row['page_hit_ratio']:.3f}",
          "another model and text, and one row; ours leaves the first step out",
        )
      )
  return compared


ITEM = Item(run, plot, compare, COLUMNS)
