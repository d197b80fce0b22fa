"""The tables of a report's page, and how its numbers are written."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from eval import tables
from eval.means import extra_fields
from eval.report_rows import Group, means
from eval.results import Row

# Always there; of the others, those that were measured.
_COLUMNS = (
  *("policy", "store", "budget_tokens", "page_size", "batch_size", "num_tasks", "num_examples"),
  *("score", "retention", "ttft_s_p50", "tpot_s_p50", "tpot_s_p90", "tpot_s_p99"),
  *("prefill_tokens_per_s", "decode_tokens_per_s", "speedup_vs_dense"),
  *("device_kv_bytes", "metadata_bytes", "limit_ratio"),
)
_OFTEN_SAME = ("store", "page_size", "batch_size", "num_tasks", "num_examples")
_OPTIONAL = (
  *("peak_kv_bytes", "host_kv_bytes", "recall_bytes_per_step", "page_hit_ratio"),
  *("token_hit_ratio", "recall_stall_s_p50", "recall_stall_s_p99"),
)
_PERCENT = ("score", "dense_score", "retention")
_HEADERS = {
  "budget_tokens": "budget",
  "num_tasks": "tasks",
  "num_examples": "examples",
  "ttft_s_p50": "TTFT p50",
  "tpot_s_p50": "TPOT p50",
  "tpot_s_p90": "TPOT p90",
  "tpot_s_p99": "TPOT p99",
  "prefill_tokens_per_s": "prefill",
  "decode_tokens_per_s": "decode",
  "speedup_vs_dense": "speed vs dense",
  "device_kv_bytes": "KV on device",
  "peak_kv_bytes": "KV at peak",
  "host_kv_bytes": "KV on host",
  "metadata_bytes": "metadata",
  "limit_ratio": "limit hits",
  "recall_bytes_per_step": "recalled",
  "recall_stall_s_p50": "stall p50",
  "recall_stall_s_p99": "stall p99",
}
_WIDE_TASKS = 6  # that a page has room for with a score and a difference side by side
_UNSHOWN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"


def mean_scores(group: Group) -> str:
  """A line for each case: means over its tasks; what is the same of all is said before."""
  parts = ["<h3>Means over tasks</h3>"]
  rows = [means(case) for case in group.cases]
  columns = _mean_columns(rows)
  often = [name for name in columns if name in _OFTEN_SAME or name not in _COLUMNS]
  same = [name for name in often if len({row.get(name) for row in rows}) == 1]
  columns = [name for name in columns if name not in same]
  empty = [name for name in columns if all(row.get(name) is None for row in rows)]
  columns = [name for name in columns if name not in empty]
  lines = [[_bare(name, row.get(name)) for name in columns] for row in rows]
  facts = ", ".join(f"{header(name)} {shown(name, rows[0][name])}" for name in same)
  if same:
    parts.append(f"<p>All of them: {text(facts)}.</p>")
  heads = [_with_unit(name) for name in columns]
  parts.append(_table(heads, lines, 1 + ("store" in columns)))
  if empty:
    parts.append(f"<p>Not measured (-): {text(', '.join(map(header, empty)))}.</p>")
  parts.append(
    '<p class="soft">Score: mean over tasks, each counting the same. Retention: score as a share '
    "of that of dense. TTFT (time to the first token), TPOT (time per output token), their "
    "percentiles and speeds: median over tasks. Bytes: the most. Limit hits: share of the answers "
    "that were cut off at the most tokens allowed. -: not measured.</p>"
  )
  return "\n".join(parts)


def task_scores(group: Group) -> str:
  """A line for each case, a column for each task: its score, and how far from dense it is."""
  facts = {task: _task_facts(group, task) for task in group.tasks}
  (common, *others) = dict.fromkeys(facts.values())
  heads = [f"{task} ({fact})" if others and fact else task for task, fact in facts.items()]
  lines = []
  for case in group.cases:
    cells = {row["task"]: _score(row) for row in case.rows}
    lines.append([case.label, *(cells.get(name, "-") for name in group.tasks)])
  table = _table(["policy", *heads], lines)
  if len(heads) > _WIDE_TASKS:
    table = f'<div class="narrow">{table}</div>'
  said = f"<p>All of them: {text(common)}.</p>\n" if common and not others else ""
  return f"<h3>Scores in %, task by task (difference to dense)</h3>\n{said}{table}"


def text(value: Any) -> str:
  """Any value as text that is safe in a page; what no page can hold becomes a mark.

  So do characters that turn the direction of what follows, which could make a page lie.
  """
  plain = str(value).encode("utf-8", "replace").decode()  # half of a surrogate pair
  return html.escape(re.sub(_UNSHOWN, "\ufffd", plain))


def shown(name: str, value: Any) -> str:
  """A value with its unit, which its name says; - for nothing."""
  if value is None or isinstance(value, str | bool):
    return tables.human(name, value)
  if name in _PERCENT or name.endswith("_ratio"):
    return f"{100 * value:,.1f} %"
  if name.endswith("_bytes_per_step"):
    return f"{tables.human_bytes(value)}/step"
  if name.endswith("_bytes_per_s"):
    return f"{tables.human_bytes(value)}/s"
  if name.endswith("_tokens") or name == "page_size":
    return f"{value:,} tokens"
  return tables.human(name, value)


def header(name: str) -> str:
  """The name of a column for a reader."""
  plain = re.sub("_(ratio|tokens|s)$", "", name)  # the numbers have a unit
  return _HEADERS.get(name, plain.replace("_", " "))


def name_of(words: str) -> str:
  """With places where a line may end."""
  return re.sub("([:/=_@])", r"\1<wbr>", text(words))


def _mean_columns(rows: Sequence[Row]) -> list[str]:
  """The columns of a table of means: the usual ones, and what else was measured."""
  extra = dict.fromkeys(name for row in rows for name in extra_fields(row))
  known = {*_COLUMNS, *_OPTIONAL}
  used = (name for name in _OPTIONAL if any(row.get(name) for row in rows))
  return [*_COLUMNS, *used, *(name for name in extra if name not in known)]


def _unit(name: str) -> str:
  """That of a column where it would only make every cell of it wider."""
  if name.endswith("_tokens") or name == "page_size":
    return "tokens"
  if name in _PERCENT or name.endswith("_ratio"):
    return "%"
  return "tok/s" if name.endswith("_tokens_per_s") else ""


def _with_unit(name: str) -> str:
  return f"{header(name)}, {_unit(name)}" if _unit(name) else header(name)


def _bare(name: str, value: Any) -> str:
  return shown(name, value).removesuffix(_unit(name)).rstrip()


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
  """Of the columns, the first so many are words; the others are numbers, which end at the right."""
  kinds = ["name"] + [""] * (words - 1) + ["number"] * (len(columns) - words)
  head = "".join(
    f'<th scope="col" class="{kind}">{name_of(name)}</th>'
    for name, kind in zip(columns, kinds, strict=True)
  )
  body = []
  for line in lines:
    cells = [f'<th scope="row" class="name">{name_of(line[0])}</th>']
    cells += [
      f'<td class="{kind}">{text(cell)}</td>'
      for cell, kind in zip(line[1:], kinds[1:], strict=True)
    ]
    body.append(f"<tr>{''.join(cells)}</tr>")
  rows = "\n".join(body)
  return (
    f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
  )


def _task_facts(group: Group, task: str) -> str:
  """Its metric and how many examples it had."""
  rows = [row for case in group.cases for row in case.rows if row["task"] == task]
  metrics = {row["metric"] for row in rows if row.get("metric")}
  counts = {row["num_examples"] for row in rows if row.get("num_examples") is not None}
  return ", ".join([*sorted(metrics), *(f"{count} examples" for count in sorted(counts))])


def _score(row: Row) -> str:
  score, dense = row.get("score"), row.get("dense_score")
  if score is None or dense is None or row["policy"] == "dense":
    return shown("score", score).removesuffix(" %")
  return f"{100 * score:.1f} ({100 * (score - dense):+.1f})"
