"""Figure 6: time to the first token and of every later one, by how many requests arrive a second.

Simulated (`simulated`), with the prompts and answers of the authors' benchmark. Beside the paper's
numbers: how often a row sits a step out since what it needs is still on its way, how long that
takes, and the same requests where the step waits for such rows instead (field `waiting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row, percentiles
from scripts.reproduce_flexicache import served
from scripts.reproduce_flexicache.case import Case
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

ROWS, STEP = "the row", "the step"  # what waits for a reload
COLUMNS = (
  *("policy", "budget_tokens", "waiting", "rate", "ttft_s_mean", "tpot_s_mean", "tpot_s_p99"),
  *("rows_per_step", "sat_out_ratio", "token_s_p50", "token_s_p99", "reloaded_token_s_p50"),
  *("reloaded_token_s_p99", "reload_s_p50", "reload_s_p99", "simulated"),
)
PAPER_RATE = 0.4
PAPER_MS = {None: 71.5, 1024: 34.6, 2048: 44.9}


def run(case: Case) -> list[Row]:
  """A row for each rate: dense, and each budget with rows that wait and with steps that do."""
  serving = served.serving_of(case)
  tried = [(None, None)]
  for pages in case.budgets:
    tried += [
      (served.tiers_of(case, pages, sits_out=sits_out), ROWS if sits_out else STEP)
      for sits_out in (True, False)
    ]
  rows = []
  for rate in serving.rates:
    for tiers, waiting in tried:
      done = served.run(case, served.one_by_one(serving, rate), tiers)
      first = [one.ttft_s for one in done.done if one.ttft_s is not None]
      later = [one.tpot_s for one in done.done if one.tpot_s is not None]
      rows.append(
        served.row_of(case, "online", tiers, done)
        | percentiles("ttft_s", first)
        | percentiles("tpot_s", later)
        | {"rate": rate, "waiting": waiting}
        | {"ttft_s_mean": float(np.mean(first)), "tpot_s_mean": float(np.mean(later))}
      )
  return rows


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Both times by rate, and what a reload makes of a token's time."""
  tpot, ttft, tail = {}, {}, {}
  least = min(row["budget_tokens"] for row in rows if row["budget_tokens"] is not None)
  for row in rows:
    label = "dense" if row["waiting"] is None else f"FlexiCache, {row['budget_tokens']:,}"
    if row["waiting"] != STEP:
      _add(tpot, label, row["rate"], 1e3 * row["tpot_s_mean"])
      _add(ttft, label, row["rate"], row["ttft_s_mean"])
    if row["waiting"] is not None and row["budget_tokens"] == least:
      label = f"{label}: {row['waiting']} waits"
      _add(tail, label, row["rate"], 1e3 * row["token_s_p50"])
      _add(tail, f"{label}, after a reload", row["rate"], 1e3 * row["reloaded_token_s_p50"])
  x = "requests a second"
  draw(
    [
      Panel(x, "mean ms of a later token (simulated)", tpot),
      Panel(x, "mean seconds to the first token", ttft),
      Panel(x, "ms between two tokens, median", tail),
    ],
    title,
    path,
  )


def _add(lines: dict, label: str, x: float, y: float) -> None:
  xs, ys = lines.setdefault(label, ([], []))
  xs.append(x)
  ys.append(y)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Times at the paper's rate, and what sitting out does."""
  rate = min((row["rate"] for row in rows), key=lambda one: abs(one - PAPER_RATE))
  here = [row for row in rows if row["rate"] == rate]
  waiting = [row for row in here if row["waiting"] == ROWS]
  return [
    Comparison(
      "Fig. 6",
      f"mean time of a later token at {rate:g} requests a second",
      f"71.5 ms dense, 34.6 and 44.9 ms at 1,024 and 2,048 tokens, at {PAPER_RATE}",
      "; ".join(
        f"{1e3 * row['tpot_s_mean']:.1f} ms {_who(row)}" for row in here if row["waiting"] != STEP
      ),
      "simulated at the rates of a data sheet; a prompt is read in one piece while the others "
      "wait, where vLLM reads it in the same step",
    ),
    Comparison(
      "Fig. 6",
      f"mean time to the first token at {rate:g} requests a second",
      "curves only",
      "; ".join(
        f"{row['ttft_s_mean']:.2f} s {_who(row)}" for row in here if row["waiting"] != STEP
      ),
      "the same",
    ),
    Comparison(
      "text",
      f"rows that sit a step out while their pages come, at {rate:g} requests a second",
      "about 1 of 16 at a time",
      "; ".join(
        f"{row['sat_out_ratio']:.3f} of a row's steps {_who(row)}, a reload takes "
        f"{1e3 * row['reload_s_p50']:.1f} ms (p99 {1e3 * row['reload_s_p99']:.1f})"
        for row in waiting
      ),
      "one step after each ranking, as pages come within a step; the paper counts rows, not steps",
    ),
    Comparison(
      "-",
      "time between two tokens: any, and after a reload, where the row waits or the step does",
      "not in the paper",
      "; ".join(
        f"{_ms(row, 'token_s')} and {_ms(row, 'reloaded_token_s')} {_who(row)}, "
        f"{row['waiting']} waits"
        for row in here
        if row["waiting"] is not None
      ),
      "a row that sits out waits for a whole step, however soon its pages are there; at high rates "
      "the p99 is the prompts of others, which are read in between",
    ),
  ]


def _who(row: Row) -> str:
  return "dense" if row["budget_tokens"] is None else f"at {row['budget_tokens']:,}"


def _ms(row: Row, name: str) -> str:
  return f"{1e3 * row[f'{name}_p50']:.1f} ms (p99 {1e3 * row[f'{name}_p99']:.1f})"


ITEM = Item(run, plot, compare, COLUMNS)
