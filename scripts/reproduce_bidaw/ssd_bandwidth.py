"""Mean latency by how fast the SSD is: from the machine's own rate to 10/3 of it.

For the paper's 1.5 GB/s these are 1.5 to 5 GB/s. FlashGen reads the more of a history the faster
the disk is, and computes the less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_bidaw import varied
from scripts.reproduce_bidaw.case import Case
from scripts.reproducing import Comparison, Item

FACTORS = (10 / 3, 7 / 3, 5 / 3, 1.0)
COLUMNS = (
  *("trace", "users_per_minute", "ssd_gb_per_second", "system", "mean_latency_s"),
  *("p99_latency_s", "mean_queueing_s", "miss_ratio", "ssd_read_bytes"),
)


def run(case: Case) -> list[Row]:
  """A row for each rate, disk and system."""
  rates = [factor * case.machine.disk_bytes_per_s for factor in FACTORS]
  cases = [case._replace(machine=case.machine._replace(disk_bytes_per_s=rate)) for rate in rates]
  return varied.run(cases, "ssd_bandwidth")


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Mean latency by the disk's rate."""
  varied.plot(varied.by_value(rows, "ssd_gb_per_second"), "SSD, GB/s", title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper has sustained rates; with one rate ours says only on which side of them it is."""
  by = varied.by_value(rows, "ssd_gb_per_second")
  rate = rows[-1]["users_per_minute"] or 0
  return [
    Comparison(
      "text",
      f"mean latency of CachedAttention, FlashGen and Bidaw at {rate:.3g} users a minute",
      "not given",
      varied.means(by, "GB/s"),
      "the paper's numbers are of sustained rates",
    ),
    Comparison(
      "text",
      "users a minute that CachedAttention, FlashGen and Bidaw sustain (over the better)",
      "FlashGen 15.18 and Bidaw 27.81 with 1.5 GB/s; 20.23 and 30.35 with 5 GB/s",
      varied.rates(by, "GB/s"),
      "give several --users_per_minute to find rates; the paper does not say when one is "
      "sustained, and delays copies in host memory instead of reading an SSD",
    ),
  ]


ITEM = Item(run, plot, compare, COLUMNS)
