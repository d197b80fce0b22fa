"""The parts of a report's page: one file that needs no network and no JavaScript.

Whatever comes from a run is escaped: what a model wrote is any text, markup too.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import re
import shlex
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval import results
from eval.means import extra_fields
from eval.report_rows import Case, Group, Run, command_of, means
from eval.results import Row

SHOWN_EXAMPLES = 3  # of each task
_SHOWN_CHARACTERS = 600  # of an answer
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
_UNSHOWN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6676; --paper: #fff; --box: #f4f6f9;
  --line: #d5dbe3; --mark: #0a5bb5; --warn: #8a4b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #a3adba; --paper: #14181e;
  --box: #1e242c; --line: #37404c; --mark: #7db8ff; --warn: #ffbf69; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.25rem 4rem; max-width: 80rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem;
  border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; } h4 { font-size: 1rem; margin: 1rem 0 .25rem; }
h1, h2, h3, h4, p, li, dd, summary { overflow-wrap: anywhere; }
a { color: var(--mark); } .soft { color: var(--soft); font-size: .9rem; }
.warn { color: var(--warn); font-weight: 600; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .35rem .5rem; text-align: left; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; } thead th { background: var(--box); }
tbody th { font-weight: 500; } .number { text-align: right; font-variant-numeric: tabular-nums; }
thead th { vertical-align: bottom; } thead .number { white-space: normal; min-width: 4rem; }
.name { white-space: normal; overflow-wrap: break-word; min-width: 13rem; max-width: 19rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.45 monospace; }
pre.command { background: var(--box); border-radius: 6px; padding: .6rem .8rem; }
td.said { white-space: normal; min-width: 16rem; width: 70%; }
figure { margin: 1rem 0; } figcaption { font-size: .9rem; color: var(--soft); }
figure .wide { background: #fff; padding: .5rem; } img { display: block; height: auto;
  max-width: max(100%, 44rem); margin: 0 auto; }
details { border: 1px solid var(--line); border-radius: 6px; padding: .4rem .8rem;
  margin: .5rem 0; }
summary { cursor: pointer; }
@media (min-width: 40rem) { tbody .name { position: sticky; left: 0; background: var(--paper); } }
@media (max-width: 40rem) { body { padding: .5rem .75rem 3rem; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: .35rem; } .name { min-width: 9rem; max-width: 11rem; }
  img { max-width: none; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
  """The whole document; no part of it can load or run anything, whatever it holds."""
  policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
  return "\n".join(
    [
      '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
      f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
      f"<h1>{text(title)}</h1>",
      *parts,
      "</body>\n</html>\n",
    ]
  )


def text(value: Any) -> str:
  """Any value as text that is safe in a page; what no page can hold becomes a mark.

  So do characters that turn the direction of what follows, which could make a page lie.
  """
  plain = str(value).encode("utf-8", "replace").decode()  # half of a surrogate pair
  return html.escape(re.sub(_UNSHOWN, "\ufffd", plain))


def shown(name: str, value: Any) -> str:
  """A value with its unit, which its name says; - for nothing."""
  if value is None or isinstance(value, str | bool):
    return results.human(name, value)
  if name in ("score", "dense_score", "retention") or name.endswith("_ratio"):
    return f"{100 * value:,.1f} %"
  if name.endswith("_bytes_per_step"):
    return f"{results.human_bytes(value)}/step"
  if name.endswith("_bytes_per_s"):
    return f"{results.human_bytes(value)}/s"
  if name.endswith("_tokens") or name == "page_size":
    return f"{value:,} tokens"
  return results.human(name, value)


def contents(groups: Sequence[Group]) -> str:
  """Links to the groups."""
  links = (
    f'<li><a href="#group-{place}">{text(heading(group))}</a></li>'
    for place, group in enumerate(groups, 1)
  )
  return f"<ul>{''.join(links)}</ul>"


def heading(group: Group) -> str:
  """What a group is: command, model and device, and whether it was simulated."""
  name = f"{group.command}: {group.model} on {group.device}"
  return f"{name} (simulated)" if group.simulated else name


def what_ran(runs: Sequence[Run]) -> str:
  """The manifest of every run."""
  return f"<h2>What ran</h2>\n{''.join(map(_run, runs))}"


def group_head(place: int, group: Group) -> str:
  """Heading, warnings and the table of means."""
  parts = [f'<h2 id="group-{place}">{text(heading(group))}</h2>']
  if group.simulated:
    parts.append('<p class="warn">Simulated: a cost model made these numbers; no clock did.</p>')
  parts += [f'<p class="warn">{text(note)}</p>' for note in group.notes]
  rows = [means(case) for case in group.cases]
  same = [name for name in _OFTEN_SAME if len({row[name] for row in rows}) == 1]
  columns = [name for name in mean_columns(rows) if name not in same]
  empty = [name for name in columns if all(row.get(name) is None for row in rows)]
  columns = [name for name in columns if name not in empty]
  lines = [[shown(name, row.get(name)) for name in columns] for row in rows]
  facts = ", ".join(f"{header(name)} {shown(name, rows[0][name])}" for name in same)
  parts.append("<h3>Means over tasks</h3>")
  if same:
    parts.append(f"<p>All of them: {text(facts)}.</p>")
  parts.append(_table([header(name) for name in columns], lines, 1 + ("store" in columns)))
  if empty:
    parts.append(f"<p>Not measured (-): {text(', '.join(map(header, empty)))}.</p>")
  parts.append(
    '<p class="soft">Score: mean over tasks, each counting the same. Retention: score as a share '
    "of that of dense. TTFT (time to the first token), TPOT (time per output token), their "
    "percentiles and speeds: median over tasks. Bytes: the most. Limit hits: share of the answers "
    "that were cut off at the most tokens allowed. -: not measured.</p>"
  )
  return "\n".join(parts)


def mean_columns(rows: Sequence[Row]) -> list[str]:
  """The columns of a table of means: the usual ones, and what else was measured."""
  extra = dict.fromkeys(name for row in rows for name in extra_fields(row))
  known = {*_COLUMNS, *_OPTIONAL}
  used = (name for name in _OPTIONAL if any(row.get(name) for row in rows))
  return [*_COLUMNS, *used, *(name for name in extra if name not in known)]


def header(name: str) -> str:
  """The name of a column for a reader."""
  return _HEADERS.get(name, name.removesuffix("_ratio").replace("_", " "))


def figure(caption: str, picture: bytes) -> str:
  """A PNG inside the page, in a box of its own that scrolls where it is wider than the page."""
  width, height = struct.unpack(">II", picture[16:24])
  size = f'width="{width * 96 // 150}" height="{height * 96 // 150}"'  # drawn at 150 dots an inch
  data = base64.b64encode(picture).decode()
  image = f'<img src="data:image/png;base64,{data}" alt="{text(caption)}" {size}>'
  return f'<figure><div class="wide">{image}</div><figcaption>{text(caption)}</figcaption></figure>'


def task_scores(group: Group) -> str:
  """A line for each case, a column for each task: its score, and how far from dense it is."""
  columns = ["policy", *(_task_header(group, name) for name in group.tasks)]
  lines = []
  for case in group.cases:
    cells = {row["task"]: _score(row) for row in case.rows}
    lines.append([case.label, *(cells.get(name, "-") for name in group.tasks)])
  return f"<h3>Scores, task by task</h3>\n{_table(columns, lines)}"


def answers(group: Group) -> str:
  """Per task the first examples with what every case answered, folded away."""
  by_task: dict[str, dict[str, list[tuple[Case, Row]]]] = {}
  for case in group.cases:
    for one in case.predictions:
      examples = by_task.setdefault(one["task"], {})
      examples.setdefault(str(one.get("id", len(examples))), []).append((case, one))
  if not by_task:
    return ""
  parts = ["<h3>Some answers</h3>"]
  for task, examples in by_task.items():
    few = list(examples.items())[:SHOWN_EXAMPLES]
    parts.append(
      f"<details><summary>{text(task)}: {len(few)} of {len(examples)} examples</summary>"
    )
    parts += [_example(name, said) for name, said in few]
    parts.append("</details>")
  return "\n".join(parts)


def folded(summary: str, inside: str) -> str:
  """What is seen only when it is opened."""
  return f"<details><summary>{text(summary)}</summary>\n{inside}\n</details>"


def command_line(run: Run) -> str:
  """What to type to run it again; flags without a value are left out."""
  flags, name = run.manifest.get("flags"), command_of(run)
  words = ["python", "-m", f"eval.{name}"] if name.startswith("run_") else [name]
  for flag, value in (flags if isinstance(flags, dict) else {}).items():
    if isinstance(value, bool):
      words.append(f"--{flag}" if value else f"--no{flag}")
    elif isinstance(value, list):
      words.append(f"--{flag}={_commas(value)}")
    elif value is not None:
      words.append(f"--{flag}={value}")
  return shlex.join(words)


def _commas(values: Sequence[Any]) -> str:
  """As list flags are written: what has a comma stands in double quotes."""
  line = io.StringIO()
  csv.writer(line, lineterminator="").writerow(values)
  return line.getvalue()


def _run(run: Run) -> str:
  known = run.manifest
  model = known.get("model") if isinstance(known.get("model"), dict) else {}
  simulated = sum(bool(row.get("simulated")) for row in run.rows)
  facts = {
    "model": model.get("name") or ", ".join({str(row.get("model") or "-") for row in run.rows}),
    "model sha256": model.get("sha256"),
    "device": known.get("device"),
    "devices": _and(known.get("num_devices"), f"({known.get('backend', '-')})"),
    "CPU": _and(known.get("cpu"), f"({known.get('cores', '-')} cores)"),
    "platform": known.get("platform"),
    "versions": _pairs(known.get("versions")),
    "commit": known.get("commit"),
    "date": known.get("utc"),
    "data sha256": _pairs(known.get("data")),
    "results": f"{len(run.rows)} rows, {len(run.predictions)} predictions",
  }
  if known.get("resumed"):
    facts["gone on with"] = _resumed(known["resumed"], known.get("commit"))
  if simulated:
    facts["simulated"] = f"{simulated} of {len(run.rows)} rows, by a cost model"
  listed = "".join(
    f"<dt>{text(name)}</dt><dd>{text('-' if value is None else value)}</dd>"
    for name, value in facts.items()
  )
  torn = "".join(
    f'<p class="warn">The last line of {text(name)} was cut off and is left out.</p>'
    for name in run.torn
  )
  command = f'<pre class="command">{text(command_line(run))}</pre>'
  return f"<h3>{text(run.name)}</h3>\n{command}\n<dl>{listed}</dl>\n{torn}"


def _resumed(times: Any, commit: Any) -> str | None:
  """When a run was gone on with, at which commit, and what else was then not as when it began."""
  if not isinstance(times, list) or not all(isinstance(one, Mapping) for one in times):
    return None
  return "; ".join(_going_on({"commit": commit} | one) for one in map(dict, times))


def _going_on(one: Mapping[str, Any]) -> str:
  facts = [f"{name} {_pairs(value) or value}" for name, value in one.items() if name != "utc"]
  return f"{one.get('utc', '-')} ({', '.join(facts)})"


def _and(value: Any, more: str) -> str | None:
  return None if value is None else f"{value} {more}"


def _pairs(values: Any) -> str | None:
  if not isinstance(values, Mapping):
    return None
  return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
  """Of the columns, the first so many are words; the others are numbers, which end at the right."""
  kinds = ["name"] + [""] * (words - 1) + ["number"] * (len(columns) - words)
  head = "".join(
    f'<th scope="col" class="{kind}">{text(name)}</th>'
    for name, kind in zip(columns, kinds, strict=True)
  )
  body = []
  for line in lines:
    cells = [f'<th scope="row" class="name">{_name(line[0])}</th>']
    cells += [
      f'<td class="{kind}">{text(cell)}</td>'
      for cell, kind in zip(line[1:], kinds[1:], strict=True)
    ]
    body.append(f"<tr>{''.join(cells)}</tr>")
  rows = "\n".join(body)
  return (
    f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
  )


def _name(policy: str) -> str:
  """With places where a line may end."""
  return re.sub("([:/=])", r"\1<wbr>", text(policy))


def _task_header(group: Group, task: str) -> str:
  rows = [row for case in group.cases for row in case.rows if row["task"] == task]
  metrics = {row["metric"] for row in rows if row.get("metric")}
  counts = {row["num_examples"] for row in rows if row.get("num_examples") is not None}
  facts = [*sorted(metrics), *(f"{count} examples" for count in sorted(counts))]
  return f"{task} ({', '.join(facts)})" if facts else task


def _score(row: Row) -> str:
  score, dense = row.get("score"), row.get("dense_score")
  if score is None or dense is None or row["policy"] == "dense":
    return shown("score", score)
  return f"{100 * score:.1f} % ({100 * (score - dense):+.1f})"


def _example(name: str, said: Sequence[tuple[Case, Row]]) -> str:
  expected = said[0][1].get("answers")
  wanted = expected if isinstance(expected, list) else [expected]
  lines = "".join(
    f'<tr><th scope="row" class="name">{_name(case.label)}</th>'
    f'<td class="number">{shown("score", one.get("score"))}</td>'
    f'<td class="said"><pre dir="auto">{_cut(one.get("pred"))}</pre></td></tr>'
    for case, one in said
  )
  return (
    f"<h4>Example {text(name)}</h4><p>Expected:</p>"
    f"{''.join(f'<pre dir="auto">{_cut(one)}</pre>' for one in wanted)}"
    '<div class="wide"><table><thead><tr><th>policy</th><th class="number">score</th><th>answer'
    f"</th></tr></thead><tbody>{lines}</tbody></table></div>"
  )


def _cut(value: Any) -> str:
  whole = "-" if value is None else str(value).strip()
  if len(whole) <= _SHOWN_CHARACTERS:
    return text(whole) or "(nothing)"
  more = f" ... ({len(whole) - _SHOWN_CHARACTERS:,} characters more)"
  return text(whole[:_SHOWN_CHARACTERS] + more)
