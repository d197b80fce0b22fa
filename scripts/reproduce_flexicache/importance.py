"""What a list misses that is not made again, and when pages left out at first begin to matter.

Appendix A.2 of the paper is known to us by its caption only: the later importance of pages that are
unimportant early, by length, with a positive correlation. Ours: the attention on pages that were
not among the K of the first step, by the steps since; and its correlation with them. Beside it what
a stale list costs a head: the attention on a fresh list less that on the one made so many steps
ago, pages born since included in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from scripts.page_traces import Trace
from scripts.reproduce_flexicache.case import Case, groups_of, mean_of, row_of, unstable_mask
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

DISTANCES = (1, 2, 4, 8, 15, 31, 63)
SHOWN = (1, 4, 15)
COLUMNS = (
  *("budget_tokens", "heads", "num_heads", "fresh_mass_ratio"),
  *(f"stale_{steps}_loss_ratio" for steps in SHOWN),
  *("early_unimportant_mass_ratio", "late_unimportant_mass_ratio", "length_correlation"),
)


def run(case: Case) -> list[Row]:
  """A row for each budget and kind of heads: the mean over texts."""
  steps = min(len(trace.mass) for trace in case.traces)
  distances = [distance for distance in DISTANCES if distance < steps]
  rows = []
  for pages in case.budgets:
    fresh = np.mean([on_list(trace, pages).mean(axis=0) for trace in case.traces], axis=0)
    lost = np.mean([losses(trace, pages, distances) for trace in case.traces], axis=0)
    left_out = np.mean([unimportant(trace, pages)[:steps] for trace in case.traces], axis=0)
    for kind, mask in (*groups_of(case, pages), ("all", np.ones_like(unstable_mask(case, pages)))):
      later = left_out[1:, mask].mean(axis=1)
      loss = dict(zip(distances, lost[:, mask].mean(axis=1).tolist(), strict=True))
      third = max(1, len(later) // 3)
      rows.append(
        row_of(case, "importance", pages, heads=kind, num_heads=int(mask.sum()))
        | {"fresh_mass_ratio": float(fresh[mask].mean()), "loss_by_distance": [*loss.items()]}
        | {f"stale_{one}_loss_ratio": loss.get(one) for one in SHOWN}
        | {
          "unimportant_mass_by_step": later.tolist(),
          "early_unimportant_mass_ratio": float(later[:third].mean()),
          "late_unimportant_mass_ratio": float(later[-third:].mean()),
          "length_correlation": _correlation(later),
        }
      )
  return rows


def on_list(trace: Trace, pages: int) -> np.ndarray:
  """f64[S, L, K]: attention on what each head chooses at the same step."""
  return _on(trace.mass, trace.chosen[pages])


def losses(trace: Trace, pages: int, distances: Sequence[int]) -> np.ndarray:
  """f64[D, L, K]: by how much less attention falls on a list of so many steps ago than on a fresh
  one; on both with the pages born since the older one was made."""
  chosen, mass = trace.chosen[pages], trace.mass
  place = np.arange(chosen.shape[-1])
  found = []
  for distance in distances:
    born = place >= trace.pages[:-distance, None, None, None]
    now = mass[distance:]
    loss = _on(now, chosen[distance:] | born) - _on(now, chosen[:-distance] | born)
    found.append(loss.mean(axis=0))
  return np.stack(found)


def unimportant(trace: Trace, pages: int) -> np.ndarray:
  """f64[S, L, K]: attention on pages of the prompt that were not on the first list."""
  known = np.arange(trace.mass.shape[-1]) < trace.pages[0]
  return _on(trace.mass, ~trace.chosen[pages][:1] & known)


def _on(mass: np.ndarray, pages: np.ndarray) -> np.ndarray:
  return np.where(pages, mass, 0).sum(axis=-1, dtype=np.float64)


def _correlation(values: np.ndarray) -> float | None:
  """Pearson's, with the step; None where nothing varies."""
  if len(values) < 3 or np.ptp(values) == 0:
    return None
  return float(np.corrcoef(np.arange(len(values)), values)[0, 1])


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Loss by age of the list, and attention on pages that were left out at first."""
  loss, late = {}, {}
  for row in rows:
    label = f"{row['heads']} heads, {row['budget_tokens']:,} tokens"
    distances, values = zip(*row["loss_by_distance"], strict=True)
    loss[label] = distances, values
    values = row["unimportant_mass_by_step"]
    late[label] = range(1, len(values) + 1), values
  panels = [Panel("age of the list, steps", "attention that a stale list loses", loss)]
  panels.append(Panel("steps since the first list", "attention on pages not on it", late))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The correlation with length, and the loss of a list of 15 steps ago."""
  budgets = list(dict.fromkeys(row["budget_tokens"] for row in rows))
  correlations, lost = [], []
  for budget in budgets:
    one = mean_of(rows, "length_correlation", budget_tokens=budget, heads="all")
    correlations.append(f"{one:+.2f} at {budget:,} tokens" if one is not None else "-")
    by_kind = {
      kind: mean_of(rows, "stale_15_loss_ratio", budget_tokens=budget, heads=kind)
      for kind in ("stable", "unstable")
    }
    said = [f"{value:.3f} ({kind})" for kind, value in by_kind.items() if value is not None]
    lost.append(f"{', '.join(said)} at {budget:,} tokens")
  return [
    Comparison(
      "A.2",
      "correlation of length with the attention on pages that were unimportant at first",
      "positive (L-Eval; no number is known to us, nor the exact definition)",
      "; ".join(correlations),
      "our own definition, over a few dozen steps",
    ),
    Comparison(
      "-",
      "attention that a list of 15 steps ago loses",
      "not in the paper",
      "; ".join(lost),
      "beside the paper",
    ),
  ]


ITEM = Item(run, plot, compare, COLUMNS)
