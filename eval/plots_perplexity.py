"""The picture of `eval.run_perplexity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.plots import MARKERS, label, save


def nll_by_position(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
  """A line for each row: its NLL by position, and beside it the difference to dense.

  The text itself moves the NLL more than any policy does, so that differences are only seen in the
  second panel, which is missing where there is no dense row.

  Args:
    rows: of `eval.run_perplexity`.
    title: which model read what, where.
    path: of the PNG.
  """
  dense = next((row for row in rows if row["policy"] == "dense"), None)
  figure = Figure(figsize=(11 if dense else 7, 4.2), layout="constrained")
  panels = figure.subplots(1, 2 if dense else 1, squeeze=False)[0]
  for place, row in enumerate(rows):
    style = {"color": f"C{place % 10}", "marker": MARKERS[place % len(MARKERS)], "markersize": 5}
    middles = [(part["from"] + part["to"] - 1) / 2 for part in row["by_position"]]
    nll = _column(row)
    panels[0].plot(middles, nll, label=label(row), **style)
    if dense:
      panels[1].plot(middles, nll - _column(dense), **style)
  panels[0].set_ylabel("NLL, nats a token")
  if dense:
    panels[1].set_ylabel("NLL minus that of dense")
  for panel in panels:
    panel.set_xlabel("position in the text, tokens")
    panel.grid(alpha=0.3)
  figure.legend(loc="outside right upper", fontsize=8)
  figure.suptitle(title, fontsize=10)
  save(figure, path)


def _column(row: Mapping[str, Any]) -> np.ndarray:
  return np.array([part["nll"] for part in row["by_position"]])
