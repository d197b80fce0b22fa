"""The needle command on a tiny random model: rows, tables, pictures, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eval import harness, lines, loop, predictions, run_needle, tasks
from kvjax import make_policy
from kvjax.types import Policy
from tests import commands
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

ROOT = Path(__file__).resolve().parents[2]
TEXT = " ".join(f"Sentence number {n} of the book ends here." for n in range(80))
TASKS = ("niah_multivalue", "pointer_chain", "lookup")
CASES = [("dense", "resident", None), ("quest", "resident", 128), ("quest", "resident", 256)]
CASES += [("streaming", "compact", 128), ("streaming", "compact", 256)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  """Flags that name a model and a text."""
  folder = tmp_path_factory.mktemp("inputs")
  config = dataclasses.replace(tiny.tied(), max_tokens=2048, vocab_size=len(TOKENS), num_layers=3)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  model = tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)
  text = folder / "book.txt"
  text.write_text(TEXT, encoding="utf-8")
  flags = [f"--model={model}", f"--text_file={text}", "--prompt_tokens=1600", "--num_samples=2"]
  return [*flags, "--budget_tokens=128,256", f"--tasks={','.join(TASKS)}"]


def _command(*arguments):
  return [sys.executable, "-m", "eval.run_needle", *arguments]


def _environment(folder):
  return os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(folder / "cache")}


def _run(*arguments, folder):
  return subprocess.run(
    _command(*arguments),
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=_environment(folder),
  )


def _rows(folder):
  return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def _answers(folder):
  """Key -> prediction, each of them once."""
  found = predictions.read(folder / "predictions.jsonl")
  assert len(found) == len((folder / "predictions.jsonl").read_text().splitlines())
  return {lines.key_of(one): one for one in found}


def _of_row(row, answers):
  return [one for one in answers.values() if loop.row_key(one) == loop.row_key(row)]


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  done = _run(*inputs, "--policies=quest,streaming,dense", "--out_dir=out", folder=folder)
  assert done.returncode == 0, done.stderr
  return done, folder / "out"


def test_the_run_folder(finished):
  pictures = ["accuracy_bytes.png", "accuracy_speed.png", "deltas.png"]
  names = sorted(path.name for path in finished[1].iterdir())
  assert names == [*pictures, "manifest.json", "predictions.jsonl", "results.jsonl"]
  manifest = json.loads((finished[1] / "manifest.json").read_text())
  assert manifest["flags"]["num_samples"] == 2 and list(manifest["data"]) == ["book.txt"]


def test_a_row_for_each_combination_dense_first(finished):
  keys = [(r["task"], r["policy"], r["store"], r["budget_tokens"]) for r in _rows(finished[1])]
  assert keys == [(task, *case) for task in TASKS for case in CASES]


def test_the_fields_of_a_row(finished):
  rows, predicted = _rows(finished[1]), _answers(finished[1])
  dense = {row["task"]: row for row in rows if row["policy"] == "dense"}
  for row in rows:
    answers, baseline = _of_row(row, predicted), dense[row["task"]]
    assert row["num_examples"] == 2 == len(answers) and row["metric"] == "string_match_all"
    assert row["score"] == sum(answer["score"] for answer in answers) / 2
    for answer in answers:
      assert answer["score"] == tasks.score(row["task"], answer["pred"], answer["answers"])
    steps = [second for answer in answers for second in answer["step_s"]]
    assert row["decode_tokens_per_s"] == len(steps) / sum(steps)
    assert row["dense_score"] == baseline["score"]
    if baseline["score"]:
      assert row["retention"] == row["score"] / baseline["score"]
    assert row["speedup_vs_dense"] == baseline["tpot_s_p50"] / row["tpot_s_p50"]
    assert 1400 < row["prompt_tokens"] <= 1600 and row["ttft_s_p50"] > 0
    assert row["simulated"] is False and row["batch_size"] == 1
    assert 0 < row["question_tokens"] < 400 and row["window_tokens"] is None
    assert "answers" not in row
  assert rows[-1]["device_kv_bytes"] < rows[0]["device_kv_bytes"] <= rows[-1]["peak_kv_bytes"]


def test_shared_prefill_gives_the_same_answers(inputs, finished, tmp_path):
  flags = ("--policies=quest,streaming,dense", "--share_prefill", "--out_dir=out")
  done = commands.run("eval.run_needle", *inputs, *flags, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  shared, own = _answers(tmp_path / "out"), _answers(finished[1])
  assert {key: one["pred"] for key, one in shared.items()} == {
    key: one["pred"] for key, one in own.items()
  }
  for row, alone in zip(_rows(tmp_path / "out"), _rows(finished[1]), strict=True):
    assert row["score"] == alone["score"]
    assert row["ttft_s_p50"] is None is row["prefill_tokens_per_s"]
    assert row["tpot_s_p50"] > 0 and row["device_kv_bytes"] == alone["device_kv_bytes"]


def test_every_policy_was_asked_the_same(finished):
  asked = {}
  for answer in _answers(finished[1]).values():
    expected = asked.setdefault((answer["task"], answer["id"]), answer["answers"])
    assert answer["answers"] == expected
  assert len(asked) == 6


def test_what_is_printed(finished):
  plan, _, report = finished[0].stdout.partition("to be allocated:")
  assert "book.txt, sha256" in plan and "tiny, sha256" in plan and "6 for each of 5" in plan
  assert "question tokens" in plan
  assert "layers     quest: " in plan
  header = next(line for line in report.splitlines() if "niah_multivalue".replace("_", " ") in line)
  assert all(task.replace("_", " ") in header for task in TASKS)
  assert "quest@128" in report and "vs dense" in report and "deltas.png are in out" in report
  assert "Traceback" not in finished[0].stderr


def test_options_tell_policies_apart(inputs, tmp_path):
  policies = "dense,quest,quest:score=mean:candidates=4,snapkv:window=16:new_tokens=300"
  flags = [*inputs[:2], "--prompt_tokens=700", "--num_samples=1", "--tasks=niah_single"]
  flags += [f"--policies={policies}", "--budget_tokens=128", "--out_dir=out"]
  done = commands.run("eval.run_needle", *flags, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  rows = _rows(tmp_path / "out")
  assert [row["policy"] for row in rows] == policies.split(",")
  assert [row["window_tokens"] for row in rows] == [None, None, None, 16]
  assert rows[2]["metadata_bytes"] < rows[1]["metadata_bytes"]  # a mean has half of two bounds
  assert rows[3]["budget_tokens"] == 128  # of the prompt, as was asked for
  assert "quest:score=mean:candidates=4@128" in done.stdout


def test_whether_the_question_was_in_the_window():
  def chooses(budget_tokens=64, page_size=16, *, window=32):
    return Policy("chooses", 64, ("compact",), *[lambda: None] * 3, keep=lambda: None)

  assert harness.observation_window(chooses(), chooses) == 32
  assert harness.observation_window(chooses()._replace(keep=None), chooses) is None
  assert harness.observation_window(make_policy("streaming")) is None  # what it keeps is fixed
  for spec, window in (("snapkv", 32), ("snapkv:pool=max", 32), ("snapkv:window=16", 16)):
    assert harness.observation_window(make_policy(spec)) == window
  assert harness.observation_window(make_policy("omnikv:window=8")) is None  # it drops nothing


@pytest.mark.parametrize(
  ("arguments", "complaint"),
  [
    (["--policies=dense,qest"], "unknown policy 'qest'"),
    (["--policies="], "--policies is empty"),
    (["--policies=quest:score=best"], "policy 'quest:score=best': unknown score 'best'"),
    (["--policies=quest:page_size=8"], "page_size is given apart from it too"),
    (["--policies=duo:profile=no.npz"], "policy 'duo', option profile: no.npz is not a file"),
    (["--policies=quest:score=mean,quest:score=mean"], "quest:score=mean on resident comes twice"),
    (["--policies=quest,quest"], "--policies: quest on resident comes twice"),
    (["--policies=quest", "--stores=compact"], "cannot run on store 'compact'"),
    (["--budget_tokens=8"], "under one page of 16"),
    (["--budget_tokens=many"], "--budget_tokens: 'many'"),
    (["--tasks=niah"], "unknown task 'niah'"),
    (["--tasks="], "--tasks is empty, expected some of niah_single"),
    (["--tasks=lookup,lookup"], "--tasks=lookup,lookup: expected names, each of them once"),
    (["--prompt_tokens=20000"], "--prompt_tokens=20000 exceeds the 2048"),
    (["--prompt_tokens=2000"], "prompt and answer of 2[0-9]* tokens exceed the 2048"),
    (["--prompt_tokens=90", "--tasks=niah_single"], "has no room for the question"),
    (["--text_file=nowhere.txt"], "nowhere.txt is not a file"),
    (["--text_dir=nowhere"], "--text_file and --text_dir are both given"),
    (["--model=nonsense"], "unknown model 'nonsense'"),
    (["--model=random:stories260k@8192"], "has no tokenizer"),
    (["--out_dir=taken"], "taken already holds results.jsonl"),
    (["--out_dir=begun"], "begun holds another run: --tasks was 'lookup' there and is None now"),
    (["--out_dir=broken"], "manifest.json is no manifest"),
    (["--process_id=1"], "--process_id=1 is not one of 0 to 0"),
    (["--process_id=2", "--num_processes=2"], "--process_id=2 is not one of 0 to 1"),
    (["--num_processes=2"], "--coordinator_address=None: expected HOST:PORT"),
    (["--num_processes=2", "--coordinator_address=here"], "--coordinator_address=here: expected"),
  ],
)
def test_bad_input(inputs, tmp_path, monkeypatch, arguments, complaint):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "taken").mkdir()
  (tmp_path / "taken/results.jsonl").touch()
  for name, manifest in (("begun", '{"flags": {"tasks": "lookup"}}'), ("broken", '{"flags"')):
    (tmp_path / name).mkdir()
    (tmp_path / name / "manifest.json").write_text(manifest, encoding="utf-8")
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(ValueError, match=complaint) as caught:
    run_needle.main(_flags([*inputs, "--out_dir=out", *arguments]))
  assert "\n" not in str(caught.value)
  assert sorted(tmp_path.rglob("*")) == before


class _Flags:
  """Parsed flags that are not global."""

  policies, stores = ("dense", "quest", "streaming"), ()
  page_size, seed, text_dir = 16, 0, None
  batch_size, limit, share_prefill = 1, None, False
  num_processes, process_id, coordinator_address = 1, 0, None

  def __init__(self, **values):
    self.__dict__.update(values)


def _flags(arguments):
  values = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
  ints = {"prompt_tokens", "num_samples", "process_id", "num_processes"} & set(values)
  values |= {name: int(values[name]) for name in ints}
  lists = {"policies", "stores", "budget_tokens", "tasks"} & set(values)
  return _Flags(
    **values | {name: values[name].split(",") if values[name] else [] for name in lists}
  )


def test_an_interrupted_run_goes_on(inputs, finished, tmp_path):
  tasks = TASKS[:2]  # the second is long enough to be interrupted
  flags = (*inputs, "--policies=quest,dense", "--budget_tokens=128", "--out_dir=out")
  flags += (f"--tasks={','.join(tasks)}",)
  rows = tmp_path / "out" / "results.jsonl"
  with subprocess.Popen(
    _command(*flags),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    cwd=tmp_path,
    env=_environment(tmp_path),
  ) as process:
    assert process.stderr is not None
    for line in process.stderr:  # the bar: a text stream ends lines at its carriage returns too
      if tasks[1] in line:  # the first is done
        break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
  assert process.returncode == 130
  before = [json.loads(line) for line in rows.read_text().splitlines()]
  assert [(row["policy"], row["task"]) for row in before] == [(c[0], TASKS[0]) for c in CASES[:2]]
  answered = predictions.read(tmp_path / "out" / "predictions.jsonl")
  assert 4 <= len(answered) < 8
  kept = f"{len(answered)} answers are in out, go on with the same command and --out_dir=out"
  assert rest.endswith(f"stopped: interrupted; {kept}\n") and "Traceback" not in rest
  done = _run(*flags, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  assert f"{len(answered)} are answered already" in done.stdout
  again, own = _answers(tmp_path / "out"), _answers(finished[1])
  assert list(again.values())[: len(answered)] == answered
  assert len(again) == 8
  assert all(one["pred"] == own[key]["pred"] for key, one in again.items())
  after = _rows(tmp_path / "out")
  assert after[: len(before)] == before and len(after) == 4
  scores = {loop.row_key(row): row["score"] for row in _rows(finished[1])}
  assert all(row["score"] == scores[loop.row_key(row)] for row in after)


def test_two_processes_make_one_result(inputs, finished, tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  shared = [*inputs, f"--tasks={TASKS[2]}", "--policies=dense", "--out_dir=out"]
  shared += ["--num_processes=2", f"--coordinator_address={address}"]

  def run(process):
    return subprocess.run(
      _command(*shared, f"--process_id={process}"),
      capture_output=True,
      text=True,
      check=False,
      timeout=200,
      cwd=tmp_path,
      # Programs of two processes are not to be loaded by one as the other has stored them.
      env=_environment(tmp_path) | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    )

  with ThreadPoolExecutor() as threads:
    first, second = threads.map(run, range(2))
  assert first.returncode == second.returncode == 0, first.stderr + second.stderr
  assert "are in out" in first.stdout and second.stdout == "" == second.stderr
  answers = _answers(tmp_path / "out")
  assert {key: one["pred"] for key, one in answers.items()} == {
    key: one["pred"]
    for key, one in _answers(finished[1]).items()
    if key[0] == "dense" and key[3] == TASKS[2]
  }
  assert len(answers) == 2 == len({one["batch"] for one in answers.values()})
  (row,) = _rows(tmp_path / "out")
  assert row["num_examples"] == 2 and row["decode_tokens_per_s"] > 0
