"""Figure 21, and more: Bidaw's parts one after another, and Bidaw without each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_bidaw.case import Case
from scripts.reproduce_bidaw.serving import at_rates, curve, every, limit_s, sustained
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

STEPS = ("in_order", "dual_queue", "without_tensor", "bidaw")
WITHOUT = ("without_dual_queue", "without_previous_answer")
COLUMNS = (
  *("trace", "users_per_minute", "system", "mean_latency_s", "p99_latency_s", "mean_queueing_s"),
  "miss_ratio",
)


def run(case: Case) -> list[Row]:
  """A row for each rate and system."""
  return every(at_rates(case), (*STEPS, *WITHOUT), "ablation")


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Latency by rate."""
  lines = {name: curve(rows, name) for name in (*STEPS, *WITHOUT)}
  draw([Panel("users a minute", "mean latency, s", lines, log="y")], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """What each part adds to the rate that is sustained."""
  limit = limit_s(rows[0]["trace"])
  rates = {name: sustained(*curve(rows, name), limit) for name in (*STEPS, *WITHOUT)}
  steps = [rates[b][0] / rates[a][0] for a, b in itertools.pairwise(STEPS)]
  return [
    Comparison(
      "Fig. 21",
      f"users a minute with a mean of {limit:.3g} s or less: dual queue, then previous answer, "
      "then activations, each over what is before it",
      "1.58, 1.25, 1.10 (OPT-30B)",
      ", ".join(f"{step:.2f}" for step in steps)
      + f" ({', '.join(f'{name} {text}' for name, (_, text) in rates.items())})",
      "the paper's order of the parts is not certain; a rate is sustained by our definition",
    )
  ]


ITEM = Item(run, plot, compare, COLUMNS)
