"""The throughput figures: decode tokens/s by batch size, and what the paper leaves out of them.

That is dense at the same batch, how often the next token stays dense's, and percentiles of the time
that recall adds to a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_opkv.case import Case
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproduce_opkv.timing import batches, of_store, policies, time_stores
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("policy", "store", "batch_size", "tpot_s_p50", "tpot_s_p99", "decode_tokens_per_s"),
  *("speedup_vs_dense", "agreement_ratio", "recall_stall_s_p50", "recall_stall_s_p99"),
  *("recall_bytes_per_step", "page_hit_ratio", "device_kv_bytes"),
)
PAPER = {
  "infinigen": "1.37 to 1.77 at batch 2 to 10 (OPT-6.7B, LLaMA-8B; 1.77 at batch 2)",
  "omnikv": "1.33 to 1.56 at batch 2 to 10 (LLaMA-8B, Yi-9B; LLaMA-8B 1.36 to 1.56)",
}


def run(case: Case) -> Iterator[Row]:
  """A row for each batch size, policy and store, and for dense."""
  for batch_size in case.batch_sizes:
    yield from time_stores(case, "throughput", batch_size, case.stores)


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Speed by batch size, and over that of whole pages."""
  speeds, gains = {}, {}
  for row in rows:
    name = f"{row['policy']} {row['store']}"
    pairs = [(speeds, row["decode_tokens_per_s"])]
    whole = of_store(rows, row["policy"], row["batch_size"], "whole_page")
    if whole is not None and whole is not row:
      pairs.append((gains, whole["tpot_s_p50"] / row["tpot_s_p50"]))
    for lines, value in pairs:
      xs, ys = lines.setdefault(name, ([], []))
      xs.append(row["batch_size"])
      ys.append(value)
  panels = [Panel("batch size", "decode speed, tokens/s", speeds)]
  if gains:
    panels.append(Panel("batch size", "speed over that of whole pages", gains))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """OP blocks over whole pages."""
  compared = []
  for policy in policies(rows):
    gains = []
    for batch_size in batches(rows, policy):
      whole = of_store(rows, policy, batch_size, "whole_page")
      blocks = of_store(rows, policy, batch_size, "op_block")
      if whole and blocks:
        gains.append(f"{whole['tpot_s_p50'] / blocks['tpot_s_p50']:.2f} at {batch_size}")
    if gains:
      compared.append(
        Comparison(
          "throughput",
          f"decode speed of OP blocks over whole pages, {policy}",
          PAPER.get(policy.partition(":")[0], "not in the paper"),
          ", ".join(gains),
          "another device and model: on a CPU a recall is a copy within one memory, not over PCIe; "
          "ours plans inside the jitted step, theirs in Python",
        )
      )
  return compared


ITEM = Item(run, plot, compare, COLUMNS, timed=True)
