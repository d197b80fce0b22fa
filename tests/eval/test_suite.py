"""From a user's folder to rows, on a tiny random model; downloads with a hub that is made up."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from eval import hub, run_leval, run_longbench, suite, tasks
from models import load
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

ROOT = Path(__file__).resolve().parents[2]
CASES = {"longbench": run_longbench.SUITE, "leval": run_leval.SUITE}


def _longbench(answer="Oslo", **fields):
  record = {"input": "Where?", "context": "It is in Oslo. " * 40, "answers": [answer]}
  return record | {"length": 120, "all_classes": None} | fields


def _leval(**fields):
  record = {"input": "It is in Oslo.", "instructions": ["Where?", "Why?"], "outputs": ["A", "B"]}
  return record | {"evaluation": "exam"} | fields


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Data of both, and a model."""
  folder = tmp_path_factory.mktemp("suite")
  files = {
    "passage_count": [_longbench("3"), _longbench("4")],
    "trec": [_longbench("b", all_classes=["a", "b"])],
    "tpo": [_leval()],
    "sci_fi": [_leval(outputs=["True [fact: False]"] * 2)],
    "news_summ": [_leval(evaluation="LLM")],
  }
  for name, records in files.items():
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (folder / f"{name}.jsonl").write_text(lines)
  config = dataclasses.replace(tiny.tied(), max_tokens=2048, vocab_size=len(TOKENS))
  extra = INFO | {"tokenizer.chat_template": CHATML}
  tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)
  tiny.write_gguf(folder / "plain.gguf", config, tiny.tensors(config), extra=INFO)
  return folder


@pytest.fixture(scope="module")
def loaded(folder):
  return load(str(folder / "tiny.gguf"))


def _run(module, *arguments, folder):
  return subprocess.run(
    [sys.executable, "-m", f"eval.{module}", *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(folder / "cache")},
  )


def test_a_run(folder):
  flags = ("--model=plain.gguf", "--data_dir=.", "--tasks=passage_count,trec", "--limit=1")
  flags += ("--policies=dense", "--prompt_tokens=900", "--out_dir=out")
  done = _run("run_longbench", *flags, folder=folder)
  assert done.returncode == 0, done.stderr
  assert "plain has no chat template: all its prompts are plain text" in done.stdout
  rows = [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]
  assert [(row["task"], row["metric"]) for row in rows] == [
    ("passage_count", "count"),
    ("trec", "classification"),
  ]
  assert all(row["num_examples"] == 1 and row["prompt_tokens"] <= 900 for row in rows)
  scored = _run("score", "--predictions=out/predictions.jsonl", folder=folder)
  assert scored.returncode == 0, scored.stderr
  for row, line in zip(rows, scored.stdout.splitlines()[2:], strict=True):
    assert line.split()[0] == row["task"]
    assert float(line.split()[-1]) == pytest.approx(100 * row["score"], abs=0.005)


def _examples(case, folder, loaded, names, prompt_tokens=None, limit=None):
  paths = suite.files(CASES[case], names, str(folder), download=False)
  records = {name: suite.jsonl.read(path, CASES[case].fields) for name, path in paths.items()}
  return suite.make_examples(CASES[case], loaded, records, prompt_tokens, limit)


def test_examples_fit_the_model(folder, loaded, capsys):
  examples = _examples("longbench", folder, loaded, ["passage_count", "trec"])
  assert [(one.task, one.id) for one in examples] == [
    *(("passage_count", "0"), ("passage_count", "1"), ("trec", "0"))
  ]
  assert all(len(one.prompt_ids) + one.new_tokens <= 2048 for one in examples)
  assert len(_examples("longbench", folder, loaded, ["passage_count"], limit=1)) == 1
  assert [one.id for one in _examples("leval", folder, loaded, ["tpo"])] == ["0-0", "0-1"]
  halves = _examples("leval", folder, loaded, ["sci_fi", "tpo"], limit=1)
  assert [one.id for one in halves] == ["0-0", "0-0-fact", "0-0"]  # one question of each
  assert not capsys.readouterr().out  # it has a template
  with pytest.raises(ValueError, match="exceed the 2048 that tiny was trained for"):
    _examples("longbench", folder, loaded, ["trec"], prompt_tokens=2000)


def test_a_question_that_is_cut_is_said(loaded, capsys):
  long = "Where was that? " * 20
  records = {"trec": [_longbench("a", input=one, all_classes=["a"]) for one in ("Where?", long)]}
  (short, longer) = suite.make_examples(run_longbench.SUITE, loaded, records, 500)
  assert len(longer.prompt_ids) == 500 and short.question_tokens < longer.question_tokens < 500
  assert "trec: in 1 of 2 prompts the question, with" in capsys.readouterr().out
  (short, longer) = suite.make_examples(run_longbench.SUITE, loaded, records, 700)
  assert len(longer.prompt_ids) == 700  # cut, but not within the question
  assert not capsys.readouterr().out
  records["trec"] = [_longbench("a", input=long, context="", all_classes=["a"])]
  suite.make_examples(run_longbench.SUITE, loaded, records, 700)  # long, but not cut
  assert not capsys.readouterr().out


