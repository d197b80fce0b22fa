"""Figure 20, measured: what Bidaw's decisions take on this machine, by number of conversations.

The cases are those of `scripts.bench_bidaw`: half of the conversations are in host memory, all of
them wait when the scheduler is asked, and Belady's policy is played over a window of accesses as
the ghost cache does; there at one go, in service in slices.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

from eval.results import Row, device_kind, make_row
from kvjax.bidaw import Eviction
from scripts.bench_bidaw import GHOST, TURNS, decisions, policies
from scripts.reproduce_bidaw.case import Case
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

POLICY = "previous_answer"
PAPERS = {
  "dual queue: next": "0.62",
  f"{POLICY}: eviction": "0.35",
  GHOST: "2.86, in the background",
}
COLUMNS = (
  *("conversations", "what", "calls", "median_us", "p99_us", "longest_us", "mean_us"),
  "memory_bytes",
)


def run(case: Case) -> list[Row]:
  """A row for each number of conversations and decision; only the ghost cache has its memory."""
  gc.freeze()  # a collection that looks at all that was imported takes 0.2 s
  return [
    make_row(policy="bidaw", device=device_kind(), task="bidaw_overheads", simulated=False)
    | {"conversations": conversations}
    | measured
    for conversations in case.conversations
    for measured in decisions(_bidaws(conversations), conversations, TURNS)
  ]


def _bidaws(conversations: int) -> dict[str, Eviction]:
  return {POLICY: policies(conversations)[POLICY]}


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Medians and 99th percentiles by number of conversations."""
  panels = []
  for field, words in (("median_us", "median"), ("p99_us", "99th percentile")):
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
      conversations, spent = lines.setdefault(row["what"], ([], []))
      conversations.append(row["conversations"])
      spent.append(row[field])
    panels.append(Panel("conversations", f"{words}, us", lines, log="xy"))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """With the most conversations."""
  most = rows[-1]["conversations"]
  found = {row["what"]: row for row in rows if row["conversations"] == most}
  return [
    Comparison(
      "Fig. 20",
      f"milliseconds of {what}",
      paper,
      "median {:.3g}, 99th percentile {:.3g}, longest {:.3g}".format(
        *(found[what][field] / 1000 for field in ("median_us", "p99_us", "longest_us"))
      )
      + f", with {most:,} conversations",
      "another machine, and Python; the paper does not say how many conversations there are, nor "
      "how long a window its ghost cache has",
    )
    for what, paper in PAPERS.items()
  ]


ITEM = Item(run, plot, compare, COLUMNS, timed=True)
