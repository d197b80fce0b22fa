"""Figures 4 to 8: how long conversations are, how much they keep, and how far apart they are used.

    Fig 4   turns of a conversation, and minutes from its first to its last
    Fig 5   what the conversations that are under way keep, beside the memory there is for them
    Fig 6   weighted reuse distance, and how often a least-recently-used cache would hit
    Figs 7, 8  how unequal what has to be loaded is: standard deviation over mean, of bytes and time

Hits of the cache follow from the distance: it hits if that and the history fit (no free space is
kept, and none is lost to pinning). What has to be loaded is the history of every turn, none of a
first one, as the authors' script counts it; and what this cache would load from the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from eval.tables import human_bytes
from kvjax.sim import trace_statistics, transfer_s
from kvjax.sim.workloads import Workload
from scripts.reproduce_bidaw.case import Case, distances_of, label_of, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("trace", "users_per_minute", "conversations", "num_examples", "mean_turns", "median_turns"),
  *("p90_turns", "median_minutes", "mean_query_tokens", "mean_answer_tokens", "under_way_bytes"),
  *("median_reuse_bytes", "beyond_host_ratio", "lru_hit_ratio", "load_cv", "lru_load_cv"),
  "mean_disk_load_s",
)
_SHARES = np.arange(0, 101, 5)


def run(case: Case) -> list[Row]:
  """A row for each rate."""
  return [_row(case, workload) for workload in case.workloads]


def _row(case: Case, workload: Workload) -> Row:
  turns = trace_statistics.turns_by_user(workload)
  minutes = trace_statistics.durations_s(workload) / 60
  under_way = trace_statistics.under_way_tokens(workload, case.config.max_tokens) * case.token_bytes
  return (
    row_of(case, "trace", workload)
    | {
      "conversations": len(turns),
      "backwards": workload.backwards,
      "mean_turns": float(turns.mean()),
      "median_turns": float(np.median(turns)),
      "p90_turns": float(np.percentile(turns, 90)),
      "max_turns": int(turns.max()),
      "median_minutes": float(np.median(minutes)),
      "p90_minutes": float(np.percentile(minutes, 90)),
      "mean_query_tokens": float(workload.query_tokens.mean()),
      "mean_answer_tokens": float(workload.answer_tokens.mean()),
      "under_way_bytes": float(under_way.mean()),
      "most_under_way_bytes": float(under_way.max()),
      "turns_by_share": np.percentile(turns, _SHARES).tolist(),
      "minutes_by_share": np.percentile(minutes, _SHARES).tolist(),
    }
    | _reuse(case, workload)
  )


def _reuse(case: Case, workload: Workload) -> Row:
  """Distances, hits and loads; None where nobody comes back."""
  continues = workload.previous >= 0
  kept = np.minimum(workload.history_tokens, case.config.max_tokens) * case.token_bytes
  distances = distances_of(case, workload)
  missed = continues & ~(distances + kept <= case.host_bytes)
  loads = [transfer_s(case.machine, size, disk=True) for size in kept[missed].tolist()]
  known = distances[continues]
  return {
    "median_reuse_bytes": float(np.median(known)) if known.size else None,
    "reuse_by_share": np.percentile(known, _SHARES).tolist() if known.size else None,
    "beyond_host_ratio": float((known > case.host_bytes).mean()) if known.size else None,
    "lru_hit_ratio": float(1 - missed[continues].mean()) if known.size else None,
    "load_cv": _variation(kept),
    "lru_load_cv": _variation(np.where(missed, kept, 0)),
    "mean_disk_load_s": float(np.mean(loads)) if loads else None,
    "simulated": True,  # those seconds are
  }


def _variation(values: np.ndarray) -> float | None:
  """Standard deviation over mean."""
  return float(values.std() / values.mean()) if values.any() else None


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Distributions of turns, minutes and distances."""
  turns, minutes, reuse = {}, {}, {}
  shares = [int(share) for share in _SHARES]
  for row in rows:
    turns[label_of(row)] = row["turns_by_share"], shares
    minutes[label_of(row)] = row["minutes_by_share"], shares
    if row["reuse_by_share"] is not None:
      reuse[label_of(row)] = [value / 1e9 for value in row["reuse_by_share"]], shares
  panels = [
    Panel("turns of a conversation", "% of conversations", turns),
    Panel("minutes", "% of conversations", minutes),
  ]
  if reuse:
    panels.append(Panel("weighted reuse distance, GB", "% of turns that continue", reuse))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper's numbers beside those of the highest rate."""
  row = rows[-1]
  host, at = row["host_kv_bytes"], f"{label_of(row)}, {row['model']}"
  other = "another trace, or other users of it; the paper's own is public in part and not shipped"
  found = [
    Comparison(
      "Fig. 4",
      "turns of a conversation: mean, median, 90th percentile",
      "22.4, 18, 45",
      "{mean_turns:.1f}, {median_turns:g}, {p90_turns:.0f}".format(**row) + f" ({at})",
      other,
    ),
    Comparison(
      "Fig. 5",
      f"kept by the conversations under way, over {human_bytes(host)}",
      "3.91 (OPT-13B)",
      f"{row['under_way_bytes'] / host:.2f} on average, {row['most_under_way_bytes'] / host:.2f} "
      f"at most ({at})",
      "under way from the first turn to the last; the paper does not say when one ends",
    ),
  ]
  if row["lru_hit_ratio"] is not None:
    found += [
      Comparison(
        "Fig. 6",
        "reuse distances beyond host memory; hits of what was used least recently",
        "0.80 and about 0.20 at 30 users a minute (OPT-13B)",
        "{beyond_host_ratio:.2f} and {lru_hit_ratio:.2f}".format(**row) + f" ({at})",
        other,
      ),
      Comparison(
        "Figs. 7, 8",
        "standard deviation over mean of what is loaded",
        "over 0.90",
        f"{row['load_cv'] or 0:.2f} of all histories, {row['lru_load_cv'] or 0:.2f} with the hits "
        f"of that cache as nothing ({at})",
        "of bytes; times are in proportion, since the disk is one rate here. Histories are cut at "
        "the model's context, which makes them more alike",
      ),
    ]
  return found


ITEM = Item(run, plot, compare, COLUMNS)
