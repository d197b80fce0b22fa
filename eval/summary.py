"""What result rows say together: differences to dense, means over tasks, tables, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval import plots
from eval.means import over_tasks
from eval.results import Row
from eval.tables import table

_COSTS = (
  *("policy", "store", "budget_tokens", "score", "retention", "decode_tokens_per_s"),
  *("speedup_vs_dense", "device_kv_bytes", "metadata_bytes", "limit_hits", "question_in_window"),
)


def compare(row: Row, rows: Sequence[Row]) -> Row:
  """The row with what is relative to dense in the same task and metric, where there is such a row.

  Ratios of scores are empty where the metric gives none.
  """
  same = {"policy": "dense"} | {name: row[name] for name in ("task", "metric")}
  dense = next((one for one in [*rows, row] if same.items() <= one.items()), None)
  if dense is None:
    return row
  fast = row["tpot_s_p50"] and dense["tpot_s_p50"]
  return row | {
    "dense_score": dense["score"],
    "retention": row["score"] / dense["score"] if dense["score"] else None,
    "speedup_vs_dense": dense["tpot_s_p50"] / row["tpot_s_p50"] if fast else None,
  }


def means(rows: Sequence[Row]) -> list[Row]:
  """`eval.means.over_tasks` of each policy, store and budget."""
  return [over_tasks(group) for group in _by_case(rows).values()]


def tables(rows: Sequence[Row]) -> str:
  """Two tables: the score of each task with its difference to dense; means and costs."""
  names = list(dict.fromkeys(row["task"] for row in rows))
  scores, costs = [], []
  for group in _by_case(rows).values():
    cells = {row["task"]: _score(row) for row in group}
    scores.append({"policy": plots.label(group[0]), "store": group[0]["store"]} | cells)
    mean = over_tasks(group)
    hits = f"{mean['limit_hits']} of {mean['num_examples']}"
    costs.append(mean | {"limit_hits": hits, "question_in_window": _inside(group)})
  by_task = table(scores, ("policy", "store", *names))
  return f"{by_task}\n\n{table(costs, _COSTS)}"


def draw(rows: Sequence[Row], title: str, out_dir: Path) -> list[str]:
  """Names of the pictures that were made."""
  summaries = means(rows)
  timed = [row for row in summaries if row["decode_tokens_per_s"]]
  names = ["accuracy_bytes.png"]
  plots.accuracy_against_bytes(summaries, title, out_dir / names[0])
  if timed:
    names.append("accuracy_speed.png")
    plots.accuracy_against_speed(timed, title, out_dir / names[-1])
  if any(row["dense_score"] is not None and row["policy"] != "dense" for row in rows):
    names.append("deltas.png")
    plots.deltas(rows, title, out_dir / names[-1])
  return names


def _by_case(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
  cases: dict[tuple, list[Row]] = {}
  for row in rows:
    cases.setdefault((row["policy"], row["store"], row["budget_tokens"]), []).append(row)
  return cases


def _score(row: Row) -> str:
  """0.75 (-0.25): the score, and how far from dense it is."""
  if row["dense_score"] is None or row["policy"] == "dense":
    return f"{row['score']:.2f}"
  return f"{row['score']:.2f} ({row['score'] - row['dense_score']:+.2f})"


def _inside(group: Sequence[Row]) -> str | None:
  """In how many tasks the policy's window held the question."""
  if group[0]["window_tokens"] is None:
    return None
  inside = sum(row["question_in_window"] for row in group)
  return f"{inside} of {len(group)} tasks (last {group[0]['window_tokens']} tokens)"
