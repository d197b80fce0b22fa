"""The main job on a tiny random model with a real tokenizer, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from models import build, families, load, saved
from scripts import quickstart
from tests import commands
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

ROOT = Path(__file__).resolve().parents[2]
TEXT = " ".join(f"Sentence number {n} of the book ends here." for n in range(40))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  """Flags that name a model and a text."""
  folder = tmp_path_factory.mktemp("inputs")
  config = dataclasses.replace(tiny.tied(), max_tokens=1024, vocab_size=len(TOKENS), num_layers=3)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  model = tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)
  text = folder / "book.txt"
  text.write_text(TEXT, encoding="utf-8")
  return [f"--model={model}", f"--text_file={text}", "--prompt_tokens=800", "--budget_tokens=256"]


def _run(*arguments, folder):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(folder / "cache")}
  return subprocess.run(
    [sys.executable, "-m", "scripts.quickstart", *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=environment,
  )


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  done = _run(*inputs, "--max_new_tokens=8", "--out_dir=out", folder=folder)
  assert done.returncode == 0, done.stderr
  return done, folder / "out"


def test_the_run_folder(finished):
  _, out_dir = finished
  names = sorted(path.name for path in out_dir.iterdir())
  assert names == ["accuracy_speed.png", "manifest.json", "results.jsonl"]
  manifest = json.loads((out_dir / "manifest.json").read_text())
  assert manifest["flags"]["budget_tokens"] == 256
  assert manifest["model"]["name"] == "tiny" and list(manifest["data"]) == ["book.txt"]


def test_the_rows(finished):
  rows = [json.loads(line) for line in (finished[1] / "results.jsonl").read_text().splitlines()]
  assert [(row["policy"], row["store"], row["budget_tokens"]) for row in rows] == [
    ("dense", "resident", None),
    ("quest", "resident", 128),
    ("quest", "resident", 256),
    ("streaming", "compact", 128),
  ]
  assert rows[0]["speedup_vs_dense"] == 1.0
  dense, *others = rows
  for row in rows:
    assert row["num_examples"] == 4 == len(row["answers"])
    assert row["output_tokens"] == 8 and 750 < row["prompt_tokens"] <= 800
    assert row["score"] == sum(answer["correct"] for answer in row["answers"]) / 4
    assert 0 < row["tpot_s_p50"] <= row["tpot_s_p99"] and row["ttft_s_p50"] > 0
    assert row["speedup_vs_dense"] == dense["tpot_s_p50"] / row["tpot_s_p50"]
    assert row["simulated"] is False
  assert others[0]["metadata_bytes"] > dense["metadata_bytes"]
  assert others[2]["device_kv_bytes"] < dense["device_kv_bytes"] <= others[2]["peak_kv_bytes"]


def test_what_is_printed(finished):
  done, _ = finished
  plan, _, report = done.stdout.partition("to be allocated:")
  assert "book.txt, sha256" in plan and "tiny, sha256" in plan and "4 for each of 4" in plan
  assert "quest" in report and "vs dense" in report and "5 digits at 20%" in report
  assert "Traceback" not in done.stderr and "streaming@128 question 4/4" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "yi", "qwen2", "opt", "opt-350m"])
def test_every_family_runs(family, inputs, tmp_path):
  """With a checkpoint of our own, which carries the tokenizer; Llama is every other test here."""
  config = dataclasses.replace(tiny.FAMILIES[family], max_tokens=1024, vocab_size=len(TOKENS))
  if config.window_tokens is not None:
    config = dataclasses.replace(config, window_tokens=200)  # a ring, shorter than the prompt
  params = families.by_path(build(config).init(jax.random.key(0), "float32"))
  folder = tmp_path / "model"
  saved.write(
    folder,
    lambda path: np.asarray(params[path]),
    name=family,
    config=config,
    dtype="float32",
    tokenizer=load(inputs[0].removeprefix("--model=")).tokenizer,
    source_hash="none",
  )
  arguments = [f"--model={folder}", *inputs[1:], "--max_new_tokens=4", "--out_dir=out"]
  done = commands.run("scripts.quickstart", *arguments, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  rows = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
  assert [json.loads(row)["model"] for row in rows] == [family] * 4


@pytest.mark.parametrize(
  ("arguments", "complaint"),
  [
    (["--policies=dense,qest"], "unknown policy 'qest'"),
    (["--policies="], "--policies="),
    (["--policies=quest,quest"], "--policies=quest,quest"),
    (["--budget_tokens=16"], "--budget_tokens=16"),
    (["--prompt_tokens=20000"], "exceed the 1024"),
    (["--prompt_tokens=1000", "--max_new_tokens=25"], "prompt and answer of 1025 tokens"),
    (["--prompt_tokens=9"], "has no room for the question"),
    (["--text_file=nowhere.txt"], "nowhere.txt is not a file"),
    (["--model=nonsense"], "unknown model 'nonsense'"),
    (["--model=random:stories260k@8192"], "has no tokenizer"),
    (["--out_dir=taken"], "taken already holds results.jsonl"),
  ],
)
def test_bad_input(inputs, tmp_path, monkeypatch, arguments, complaint):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "taken").mkdir()
  (tmp_path / "taken/results.jsonl").touch()
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(ValueError, match=complaint) as caught:
    quickstart.main(_flags([*inputs, "--out_dir=out", *arguments]))
  assert "\n" not in str(caught.value)
  assert sorted(tmp_path.rglob("*")) == before


def test_policies_with_options():
  names = ["streaming:sinks=8", "quest:score=mean", "dense"]
  chosen = quickstart.choose_policies(names, 256)
  assert [(policy.name, policy.budget_tokens) for policy in chosen] == [
    ("dense", None),
    ("streaming:sinks=8", 128),
    ("quest:score=mean", 128),
    ("quest:score=mean", 256),
  ]


def test_bad_input_exits_with_one_line(inputs, tmp_path):
  done = _run(*inputs, "--policies=qest", folder=tmp_path)
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.startswith("error: unknown policy 'qest'") and done.stderr.count("\n") == 1
  assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(inputs, tmp_path):
  command = [sys.executable, "-m", "scripts.quickstart", *inputs, "--out_dir=out"]
  with subprocess.Popen(
    command,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(tmp_path / "cache")},
  ) as process:
    assert process.stderr is not None
    for line in process.stderr:  # the bar: a text stream ends lines at its carriage returns too
      if "compiling" in line:
        break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
  assert process.returncode == 130
  assert rest.endswith("stopped: interrupted\n") and "Traceback" not in rest
  assert not (tmp_path / "out").exists()


def test_a_short_text(inputs, tmp_path):
  path = tmp_path / "short.txt"
  path.write_text(TEXT[:100])
  with pytest.raises(ValueError, match="the text is too short"):
    quickstart.main(_flags([*inputs, f"--out_dir={tmp_path}/out", f"--text_file={path}"]))
  assert not (tmp_path / "out").exists()


class _Flags:
  """Parsed flags that are not global."""

  policies = ("dense", "quest", "streaming")
  max_new_tokens, seed, text_file = 8, 0, None

  def __init__(self, **values):
    self.__dict__.update(values)


def _flags(arguments):
  values = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
  numbers = ("prompt_tokens", "budget_tokens", "max_new_tokens")
  values |= {name: int(values[name]) for name in numbers if name in values}
  if "policies" in values:
    values["policies"] = values["policies"].split(",") if values["policies"] else []
  return _Flags(**values)


@pytest.mark.slow
def test_answers_are_cut_at_the_stop_token():
  loaded = load("smollm2-135m")
  tokens = [*loaded.tokenizer.encode(" 12345."), loaded.tokenizer.eos_ids[0]]
  tokens += loaded.tokenizer.encode(" 99999")
  question = quickstart.needle.Needle([1], "99999", "amber-anchor", 0.5, 5, 1)
  answer = quickstart._answer(loaded, question, tokens)
  assert answer["given"] == "12345." and not answer["correct"] and not answer["limit_hit"]


@pytest.mark.slow
def test_the_real_model_finds_the_numbers(tmp_path):
  arguments = ["--policies=dense", "--prompt_tokens=700", "--budget_tokens=512"]
  quickstart.main(_flags(["--model=smollm2-135m", f"--out_dir={tmp_path}/out", *arguments]))
  (row,) = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
  assert row["score"] == 1.0