def test_what_cannot_be_scored_is_said_before_the_run(folder, loaded, monkeypatch):
  with pytest.raises(ValueError, match="news_summ has no question that can be scored"):
    _examples("leval", folder, loaded, ["news_summ"])
  records = {"trec": [_longbench()], "passage_retrieval_en": [_longbench("3")]}
  records["qasper"] = [_longbench(answers=[])]
  for name, record in records.items():
    with pytest.raises(ValueError, match=f"{name}, question 0: "):
      suite.make_examples(run_longbench.SUITE, loaded, {name: record}, None)


def test_tasks_and_folders():
  known = run_longbench.SUITE.tasks
  with pytest.raises(ValueError, match="--tasks=trec,trec: expected names, each of them once"):
    tasks.choose(["trec", "trec"], known)
  with pytest.raises(ValueError, match="--tasks is empty, expected some of narrativeqa, qasper,"):
    tasks.choose([], known)
  with pytest.raises(ValueError, match="unknown task 'tpo', expected some of narrativeqa"):
    tasks.choose(["tpo"], known)
  with pytest.raises(ValueError, match="--data_dir is needed"):
    suite.files(run_leval.SUITE, ["tpo"], None, download=False)


class _Hub:
  """A hub that has what it is given: file -> bytes."""

  def __init__(self, files):
    self.files, self.asked = files, []

  def hf_hub_download(self, repo_id, filename, repo_type, local_dir):
    self.asked.append((repo_id, repo_type, filename))
    if filename not in self.files:
      raise OSError("no network\nhere")
    path = Path(local_dir) / filename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(self.files[filename])
    return str(path)


def _archive(path, *names):
  with zipfile.ZipFile(path, "w") as archive:
    for name in names:
      archive.writestr(f"data/{name}.jsonl", json.dumps(_longbench()))
  return path.read_bytes()


def test_download_of_longbench(tmp_path, monkeypatch, capsys):
  made = _Hub({"data.zip": _archive(tmp_path / "a.zip", "qasper", "trec_e", "lcc")})
  monkeypatch.setattr(hub, "_package", lambda: made)
  folder = tmp_path / "data"
  paths = suite.files(run_longbench.SUITE, ["qasper", "trec_e"], str(folder), download=True)
  assert all(path.is_file() for path in paths.values())
  assert sorted(path.name for path in folder.iterdir()) == [
    *("data.zip", "qasper.jsonl", "trec_e.jsonl")
  ]
  assert made.asked == [("THUDM/LongBench", "dataset", "data.zip")]
  assert capsys.readouterr().out.startswith("fetching data.zip of THUDM/LongBench from huggingface")
  suite.files(run_longbench.SUITE, ["qasper"], str(folder), download=True)
  assert len(made.asked) == 1 and not capsys.readouterr().out  # it is there
  with pytest.raises(ValueError, match=r"data.zip has no qmsum.jsonl"):
    suite.files(run_longbench.SUITE, ["qmsum"], str(folder), download=True)
  made.files["data.zip"] = b"half"
  with pytest.raises(ValueError, match="is damaged"):
    suite.files(run_longbench.SUITE, ["lcc"], str(folder), download=True)


def test_download_of_leval(tmp_path, monkeypatch):
  files = {"LEval/Exam/tpo.jsonl": b"{}", "LEval/Generation/news_summ.jsonl": b"{}"}
  made = _Hub(files)
  monkeypatch.setattr(hub, "_package", lambda: made)
  paths = suite.files(run_leval.SUITE, ["tpo", "news_summ"], str(tmp_path), download=True)
  assert [str(path.relative_to(tmp_path)) for path in paths.values()] == list(files)
  with pytest.raises(ValueError, match=r"codeU.jsonl of L4NLP/LEval could not be fetched"):
    suite.files(run_leval.SUITE, ["codeU"], str(tmp_path), download=True)


def test_nothing_is_fetched_unasked(tmp_path, monkeypatch):
  made = types.SimpleNamespace()
  monkeypatch.setattr(hub, "_package", lambda: made)
  with pytest.raises(ValueError, match="--download"):
    suite.files(run_leval.SUITE, ["tpo"], str(tmp_path), download=False)


def test_the_hub_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(ValueError, match=r"huggingface_hub; .*kvjax\[eval\]"):
    hub._package()
