"""The page is parsed: its numbers, what is escaped, and that it needs nothing else."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser

import numpy as np
import pytest

from eval import report, report_html, report_rows, report_tables

HOSTILE = '<script>alert(1)</script><img src="http://evil/x.png">\x00\ud800\u202e $\\frac'
LONG = "quest:score=minmax:candidates=4:digest_dtype=int8"


class Page(HTMLParser):
  def __init__(self, path):
    super().__init__()
    self.tags, self.references, self.images, self.styles, self.words = [], [], [], [], []
    self.rows, self.in_cell = [], False
    self.feed(path.read_text(encoding="utf-8"))

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    attributes = dict(attrs)
    self.references += [attributes[name] for name in ("href", "src") if name in attributes]
    if tag == "img":
      self.images.append(attributes)
    if tag == "tr":
      self.rows.append([])
    if tag in ("td", "th"):
      self.rows[-1].append("")
      self.in_cell = True

  def handle_endtag(self, tag):
    self.in_cell &= tag not in ("td", "th")

  def handle_data(self, data):
    (self.styles if self.tags[-1:] == ["style"] else self.words).append(data)
    if self.in_cell:
      self.rows[-1][-1] += data

  @property
  def text(self):
    return " ".join(self.words)


def row(policy="dense", task="lookup", **fields):
  base = {
    "model": "tiny",
    "policy": policy,
    "store": "resident",
    "budget_tokens": None if policy == "dense" else 1024,
    "page_size": 16,
    "batch_size": 1,
    "device": "a chip",
    "kernels": "append_kv=xla page_products=mosaic",
    "task": task,
    "metric": "string_match_all",
    "score": 0.5,
    "dense_score": 0.5,
    "num_examples": 4,
    "limit_hits": 1,
    "ttft_s_p50": 1.5,
    "tpot_s_p50": 0.02,
    "tpot_s_p90": 0.03,
    "tpot_s_p99": 0.04,
    "prefill_tokens_per_s": 300.0,
    "decode_tokens_per_s": 50.0,
    "speedup_vs_dense": 1.0,
    "device_kv_bytes": 2_000_000,
    "metadata_bytes": 3_000,
    "simulated": False,
  }
  return base | fields


def said(policy, text, task="lookup", **fields):
  budget = None if policy == "dense" else 1024
  base = {"policy": policy, "store": "resident", "budget_tokens": budget, "page_size": 16}
  base |= {"task": task, "id": "q7", "pred": text, "answers": ["42"], "score": 1.0}
  return base | {"ttft_s": 1.0, "step_s": [0.01, 0.02]} | fields


def write_run(folder, rows, predictions=(), **manifest):
  folder.mkdir()
  known = {
    "command": "run_needle.py",
    "flags": {"policies": ["dense", "a:b=(1,2)"], "seed": 0, "share": False, "text_file": None},
    "model": {"name": "tiny", "sha256": "abcdef0123456789"},
    "data": {"book": "d0d0"},
    "commit": "c0ffee",
    "num_devices": 1,
  }
  (folder / "manifest.json").write_text(json.dumps(known | manifest))
  (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
  if predictions:
    lines = "".join(json.dumps(one) + "\n" for one in predictions)
    (folder / "predictions.jsonl").write_text(lines)
  return folder


def groups_of(*folders):
  return report_rows.group_runs([report_rows.read_run(folder) for folder in folders])


def test_a_page_says_it_all_and_needs_nothing(tmp_path):
  maps = {"mass_kept_ratio": [[None, None], [0.5, 1.0]]}
  rows = [
    row(),
    row(LONG, score=0.25, speedup_vs_dense=2.0, decode_tokens_per_s=100.0, head_maps=maps),
    row(task="$chain"),
    row(LONG, "$chain", score=0.5),
  ]
  predictions = [said("dense", "42"), said(LONG, HOSTILE), said(LONG, "z" * 5000, id="q8")]
  folder = write_run(tmp_path / "a", rows, predictions)
  path = report.write(folder)
  assert path == folder / "report.html"
  page = Page(path)
  assert not {"script", "link", "iframe"} & set(page.tags)
  assert all(one.startswith("data:image/png;base64,") for one in page.references)
  assert "url(" not in "".join(page.styles) and "@import" not in "".join(page.styles)
  names = ("accuracy_speed", "accuracy_bytes", "deltas", "latency", "heads_mass_kept_ratio_1")
  beside = [folder / f"report-{name}.png" for name in names]
  inside = [base64.b64decode(one["src"].partition(",")[2]) for one in page.images]
  assert inside == [one.read_bytes() for one in beside]
  assert all(one.startswith(b"\x89PNG") for one in inside) and all(
    one["alt"] for one in page.images
  )
  wanted = [
    *(LONG, "1,024", "37.5", "75.0", "1.5 s", "20.0 ms", "30.0 ms", "40.0 ms"),
    *("300.0", "75.0", "1.50x", "2.0 MB", "3.0 kB", "25.0"),
  ]
  assert wanted in page.rows
  assert [LONG + "@1024", "25.0 (-25.0)", "50.0 (+0.0)"] in page.rows
  for text in ("abcdef0123456789", "c0ffee", "book d0d0", "lookup: 2 of 2 examples"):
    assert text in page.text
  command = "python -m eval.run_needle '--policies=dense,\"a:b=(1,2)\"' --seed=0 --noshare"
  assert command in page.text
  assert '<script>alert(1)</script><img src="http://evil/x.png">\ufffd?\ufffd $' in page.text
  assert "(4,400 characters more)" in page.text


def test_an_older_run(tmp_path, capsys):
  """No predictions, fields missing, answers in the rows, times not at all."""
  answers = [{"expected": "77", "given": "it is 77", "correct": True}]
  old = {"policy": "dense", "task": "lookup", "score": 1.0, "answers": answers}
  folder = write_run(tmp_path / "a", [old], model=None, flags=None)
  report.main(type("Flags", (), {"out": None})(), [str(folder)])
  page = Page(folder / "report.html")
  assert page.images == []
  assert ["dense", "100.0 %", "it is 77"] in page.rows
  assert "Not measured (-): budget, retention, TTFT p50" in page.text
  printed = capsys.readouterr().out.splitlines()
  assert printed[0] == "run_needle: unknown model on unknown device"
  assert printed[3].split()[:4] == ["dense", "1", "100.0", "%"]
  assert printed[-1] == f"written to {folder / 'report.html'}"


def test_what_is_the_same_of_all_stands_before_a_table(tmp_path):
  """Units stand in its head, so that the columns of a run find room."""
  rows = [row(question_tokens=31), row("h2o", question_tokens=31, rank=2), row("h2o", "chain")]
  (group,) = groups_of(write_run(tmp_path / "a", rows))
  table = report_tables.mean_scores(group)
  assert "All of them: store resident, page size 16 tokens, batch size 1, question 31 to" in table
  assert ">budget, tokens</th>" in table and ">score, %</th>" in table and ">rank</th>" in table
  scores = report_tables.task_scores(group)
  assert "All of them: string_match_all, 4 examples." in scores and 'class="narrow"' not in scores
  others = [row(task=f"t{n}", metric=f"m{n}") for n in range(7)]
  (group,) = groups_of(write_run(tmp_path / "b", others))
  scores = report_tables.task_scores(group)
  assert "t6 (m6, 4 examples)" in scores and "All of them" not in scores
  assert 'class="narrow"' in scores


def test_a_head_map_is_the_mean_over_tasks(tmp_path):
  maps = ([[None, None], [0.5, None]], [[None, None], [1.0, 0.25]])
  rows = [row(task=f"t{n}", head_maps={"a": one}) for n, one in enumerate(maps)]
  rows += [row(task="none"), row("h2o", head_maps={"a": [[2.0]]})]
  (group,) = groups_of(write_run(tmp_path / "a", rows))
  mean = report._mean_map(group.cases[0], "a")
  np.testing.assert_array_equal(mean, [[np.nan, np.nan], [0.75, 0.25]])
  plots = [plot for plot in report._plots(group) if plot.name == "heads_a_1"]
  assert [plot.caption[:42] for plot in plots] == ["Layers and heads: a, mean over tasks. Grey"]
  rows[1]["head_maps"] = {"a": [[1.0, 2.0]]}
  folder = write_run(tmp_path / "b", rows)
  with pytest.raises(
    ValueError, match=r"dense: head_maps 'a' is \(2, 2\) of one task and \(1, 2\)"
  ):
    report.write(folder)
  assert not list(folder.glob("report*"))


def test_numbers_that_are_none_are_not_shown(tmp_path):
  rows = [row(ttft_s_p50=10**400, device_kv_bytes=10**400), row(task="chain", more=10**400)]
  rows[1] |= {"head_maps": {"a": [[10**400, 1.0]]}, "answers": [{"score": 10**400}]}
  folder = write_run(tmp_path / "a", rows, [said("dense", "", ttft_s=10**400)])
  text = (folder / "results.jsonl").read_text()
  (folder / "results.jsonl").write_text(text.replace('"tpot_s_p99": 0.04', '"tpot_s_p99": 1e999'))
  (case,) = groups_of(folder)[0].cases
  means = report_rows.means(case)
  assert (means["ttft_s_p50"], means["tpot_s_p99"]) == (1.5, None) and "more" not in means
  assert "lookup" in Page(report.write(folder)).text


def test_a_run_that_was_gone_on_with_says_so(tmp_path):
  times = [{"utc": "monday"}, {"utc": "tuesday", "commit": "bead", "versions": {"jax": "1.2"}}]
  run = report_rows.read_run(write_run(tmp_path / "a", [row()], resumed=times))
  told = "monday (commit c0ffee); tuesday (commit bead, versions jax 1.2)"
  assert f"<dt>gone on with</dt><dd>{told}</dd>" in report_html.what_ran([run])
  once = report_rows.read_run(write_run(tmp_path / "b", [row()]))
  assert "gone on with" not in report_html.what_ran([once])
  odd = report_rows.read_run(write_run(tmp_path / "c", [row()], resumed="x"))
  assert "<dt>gone on with</dt><dd>-</dd>" in report_html.what_ran([odd])


def test_unlike_is_kept_apart(tmp_path):
  rows = [row(), row(device="another"), row(model="larger"), row(simulated=True)]
  more = write_run(tmp_path / "b", [row()], model={"name": "tiny", "sha256": "other weights"})
  groups = groups_of(write_run(tmp_path / "a", rows), more)
  assert [report_html.heading(group) for group in groups] == [
    "run_needle: tiny (abcdef01) on a chip",
    "run_needle: tiny (abcdef01) on another",
    "run_needle: larger on a chip",
    "run_needle: tiny (abcdef01) on a chip (simulated)",
    "run_needle: tiny (other we) on a chip",
  ]
  assert [len(group.cases) for group in groups] == [1] * 5
  assert "Simulated: a cost model" in report_html.group_head(1, groups[3])
  assert "4 x a chip" in groups_of(write_run(tmp_path / "c", [row()], num_devices=4))[0].device


def test_alike_is_told_apart(tmp_path):
  rows = [
    row("quest", page_score=score, page_size=size) for score in ("mean", "max") for size in (8, 16)
  ]
  rows += [row("h2o"), row("h2o", task="chain", prompt_tokens=9), row("h2o", "chain")]
  (group,) = groups_of(write_run(tmp_path / "a", rows))
  labels = [case.label for case in group.cases]
  assert labels[:2] == ["quest, mean, pages of 8@1024", "quest, mean, pages of 16@1024"]
  assert labels[-1] == "h2o@1024"
  assert group.tasks == ["lookup", "chain 9 tokens", "chain 0 tokens"]
  assert group.notes == ["Not all were measured on the same tasks: their means cannot be compared."]


def test_runs_that_measured_the_same(tmp_path):
  flags = {"seed": 1, "budget_tokens": ["9"]}
  a = write_run(tmp_path / "a", [row()], [said("dense", "of a")])
  b = write_run(tmp_path / "b", [row(), row()], [said("dense", "of b")], flags=flags)
  (group,) = groups_of(a, b)
  assert [case.label for case in group.cases] == ["dense, [a]", "dense, [b]"]
  assert [[one["pred"] for one in case.predictions] for case in group.cases] == [["of a"], ["of b"]]
  assert group.notes == [
    "1 rows were measured again in the same run; the later ones are shown.",
    "The runs differ in --seed, --share.",
  ]


def test_predictions_that_may_be_of_several_cases_are_of_none(tmp_path):
  rows = [row(batch_size=1), row(batch_size=4)]
  (group,) = groups_of(write_run(tmp_path / "a", rows, [said("dense", "?")]))
  assert [case.label for case in group.cases] == ["dense, batch 1", "dense, batch 4"]
  assert [case.predictions for case in group.cases] == [[], []]


def test_a_torn_last_line_is_left_out(tmp_path):
  folder = write_run(tmp_path / "a", [row()], [said("dense", "42")])
  with (folder / "predictions.jsonl").open("a") as file:
    file.write('{"policy": "den')
  run = report_rows.read_run(folder)
  assert (len(run.predictions), run.torn) == (1, ("predictions.jsonl",))
  assert "last line of predictions.jsonl was cut off" in report_html.what_ran([run])


@pytest.mark.parametrize(
  ("name", "content", "complaint"),
  [
    ("manifest.json", None, "is no run: it has no manifest.json"),
    ("manifest.json", "[" * 100_000, "is damaged, expected a JSON object"),
    ("results.jsonl", "[" * 100_000 + "\n", "line 1 is damaged"),
    ("predictions.jsonl", "[" * 100_000 + "\n", "line 1 is damaged"),
    ("predictions.jsonl", json.dumps(said("dense", "", step_s=[10**400])) + "\n", "step_s is not"),
    ("manifest.json", "[", "is damaged, expected a JSON object"),
    ("results.jsonl", None, "no finished rows"),
    ("results.jsonl", "", "no finished rows"),
    ("results.jsonl", "{\n{}\n", "line 1 is damaged"),
    ("results.jsonl", "\xff\n", "line 1 is damaged"),
    ("results.jsonl", '{"task": "a"}\n', "line 1 has no policy"),
    ("results.jsonl", json.dumps(row(score="high")) + "\n", "line 1: score is 'high'"),
    ("results.jsonl", json.dumps(row(store=["a"])) + "\n", "line 1: store is"),
    ("results.jsonl", json.dumps(row(head_maps={"a": [[1], [1, 2]]})) + "\n", "line 1: head_maps"),
    ("predictions.jsonl", json.dumps(said("dense", "", step_s="ab")) + "\n", "step_s is not"),
    ("predictions.jsonl", "7\n", "line 1 is damaged"),
  ],
)
def test_damaged_runs_are_one_line(tmp_path, name, content, complaint):
  folder = write_run(tmp_path / "a", [row()])
  if content is None:
    (folder / name).unlink()
  else:
    (folder / name).write_text(content, encoding="latin-1")
  before = sorted(folder.iterdir())
  with pytest.raises(ValueError, match=complaint) as caught:
    report.write(folder)
  assert str(folder) in str(caught.value)
  assert sorted(folder.iterdir()) == before


def test_a_page_that_cannot_be_written(tmp_path):
  folder = write_run(tmp_path / "a", [row()])
  (tmp_path / "b.html").mkdir()
  for out, complaint in {
    folder / "results.jsonl": "ends with .html",
    tmp_path / "none" / "a.html": "none is not a folder",
    tmp_path / "b.html": "is a folder",
  }.items():
    flags = type("Flags", (), {"out": str(out)})()
    with pytest.raises(ValueError, match=complaint):
      report.main(flags, [str(folder)])
  with pytest.raises(ValueError, match="no run given"):
    report.write()
  with pytest.raises(ValueError, match="comes twice"):
    report.write(folder, folder)
  with pytest.raises(ValueError, match="is not a folder"):
    report.write(tmp_path / "nothing")
  assert len(list(tmp_path.iterdir())) == 2 and len(list(folder.iterdir())) == 2
