"""The eviction figure: FIFO, LRU and S3-FIFO where the pool of OP blocks is small.

The paper varies the budget of the device; ours is `slack`, OP blocks of the pool over those that
the policy's budget fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_opkv.case import Case, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproduce_opkv.driving import drive, moves
from scripts.reproduce_opkv.following import follow
from scripts.reproducing import Comparison, Item

EVICTIONS = ("fifo", "lru", "s3fifo")
SLACKS = (1.0, 1.1, 1.2, 1.5)
COLUMNS = (
  *("policy", "eviction", "slack", "moved_per_selected", "page_hit_ratio", "token_hit_ratio"),
  "recall_bytes_per_step",
)


def run(case: Case) -> list[Row]:
  """A row for each policy, eviction and slack."""
  rows = []
  for spec in case.policies:
    followed = follow(case, spec)
    for eviction in EVICTIONS:
      for slack in SLACKS:
        store = f"op_block:eviction={eviction}:slack={slack}"
        rows.append(
          row_of(case, followed.runner, "eviction")
          | moves(drive(followed, store, case.page_size), followed)
          | {"store": store, "eviction": eviction, "slack": slack}
        )
  return rows


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """What is moved and hit, by slack."""
  panels = []
  for field, name in (
    ("moved_per_selected", "tokens moved for each selected one"),
    ("page_hit_ratio", "page hit ratio"),
  ):
    lines = {}
    for row in rows:
      xs, ys = lines.setdefault(f"{row['policy']} {row['eviction']}", ([], []))
      xs.append(row["slack"])
      ys.append(row[field])
    panels.append(Panel("slack of the pool", name, lines))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The three where the pool is smallest."""
  compared = []
  for policy in dict.fromkeys(row["policy"] for row in rows):
    ours = ", ".join(
      f"{row['eviction']} {row['page_hit_ratio']:.3f}"
      for row in rows
      if (row["policy"], row["slack"]) == (policy, SLACKS[0])
    )
    compared.append(
      Comparison(
        "eviction",
        f"S3-FIFO against LRU and FIFO; ours: page hit ratio at slack {SLACKS[0]}, {policy}",
        "S3-FIFO best (OmniKV at 17 % of the budget: 1.34 times whole pages), LRU poor",
        ours,
        "one row of a batch and one text, so that no blocks of other requests compete; where they "
        "hardly differ, a pool holds all that is hit",
      )
    )
  return compared


ITEM = Item(run, plot, compare, COLUMNS)
