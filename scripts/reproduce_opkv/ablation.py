"""The ablation: OPKV without one of its parts, by what it moves and reads.

The paper has losses of throughput at batch 8, for which `--item=throughput` takes the same stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_opkv.case import Case, row_of
from scripts.reproduce_opkv.drawing import bar_panels, draw
from scripts.reproduce_opkv.driving import drive, moves
from scripts.reproduce_opkv.following import follow
from scripts.reproducing import Comparison, Item

VARIANTS = {  # store -> what it is, and the paper's loss of throughput (InfiniGen / OmniKV)
  "op_block": ("OPKV", "-"),
  "op_block:recheck=False": ("OPKV, hits by the literal rule", "not in the paper"),
  "op_block:filling=by_page": ("no aggregation", "-33.06 % / -23.51 %"),
  "op_block:reuse=False": ("no hot reuse", "-14.25 % / -12.02 %"),
  "prefetch_all": ("full prefetch", "-19.66 % / -20.16 %"),
  "whole_page": ("whole pages", "-"),
  "op_block:filling=refill": ("refill, ours", "not in the paper"),
}
COLUMNS = (
  *("policy", "variant", "store", "moved_per_selected", "moved_ratio", "blocks_per_step"),
  *("page_hit_ratio", "token_hit_ratio", "recall_bytes_per_step"),
)


def run(case: Case) -> list[Row]:
  """A row for each policy and variant; `moved_ratio` is what it moves over what OPKV moves."""
  rows = []
  for spec in case.policies:
    followed = follow(case, spec)
    moved = {store: moves(drive(followed, store, case.page_size), followed) for store in VARIANTS}
    most = moved["op_block"]["moved_per_selected"]
    for store, (variant, _) in VARIANTS.items():
      ratio = moved[store]["moved_per_selected"] / most if most else None
      rows.append(
        row_of(case, followed.runner, "ablation")
        | moved[store]
        | {"store": store, "variant": variant, "moved_ratio": ratio}
      )
  return rows


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Bars by variant."""
  fields = {
    "moved_per_selected": "tokens moved for each selected one",
    "blocks_per_step": "blocks or pages that a list reads in a step",
  }
  draw(bar_panels(rows, "variant", fields), title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The three parts that the paper takes away."""
  return [
    Comparison(
      "ablation",
      f"{row['variant']}, {row['policy']}",
      f"{VARIANTS[row['store']][1]} throughput (InfiniGen / OmniKV, batch 8)",
      f"{row['moved_ratio']:.2f} times the tokens, {row['blocks_per_step']:.0f} blocks a list",
      "tokens and blocks, not throughput: what they cost depends on the machine",
    )
    for row in rows
    if row["variant"] in _TAKEN and row["moved_ratio"] is not None
  ]


_TAKEN = ("no aggregation", "no hot reuse", "full prefetch")
ITEM = Item(run, plot, compare, COLUMNS)
