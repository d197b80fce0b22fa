"""Figures 13 and 18: how often each eviction policy misses, in all and by reuse distance.

Turns come one after another, without time (`kvjax.sim.replay`). Turns after the first half of the
workload count, of conversations that continue. Histories as keys and values, as every policy has
them, and as activations, which is what Bidaw stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from kvjax.bidaw.previous_answer import NUM_BUCKETS, bucket_edges
from kvjax.sim import costs
from kvjax.sim.replay import POLICIES, replay
from kvjax.sim.workloads import Workload
from scripts.reproduce_bidaw.case import Case, distances_of, label_of, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("trace", "users_per_minute", "kept", "eviction", "measured", "miss_ratio"),
  "over_queue_lru",
)


def run(case: Case) -> list[Row]:
  """A row for each rate, form and policy."""
  return [row for workload in case.workloads for row in _rows(case, workload)]


def _rows(case: Case, workload: Workload) -> Iterator[Row]:
  config, item_bytes = case.config, case.machine.item_bytes
  counts = (workload.previous >= 0) & (np.arange(len(workload)) >= len(workload) // 2)
  if not counts.any():
    raise ValueError(
      f"no turn of the second half of {workload.name} continues a conversation; "
      "expected a trace of conversations"
    )
  forms = {"keys and values": case.token_bytes}
  activations = costs.activation_bytes(config, 1, item_bytes)
  if activations < case.token_bytes:
    forms["activations"] = activations
  edges = bucket_edges(int(case.host_bytes))
  bucket = np.searchsorted(edges, distances_of(case, workload)[counts], side="right")
  queue = None
  for kept, token_bytes in forms.items():
    misses = {}
    for policy in POLICIES:
      hits = replay(workload, policy, int(case.host_bytes), token_bytes, config.max_tokens)
      misses[policy.name] = ~hits[counts]
    queue = misses["queue_lru"].mean() if queue is None else queue
    for name, missed in misses.items():
      known = np.maximum(np.bincount(bucket, minlength=NUM_BUCKETS), 1)
      yield row_of(
        case,
        "miss_rate",
        workload,
        kept=kept,
        eviction=name,
        measured=int(counts.sum()),
        miss_ratio=float(missed.mean()),
        over_queue_lru=float(missed.mean() / queue) if queue else 1.0,
        hit_by_bucket=(np.bincount(bucket, ~missed, NUM_BUCKETS) / known).tolist(),
      ) | {"simulated": True}


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Misses of each policy, and hits by distance, of the highest rate."""
  last = [row for row in rows if label_of(row) == label_of(rows[-1])]
  names = list(dict.fromkeys(row["eviction"] for row in last))
  bars = {
    kept: (names, [row["miss_ratio"] for row in last if row["kept"] == kept])
    for kept in dict.fromkeys(row["kept"] for row in last)
  }
  whole = [row for row in last if row["kept"] == "keys and values"]
  edges = [edge / 1e9 for edge in bucket_edges(int(whole[0]["host_kv_bytes"]))]
  lines = {row["eviction"]: ([0.0, *edges], row["hit_by_bucket"]) for row in whole}
  panels = [Panel("", "misses", bars), Panel("reuse distance from, GB", "hits", lines)]
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Previous-answer under the others, of each rate."""
  texts = []
  for label in dict.fromkeys(map(label_of, rows)):
    found = {(r["kept"], r["eviction"]): r["miss_ratio"] for r in rows if label_of(r) == label}
    whole = {name: miss for (kept, name), miss in found.items() if kept == "keys and values"}
    small = found.get(("activations", "previous_answer"))
    texts.append(
      f"{label}: {_under(whole, whole['previous_answer'])}; Belady {_under(whole, whole['belady'])}"
      + (f"; with activations {_under(whole, small)}" if small is not None else "")
    )
  return [
    Comparison(
      "Fig. 18",
      "misses of previous-answer under queue-enhanced LRU, and under LRU",
      "-57.6 % and -69.9 % at 25 users a minute",
      "; ".join(texts),
      "the paper does not say whether its number is of the policy alone or of Bidaw, whose "
      "histories are half as large; Belady's is what a policy alone could reach",
    )
  ]


def _under(misses: dict[str, float], mine: float) -> str:
  parts = [
    f"{100 * (mine / misses[name] - 1):.1f} %" if misses[name] else "no misses"
    for name in ("queue_lru", "lru")
  ]
  return " and ".join(parts)


ITEM = Item(run, plot, compare, COLUMNS)
