"""One row for the rows of several tasks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from eval.results import ROW_FIELDS, Row

_MEDIANS = (
  *("ttft_s_p50", "ttft_s_p90", "ttft_s_p99", "tpot_s_p50", "tpot_s_p90", "tpot_s_p99"),
  *("prefill_tokens_per_s", "decode_tokens_per_s", "speedup_vs_dense", "recall_bytes_per_step"),
  *("page_hit_ratio", "token_hit_ratio", "recall_stall_s_p50", "recall_stall_s_p99"),
)
_LARGEST = ("device_kv_bytes", "peak_kv_bytes", "host_kv_bytes", "metadata_bytes")


def over_tasks(rows: Sequence[Row]) -> Row:
  """One row for those of one policy, store and budget.

  Scores are means of the tasks, each counting the same; times and speeds medians; bytes the most.
  Beside fields of a row: `num_tasks`; `limit_ratio`, the share of the answers that the limit ended;
  and of fields that only this kind of run has, medians.

  Args:
    rows: one for each task, at least one; older ones may lack fields.
  """
  first = rows[0]
  both = [(row["score"], row["dense_score"]) for row in rows if _has(row, "score", "dense_score")]
  dense = sum(one for _, one in both)
  limited = [row for row in rows if _has(row, "limit_hits", "num_examples")]
  asked = sum(row["num_examples"] for row in limited)
  others = [name for row in rows for name in extra_fields(row)]
  scores, counts = _values(rows, "score"), _values(rows, "num_examples")
  return {
    "policy": first["policy"],
    "store": first.get("store"),
    "budget_tokens": first.get("budget_tokens"),
    "page_size": first.get("page_size"),
    "batch_size": first.get("batch_size"),
    "simulated": bool(first.get("simulated")),
    "num_tasks": len(rows),
    "num_examples": sum(counts) if counts else None,
    "limit_hits": sum(row["limit_hits"] for row in limited) if limited else None,
    "score": statistics.mean(scores) if scores else None,
    "retention": sum(one for one, _ in both) / dense if dense else None,
    "limit_ratio": sum(row["limit_hits"] for row in limited) / asked if asked else None,
    **{name: max(_values(rows, name), default=None) for name in _LARGEST},
    **{name: _median(rows, name) for name in (*_MEDIANS, *dict.fromkeys(others))},
  }


def extra_fields(row: Row) -> list[str]:
  """Names of the numbers that only this kind of run has."""
  return [
    name
    for name, value in row.items()
    if name not in ROW_FIELDS and isinstance(value, int | float) and not isinstance(value, bool)
  ]


def _has(row: Row, *names: str) -> bool:
  return all(row.get(name) is not None for name in names)


def _values(rows: Sequence[Row], name: str) -> list[Any]:
  return [row[name] for row in rows if row.get(name) is not None]


def _median(rows: Sequence[Row], name: str) -> float | None:
  values = _values(rows, name)
  return statistics.median(values) if values else None
