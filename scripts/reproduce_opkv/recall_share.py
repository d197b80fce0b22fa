"""Figure 4b: the part of a decode step that is recall, by batch size.

Ours: 1 - t_resident / t_store, where both policies are the same, both times are medians, and the
first has everything on the device. What recall hides behind other work is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_opkv.case import Case
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproduce_opkv.timing import policies, time_stores
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("policy", "store", "batch_size", "tpot_s_p50", "recall_stall_s_p50", "recall_stall_s_p99"),
  *("recall_share_ratio", "recall_bytes_per_step"),
)
STORES = ("whole_page", "op_block")


def run(case: Case) -> Iterator[Row]:
  """A row for each batch size, policy and store, and for dense."""
  for batch_size in case.batch_sizes:
    timed = time_stores(case, "recall_share", batch_size, STORES)
    resident = {row["policy"]: row for row in timed if row["store"] == "resident"}
    for row in timed:
      yield row | {"recall_share_ratio": _share(row, resident[row["policy"]])}


def _share(row: Row, resident: Row) -> float | None:
  if row["store"] == "resident":
    return None
  return 1 - resident["tpot_s_p50"] / row["tpot_s_p50"]


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """The share and the seconds by batch size."""
  shares, stalls = {}, {}
  for row in rows:
    if row["recall_share_ratio"] is None:
      continue
    for lines, value in (
      (shares, row["recall_share_ratio"]),
      (stalls, 1e3 * row["recall_stall_s_p50"]),
    ):
      xs, ys = lines.setdefault(f"{row['policy']} {row['store']}", ([], []))
      xs.append(row["batch_size"])
      ys.append(value)
  panels = [Panel("batch size", "share of a step that is recall", shares)]
  draw([*panels, Panel("batch size", "recall, ms of a step", stalls)], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """How the share of whole pages goes with the batch."""
  compared = []
  for policy in policies(rows):
    shares = [
      f"{row['recall_share_ratio']:.0%} at batch {row['batch_size']}"
      for row in rows
      if (row["policy"], row["store"]) == (policy, "whole_page")
    ]
    compared.append(
      Comparison(
        "Fig. 4b",
        f"share of a step in which whole pages are recalled, {policy}",
        "grows linearly with the batch (InfiniGen, one L40; a curve without numbers)",
        ", ".join(shares),
        "on a CPU host and device memory are the same, and a copy is far cheaper beside the rest "
        "of a step than over PCIe",
      )
    )
  return compared


ITEM = Item(run, plot, compare, COLUMNS, timed=True)
