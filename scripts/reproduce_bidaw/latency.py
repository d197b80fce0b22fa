"""Figures 15 and 17: mean latency of a turn by the rate at which users arrive, of five systems.

Latency is from a question's arrival to the last token of its answer. A rate is sustained while the
mean is at most 5 s [ours; the paper does not say]. --trace=control is Figure 17.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_bidaw.case import Case
from scripts.reproduce_bidaw.serving import (
  SUSTAINED_S,
  at_rate,
  curve,
  every,
  sustained,
  tell,
)
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

SYSTEMS = ("recompute", "cached_attention", "flashgen", "bidaw", "ideal")
OTHERS = ("cached_attention", "flashgen")
COLUMNS = (
  *("trace", "users_per_minute", "system", "mean_latency_s", "p99_latency_s", "mean_ttft_s"),
  *("mean_queueing_s", "miss_ratio", "fairness", "ssd_read_bytes"),
  *("ssd_written_bytes", "ssd_rewriting_amplification"),
)


def run(case: Case) -> list[Row]:
  """A row for each rate and system."""
  return every(case, SYSTEMS, "latency", tell)


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Latency by rate; far beyond what is sustained it says nothing and is cut."""
  lines = {}
  for name in SYSTEMS:
    rates, seconds = curve(rows, name)
    lines[name] = (rates, [min(one, 4 * SUSTAINED_S) for one in seconds])
  draw([Panel("users a minute", "mean latency, s", lines)], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Against the better of CachedAttention and FlashGen, and against ideal."""
  mine, others, ideal = curve(rows, "bidaw"), [curve(rows, n) for n in OTHERS], curve(rows, "ideal")
  best = [min(pair) for pair in zip(*(seconds for _, seconds in others), strict=True)]
  ratios = [other / own for other, own in zip(best, mine[1], strict=True)]
  usable = [n for n, seconds in enumerate(mine[1]) if seconds <= SUSTAINED_S] or [0]
  most = max(usable, key=ratios.__getitem__)
  rates = [sustained(*one) for one in (*others, mine, ideal)]
  better = max(rate for rate, _ in rates[:2])
  at = 0.8 * rates[3][0]
  return [
    Comparison(
      "Fig. 15",
      "mean latency of the better of CachedAttention and FlashGen over Bidaw's, at most",
      "up to 3.58; 1.40 without think time (Fig. 17)",
      f"{ratios[most]:.2f}, at {mine[0][most]:.3g} users a minute",
      "beyond a rate that is sustained queues grow as long as the run, so the ratio depends on it; "
      "rates up to that of Bidaw count",
    ),
    Comparison(
      "Fig. 15",
      f"users a minute with a mean of {SUSTAINED_S:g} s or less: Bidaw over the better",
      "1.43 to 1.83",
      f"{rates[2][0] / better:.2f} (CachedAttention {rates[0][1]}, FlashGen {rates[1][1]}, "
      f"Bidaw {rates[2][1]}, ideal {rates[3][1]})",
      "the paper does not say when a rate is sustained",
    ),
    Comparison(
      "Fig. 15",
      "Bidaw's mean latency over ideal's, at 0.8 of the rate that ideal sustains",
      "close",
      f"{at_rate(*mine, at) / at_rate(*ideal, at):.2f}, at {at:.3g} users a minute",
      "between two rates, latency is taken as exponential",
    ),
  ]


ITEM = Item(run, plot, compare, COLUMNS)
