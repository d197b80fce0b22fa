"""Figure 16: mean latency by how much host memory there is for histories.

From 0.6 of --host_gb up to all of it, which is the paper's 120 to 200 GB. Ideal needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_bidaw import varied
from scripts.reproduce_bidaw.case import Case
from scripts.reproducing import Comparison, Item

PARTS = (1.0, 0.9, 0.8, 0.7, 0.6)
COLUMNS = (
  *("trace", "users_per_minute", "host_kv_bytes", "system", "mean_latency_s", "p99_latency_s"),
  *("mean_queueing_s", "miss_ratio", "ssd_read_bytes"),
)


def run(case: Case) -> list[Row]:
  """A row for each rate, memory and system."""
  cases = [case._replace(host_bytes=part * case.host_bytes) for part in PARTS]
  return varied.run(cases, "host_memory")


def _by_gb(rows: Sequence[Row]) -> dict[float, list[Row]]:
  by = varied.by_value(rows, "host_kv_bytes")
  return {num_bytes / 1e9: of_it for num_bytes, of_it in by.items()}


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Mean latency by memory."""
  varied.plot(_by_gb(rows), "host memory for histories, GB", title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper has sustained rates; with one rate ours says only on which side of them it is."""
  by = _by_gb(rows)
  rate = rows[-1]["users_per_minute"] or 0
  return [
    Comparison(
      "Fig. 16",
      f"mean latency of CachedAttention, FlashGen and Bidaw at {rate:.3g} users a minute",
      "not given",
      varied.means(by, "GB"),
      "the paper's figure is of sustained rates",
    ),
    Comparison(
      "Fig. 16",
      "users a minute that CachedAttention, FlashGen and Bidaw sustain (over the better)",
      "Bidaw 1.75 to 2.19 times the better, with 120 to 200 GB",
      varied.rates(by, "GB"),
      "give several --users_per_minute to find rates; the paper does not say when one is sustained",
    ),
  ]


ITEM = Item(run, plot, compare, COLUMNS)
