"""Figure 5: tokens/s by the length of answers, of requests that are all there from the beginning.

Simulated (`simulated`): the paper's size on the machine of its test bed. As in the authors'
benchmark, tokens are those of prompts and answers, prompts have 10k to 30k tokens, and 64 requests
are decoded at once if memory has room for them; dense attention has room for a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row
from scripts.reproduce_flexicache import served
from scripts.reproduce_flexicache.case import Case
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("policy", "budget_tokens", "num_examples", "prompt_tokens", "output_tokens", "tokens_per_s"),
  *("decode_tokens_per_s", "speedup_vs_dense", "rows_per_step", "sat_out_ratio"),
  *("reload_s_p50", "reload_s_p99", "simulated"),
)
ARTIFACT = {  # tokens/s of vLLM and of FlexiCache at 1,024 tokens, from the README of the artifact
  100: (11178.7, 12433.1),
  500: (7742.1, 11480.2),
  1000: (5609.9, 9965.4),
  1500: (4549.0, 9444.9),
}


def run(case: Case) -> list[Row]:
  """A row for each length of answers, dense and for each budget."""
  serving, rows = served.serving_of(case), []
  for length in serving.output_lengths:
    dense = None
    for tiers in (None, *(served.tiers_of(case, pages) for pages in case.budgets)):
      done = served.run(case, served.together(serving, length), tiers)
      row = served.row_of(case, "throughput", tiers, done)
      dense = dense or row
      rows.append(row | {"speedup_vs_dense": row["tokens_per_s"] / dense["tokens_per_s"]})
  return rows


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Tokens/s and gain by the length of answers, the authors' own beside it."""
  speeds, gains = {}, {}
  for row in rows:
    label = _label(row)
    _add(speeds, label, row["output_tokens"], row["tokens_per_s"])
    if row["policy"] != "dense":
      _add(gains, label, row["output_tokens"], row["speedup_vs_dense"])
  lengths = [one for one in ARTIFACT if one <= max(row["output_tokens"] for row in rows)]
  if lengths:
    gains["the artifact's README, 1,024"] = (
      lengths,
      [ARTIFACT[one][1] / ARTIFACT[one][0] for one in lengths],
    )
  panels = [Panel("tokens of an answer", "tokens/s, prompts too (simulated)", speeds)]
  panels.append(Panel("tokens of an answer", "tokens/s over dense", gains))
  draw(panels, title, path)


def _label(row: Row) -> str:
  return row["policy"] if row["policy"] == "dense" else f"FlexiCache, {row['budget_tokens']:,}"


def _add(lines: dict, label: str, x: float, y: float) -> None:
  xs, ys = lines.setdefault(label, ([], []))
  xs.append(x)
  ys.append(y)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The gain over dense, and tokens/s of both."""
  budgets = list(dict.fromkeys(row["budget_tokens"] for row in rows if row["budget_tokens"]))
  of_budget = {one: [row for row in rows if row["budget_tokens"] == one] for one in budgets}
  first = of_budget[budgets[0]]
  dense = [row for row in rows if row["policy"] == "dense"]
  published = ", ".join(f"{b / a:.2f} at {one:,}" for one, (a, b) in ARTIFACT.items())
  return [
    Comparison(
      "Fig. 5",
      "tokens/s over dense, by tokens of an answer",
      f"1.38 to 1.55 (Llama-3.1-8B, 500 requests); its artifact's README at 1,024: {published}",
      "; ".join(
        ", ".join(f"{row['speedup_vs_dense']:.2f} at {row['output_tokens']:,}" for row in found)
        + f" (budget {budget:,})"
        for budget, found in of_budget.items()
      ),
      "simulated: rates are a data sheet's times what good code reaches, the same for both; room "
      "is set aside for whole answers, where vLLM preempts",
    ),
    Comparison(
      "README",
      f"tokens/s, dense and FlexiCache at {budgets[0]:,}",
      "; ".join(f"{a:,.0f} and {b:,.0f} at {one:,}" for one, (a, b) in ARTIFACT.items()),
      "; ".join(
        f"{a['tokens_per_s']:,.0f} and {b['tokens_per_s']:,.0f} at {a['output_tokens']:,}"
        for a, b in zip(dense, first, strict=True)
      ),
      "the cost model's products and reads are faster than those of vLLM 0.8.2's Triton backend, "
      "of both sides alike",
    ),
  ]


ITEM = Item(run, plot, compare, COLUMNS)
