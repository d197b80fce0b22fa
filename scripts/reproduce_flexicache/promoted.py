"""Share of a head's pages that each re-ranking brings from the host.

A stable head is ranked at steps 1, P, 2P, ... of period P. What its new list has and the old one
had not is promoted, but for pages born since, which are on the device anyway. Unstable heads, which
the method ranks at every step, are beside them as if they were stable.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from scripts.page_traces import Trace
from scripts.reproduce_flexicache.case import Case, groups_of, mean_of, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("budget_tokens", "text", "heads", "num_heads", "period", "reranks", "promoted_ratio"),
  "promoted_bytes",
)
_F32 = 4
PAPER_BUDGET = 2048  # at which the paper has 0.23 to 0.35


def run(case: Case) -> list[Row]:
  """A row for each text and kind of heads.

  Raises:
    ValueError: no text has so many steps that a list is made again.
  """
  rows = []
  for pages in case.budgets:
    shares: dict[str, list[np.ndarray]] = {}
    for trace in case.traces:
      shares.setdefault(trace.name, []).append(promoted(trace, pages, case.period))
    for text, of_text in shares.items():
      every = np.concatenate(of_text)
      if not len(every):
        raise ValueError(
          f"a period of {case.period} steps ranks nothing twice; raise --output_tokens to at least "
          "that, or lower --period"
        )
      for kind, mask in groups_of(case, pages):
        share, heads = float(every[:, mask].mean()), int(mask.sum())
        page_bytes = 2 * case.page_size * case.config.head_dim * _F32
        rows.append(
          row_of(
            case,
            "promoted",
            pages,
            text=text,
            heads=kind,
            num_heads=heads,
            period=case.period,
            reranks=len(every),
            promoted_ratio=share,
            promoted_bytes=share * pages * heads * page_bytes,
          )
        )
  return rows


def promoted(trace: Trace, pages: int, period: int) -> np.ndarray:
  """f64[rankings after the first, L, K]: pages promoted, of K."""
  chosen = trace.chosen[pages]
  ranked = [0, *range(period - 1, len(chosen), period)] if period > 1 else [*range(len(chosen))]
  shares = []
  for old, new in itertools.pairwise(ranked):
    known = np.arange(chosen.shape[-1]) < trace.pages[old]
    shares.append((chosen[new] & ~chosen[old] & known).sum(axis=-1) / pages)
  return np.array(shares).reshape(-1, *chosen.shape[1:3])


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Bars by text, a panel for each budget; dotted is the middle of the paper's range."""
  panels = []
  for budget in dict.fromkeys(row["budget_tokens"] for row in rows):
    bars: dict[str, tuple[list[str], list[float]]] = {}
    for row in rows:
      if row["budget_tokens"] == budget:
        words, heights = bars.setdefault(f"{row['heads']} heads", ([], []))
        words.append(row["text"])
        heights.append(row["promoted_ratio"])
    paper = 0.29 if budget == PAPER_BUDGET else None
    panels.append(Panel("", f"promoted share of {budget:,} tokens", bars, paper))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Stable heads, by budget."""
  stable = [row for row in rows if row["heads"] == "stable"]
  ours = [
    f"{mean_of(stable, 'promoted_ratio', budget_tokens=budget):.2f} at {budget:,} tokens"
    for budget in dict.fromkeys(row["budget_tokens"] for row in stable)
  ]
  return [
    Comparison(
      "text",
      "promoted share of the stable heads' pages at a re-ranking",
      "0.23 to 0.35, 44 to 67 MB of 192 MB at 2,048 tokens",
      "; ".join(ours),
      "another model and shorter contexts; lists of a given text, decoded densely",
    )
  ]


ITEM = Item(run, plot, compare, COLUMNS)
