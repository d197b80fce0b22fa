"""Figure 4a: how many tokens of a page are selected, of the pages with at least one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from scripts.reproduce_opkv.case import Case, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproduce_opkv.following import Followed, follow
from scripts.reproduce_opkv.io_amplification import density
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("policy", "selected_ratio", "touched_ratio", "selected_per_touched_page"),
  *("random_selected_per_touched_page", "at_most_half_ratio"),
)


def run(case: Case) -> list[Row]:
  """A row for each policy; `cdf` is the share of pages with at most 1, 2, ... C tokens selected."""
  rows = []
  for spec in case.policies:
    followed = follow(case, spec)
    counts = pages_by_count(followed, case.page_size)
    touched, tokens = counts[1:], np.arange(1, len(counts))
    share, random = density(followed), strewn(density(followed), case.page_size)
    cdf = touched.cumsum() / max(1, touched.sum())
    rows.append(
      row_of(case, followed.runner, "spread")
      | {
        "selected_ratio": share,
        "touched_ratio": float(touched.sum() / counts.sum()),
        "selected_per_touched_page": float(touched @ tokens / max(1, touched.sum())),
        "random_selected_per_touched_page": float(random @ tokens),
        "at_most_half_ratio": float(cdf[case.page_size // 2 - 1]),
        "cdf": cdf.tolist(),
        "random_cdf": random.cumsum().tolist(),
      }
    )
  return rows


def pages_by_count(followed: Followed, page_size: int) -> np.ndarray:
  """i64[C + 1]: whole pages with 0, 1, ... C tokens selected, over all that was followed."""
  pages = followed.prompt_tokens // page_size  # those that are whole at every step
  selected = followed.selected[..., : pages * page_size]
  counts = selected.reshape(*selected.shape[:-1], pages, page_size).sum(axis=-1)
  return np.bincount(counts.ravel(), minlength=page_size + 1)


def strewn(share: float, page_size: int) -> np.ndarray:
  """f64[C]: chance that a touched page has 1, ... C tokens of a share that is strewn at random."""
  chance = np.array(
    [
      math.comb(page_size, n) * share**n * (1 - share) ** (page_size - n)
      for n in range(1, page_size + 1)
    ]
  )
  return chance / chance.sum()


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """The CDFs, each beside that of as many tokens strewn at random."""
  lines = {}
  for row in rows:
    counts = range(1, len(row["cdf"]) + 1)
    lines[row["policy"]] = counts, row["cdf"]
    lines[f"{row['policy']}, strewn at random"] = counts, row["random_cdf"]
  x = "tokens selected of a page that has one"
  draw([Panel(x, "share of pages with at most so many", lines)], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper says how its curves look."""
  return [
    Comparison(
      "Fig. 4a",
      f"pages with a selected token of which at most half are selected, {row['policy']}",
      "most: tokens are spread, few on a page (a curve without numbers)",
      f"{row['at_most_half_ratio']:.0%}",
      f"{row['selected_per_touched_page']:.1f} tokens on a touched page; strewn at random they "
      f"would be {row['random_selected_per_touched_page']:.1f}, so neighbours do go together",
    )
    for row in rows
  ]


ITEM = Item(run, plot, compare, COLUMNS)
