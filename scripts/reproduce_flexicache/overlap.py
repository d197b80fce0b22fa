"""Table 1: how far the unstable heads of one text are those of another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from kvjax.profiling import head_stability
from scripts.reproduce_flexicache.case import Case, mean_of, row_of, scores_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("budget_tokens", "text", "other_text", "overlap_ratio", "overlap_chance_ratio", "z_score"),
  *("jaccard_ratio", "jaccard_chance_ratio", "held_out_recall_ratio"),
)
WINDOWS = "windows of the same"


def run(case: Case) -> list[Row]:
  """A row for each pair of texts, and one for the windows of each text among themselves.

  Raises:
    ValueError: one text, or a fraction by which no head or every head is unstable.
  """
  if len(case.texts) < 2 or not 0 < case.num_unstable < case.num_heads:
    raise ValueError(
      f"{len(case.texts)} texts with {case.num_unstable} of {case.num_heads} heads unstable have "
      "no overlap to measure; give --text_files two or more, and --fraction between 0 and 1"
    )
  rows = []
  for pages in case.budgets:
    scores = {text: scores_of(case, pages, text) for text in case.texts}
    sets = {
      text: head_stability.unstable_heads(one, case.num_unstable).tolist()
      for text, one in scores.items()
    }
    for text, other in itertools.combinations(case.texts, 2):
      rows.append(_row(case, pages, text, other, [sets[text], sets[other]], None))
    for text, one in scores.items():
      windows = head_stability.most_unstable(one, case.num_unstable)
      if len(windows) > 1:
        recall = head_stability.held_out_recall(windows, case.num_heads)
        rows.append(_row(case, pages, text, WINDOWS, windows.tolist(), recall))
  return rows


def _row(case: Case, pages: int, text: str, other: str, sets, recall: float | None) -> Row:
  found = head_stability.consistency(sets, case.num_heads)
  return row_of(
    case,
    "overlap",
    pages,
    text=text,
    other_text=other,
    overlap_ratio=found.overlap,
    overlap_chance_ratio=found.overlap_chance,
    z_score=found.z_score,
    jaccard_ratio=found.jaccard,
    jaccard_chance_ratio=found.jaccard_chance,
    held_out_recall_ratio=recall,
  )


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Bars by pair, for each budget; chance beside them."""
  between = [row for row in rows if row["other_text"] != WINDOWS]
  budgets = list(dict.fromkeys(row["budget_tokens"] for row in between))
  bars = {
    f"{budget:,} tokens": (
      [f"{row['text']} and {row['other_text']}" for row in between if _of(row, budget)],
      [row["overlap_ratio"] for row in between if _of(row, budget)],
    )
    for budget in budgets
  }
  first = [row for row in between if _of(row, budgets[0])]
  words = bars[f"{budgets[0]:,} tokens"][0]
  bars["by chance"] = words, [row["overlap_chance_ratio"] for row in first]
  draw([Panel("", "shared unstable heads", bars, paper=0.83)], title, path)


def _of(row: Row, budget: int) -> bool:
  return row["budget_tokens"] == budget


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The mean over pairs of texts."""
  ours = []
  for budget in dict.fromkeys(row["budget_tokens"] for row in rows):
    between = [row for row in rows if _of(row, budget) and row["other_text"] != WINDOWS]
    share, chance = (mean_of(between, f"overlap{name}_ratio") for name in ("", "_chance"))
    ours.append(f"{share:.2f} at {budget:,} tokens, chance {chance:.2f}")
  return [
    Comparison(
      "Table 1",
      "unstable heads that two texts share, mean over pairs",
      "0.83 (Llama-3.1-8B), 0.76 to 0.81 (three others), over LongBench and L-Eval; chance 0.25",
      "; ".join(ours),
      "another model with fewer heads, and a few windows of each text where the paper has whole "
      "data sets: with few windows a text's set is noise in part",
    )
  ]


ITEM = Item(run, plot, compare, COLUMNS)
