"""Figure 19: how long turns wait before they are started, in one queue and in two.

Each system with the dual queue stands beside the one that differs from it by having a single queue
in order of arrival: with keys and values and the least recently used, and as Bidaw otherwise is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_bidaw.case import Case
from scripts.reproduce_bidaw.serving import SHARES, at_highest_rate, at_rates, every
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

PAIRS = {"in_order": "dual_queue", "without_dual_queue": "bidaw"}
SYSTEMS = (
  *("cached_attention", "flashgen", "in_order", "dual_queue", "without_dual_queue", "bidaw"),
  "ideal",
)
COLUMNS = (
  *("trace", "users_per_minute", "system", "mean_queueing_s", "p50_queueing_s", "p90_queueing_s"),
  *("mean_latency_s", "queueing_ratio"),
)
_LEAST_S = 1e-3  # shorter waits are drawn as this one, since the axis is logarithmic


def run(case: Case) -> list[Row]:
  """A row for each rate and system; `queueing_ratio` is the share of latency."""
  return every(at_rates(case), SYSTEMS, "queueing")


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Shares of the turns that wait so long or less, at the highest rate."""
  lines = {
    name: ([max(wait, _LEAST_S) for wait in row["queueing_by_share"]], SHARES)
    for name, row in at_highest_rate(rows).items()
  }
  x = f"s from arrival to start ({_LEAST_S:g} or less at the left end)"
  draw([Panel(x, "% of turns", lines, log="x")], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Means of both pairs at the highest rate, and which share of latency they are."""
  found = at_highest_rate(rows)
  waits = [
    " and ".join(_wait(found.get(name), name) for name in (dual, single))
    for single, dual in PAIRS.items()
  ]
  shares = [f"{name} {row['queueing_ratio']:.2f}" for name, row in found.items()]
  rate = next(iter(found.values()))["users_per_minute"] or 0
  return [
    Comparison(
      "Fig. 19",
      "mean seconds of queueing, with two queues and with one in order of arrival",
      "2.45 and 5.76",
      f"{'; '.join(waits)}, at {rate:.3g} users a minute",
      "the paper does not say at which rate, nor what else the two systems have; beyond the rate "
      "that one queue sustains its wait grows with the length of the run",
    ),
    Comparison(
      "Fig. 19",
      "share of the mean latency that is queueing",
      "not given",
      ", ".join(shares),
      "ideal's queueing is that for room on the device, and for the step that is under way",
    ),
  ]


def _wait(row: Row | None, name: str) -> str:
  return f"{name} " + ("not run" if row is None else f"{row['mean_queueing_s']:.2f}")


ITEM = Item(run, plot, compare, COLUMNS)
