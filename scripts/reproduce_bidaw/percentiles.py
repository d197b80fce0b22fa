"""Figure 22: percentiles of latency, of Bidaw, of what it is compared with, and of ideal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_bidaw.case import Case
from scripts.reproduce_bidaw.serving import PERCENTILES, at_highest_rate, at_rates, every
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

SYSTEMS = ("cached_attention", "flashgen", "bidaw", "ideal")
FIELDS = tuple(f"p{at}_latency_s" for at in PERCENTILES)
COLUMNS = ("trace", "users_per_minute", "system", "mean_latency_s", *FIELDS)


def run(case: Case) -> list[Row]:
  """A row for each rate and system."""
  return every(at_rates(case), SYSTEMS, "percentiles")


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Bars of the highest rate, upwards in logarithms."""
  words = [f"p{at}" for at in PERCENTILES]
  bars = {
    name: (words, [row[field] for field in FIELDS]) for name, row in at_highest_rate(rows).items()
  }
  draw([Panel("", "latency, s", bars, log="y")], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Bidaw under each of the two, at the highest rate."""
  found = at_highest_rate(rows)
  papers = {
    "cached_attention": "-52.96, -49.30, -47.03 % (OPT-30B)",
    "flashgen": "-66.63, -62.64, -56.81 % (OPT-30B)",
  }
  return [
    Comparison(
      "Fig. 22",
      f"90th, 95th and 99th percentile of latency: Bidaw under {other}",
      paper,
      _under(found, other),
      "the paper does not say at which rate; beyond the rate that a system sustains its latency "
      "grows with the length of the run",
    )
    for other, paper in papers.items()
  ]


def _under(found: dict[str, Row], other: str) -> str:
  if not {"bidaw", other} <= found.keys():
    return "not run: beyond what it serves"
  mine, others = found["bidaw"], found[other]
  parts = [f"{100 * (mine[field] / others[field] - 1):.1f}" for field in FIELDS[1:]]
  return f"{', '.join(parts)} % at {mine['users_per_minute'] or 0:.3g} users a minute"


ITEM = Item(run, plot, compare, COLUMNS)
