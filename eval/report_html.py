"""The parts of a report's page: one file that needs no network and no JavaScript.

Whatever comes from a run is escaped: what a model wrote is any text, markup too.
"""

from __future__ import annotations

import base64
import csv
import io
import shlex
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.report_rows import Case, Group, Run, command_of
from eval.report_tables import mean_scores, name_of, shown, text
from eval.results import Row

SHOWN_EXAMPLES = 3  # of each task
_SHOWN_CHARACTERS = 600  # of an answer
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
table { border-collapse: separate; border-spacing: 0; font-size: .875rem; }
th, td { padding: 6px .4rem; text-align: left; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; } thead th { background: var(--box); }
tbody th { font-weight: 500; } .number { text-align: right; font-variant-numeric: tabular-nums; }
thead th { vertical-align: bottom; } thead .number { white-space: normal; min-width: 3.5rem; }
.narrow td { white-space: normal; word-spacing: 100vw; }
.name { white-space: normal; overflow-wrap: break-word; min-width: 11rem; max-width: 19rem;
  position: sticky; left: 0; background: var(--paper); } thead .name { background: var(--box); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/20px monospace; }
pre.command { background: var(--box); border-radius: 6px; padding: .6rem .8rem; }
td.said { white-space: normal; min-width: 16rem; width: 70%; }
figure { margin: 1rem 0; } figcaption { font-size: .9rem; color: var(--soft); }
figure .wide { background: #fff; padding: .5rem; } img { display: block; height: auto;
  max-width: max(100%, 44rem); margin: 0 auto; }
details { border: 1px solid var(--line); border-radius: 6px; padding: .4rem .8rem;
  margin: .5rem 0; }
summary { cursor: pointer; }
@media (max-width: 40rem) { body { padding: .5rem .75rem 3rem; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: .35rem; } .name { min-width: 7.5rem; max-width: 9rem; }
  img { max-width: none; } td.said { min-width: 8rem; } }
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
  return "\n".join([*parts, mean_scores(group)])


def figure(caption: str, picture: bytes) -> str:
  """A PNG inside the page, in a box of its own that scrolls where it is wider than the page."""
  width, height = struct.unpack(">II", picture[16:24])
  size = f'width="{width * 96 // 150}" height="{height * 96 // 150}"'  # drawn at 150 dots an inch
  data = base64.b64encode(picture).decode()
  image = f'<img src="data:image/png;base64,{data}" alt="{text(caption)}" {size}>'
  return f'<figure><div class="wide">{image}</div><figcaption>{text(caption)}</figcaption></figure>'


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


def _example(name: str, said: Sequence[tuple[Case, Row]]) -> str:
  expected = said[0][1].get("answers")
  wanted = expected if isinstance(expected, list) else [expected]
  lines = "".join(
    f'<tr><th scope="row" class="name">{name_of(case.label)}</th>'
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
