"""scripts.generate on a tiny random model with a real tokenizer, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax import CacheConfig, make_policy, prepare
from models import load
from scripts import generate
from tests import commands
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  config = dataclasses.replace(tiny.tied(), max_tokens=256, vocab_size=len(TOKENS), num_layers=3)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  return tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)


def _run(*arguments, folder, stdin="", **environment):
  environment |= {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(folder / "cache")}
  return subprocess.run(
    [sys.executable, "-m", "scripts.generate", *arguments],
    input=stdin,
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=os.environ | environment,
  )


def test_plan_text_and_statistics(model, tmp_path):
  arguments = [f"--model={model}", "--prompt_file=-", "--nochat", "--max_new_tokens=6"]
  arguments += ["--budget_tokens=32", "--temperature=0.8", "--top_p=0.9"]
  done = _run(*arguments, folder=tmp_path, stdin="a question " * 6)
  assert done.returncode == 0, done.stderr
  plan, *_, statistics = done.stdout.strip().split("\n\n")
  assert plan.startswith("model   tiny, weights ")
  for part in (
    "up to 6 new",
    "on store resident; 1 of 3 layers select",
    "while the prompt is read",
  ):
    assert part in plan
  for part in ("TTFT ", "tokens", "KV ", "compiled in "):
    assert part in statistics
  assert "\n" not in statistics


def test_two_devices_say_the_same(model, tmp_path):
  arguments = [f"--model={model}", "--prompt=a question", "--nochat", "--max_new_tokens=6"]
  split = (*arguments, "--devices=2")
  two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  one, both = _run(*arguments, folder=tmp_path), _run(*split, folder=tmp_path, **two)
  assert one.returncode == both.returncode == 0, both.stderr
  assert one.stdout.split("\n\n")[1] == both.stdout.split("\n\n")[1]
  assert "device  each of 2 " in both.stdout
  refused = commands.run("scripts.generate", *split, folder=tmp_path)
  assert refused.returncode == 2
  expected = "error: a mesh of data=1 and model=2 needs 2 devices, and JAX has 1; ask for fewer\n"
  assert refused.stderr == expected


def test_the_plan_tells_what_the_host_holds(model):
  loaded = load(str(model))
  for store, expected in (("resident", "nothing"), ("whole_page", "of pages")):
    policy = make_policy("infinigen", budget_tokens=32, page_size=16)
    runner = prepare(loaded.model, policy, store, CacheConfig(1, 128, 16, "float32"))
    host = generate.plan(loaded, runner, 100, 6).splitlines()[-1]
    assert host.startswith("host    ")
    assert host.endswith(expected)


def test_the_chat_template_is_used_unless_refused(model):
  loaded = load(str(model))
  chat = generate.encode(loaded, "why", chat=True)
  plain = generate.encode(loaded, "why", chat=False)
  assert len(chat) > len(plain)
  assert "user" in loaded.tokenizer.decode(chat, skip_special=False)


def test_prompts_come_from_one_place(tmp_path):
  path = tmp_path / "prompt.txt"
  path.write_text("from a file", encoding="utf-8")
  assert generate.read_prompt(None, str(path)) == "from a file"
  assert generate.read_prompt("given", None) == "given"
  for prompt, prompt_file in ((None, None), ("given", str(path))):
    with pytest.raises(ValueError, match="exactly one of --prompt and --prompt_file"):
      generate.read_prompt(prompt, prompt_file)
  with pytest.raises(ValueError, match="--prompt is empty"):
    generate.read_prompt("  ", None)
  path.write_bytes(b"\xff\xfe\xff")
  with pytest.raises(ValueError, match=r"prompt.txt is not UTF-8 text"):
    generate.read_prompt(None, str(path))


def test_standard_input_that_is_closed(monkeypatch):
  monkeypatch.setattr("sys.stdin", None)
  with pytest.raises(ValueError, match="standard input is closed"):
    generate.read_prompt(None, "-")


def test_a_model_without_a_tokenizer_is_refused():
  with pytest.raises(ValueError, match="has no tokenizer and cannot read a prompt"):
    generate.encode(load("random:stories260k"), "why", chat=False)


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["--policy=best"], "unknown policy 'best'"),
    (["--policy=quest:score=best"], "policy 'quest:score=best': unknown score 'best'"),
    (["--budget_tokens=8"], "budget_tokens 8 is under one page of 16"),
    (["--store=compact"], "policy 'quest' cannot run on store 'compact'"),
    (["--max_new_tokens=999"], "the model's context is 256"),
    (["--max_new_tokens=0"], "max_new_tokens"),
    (["--seed=4294967296"], "flag --seed=4294967296"),
    (["--top_p=0"], "top_p 0.0 must be above 0"),
    (["--prompt_file=absent.txt"], "exactly one of --prompt and --prompt_file"),
    (["--model=absent.gguf"], "unknown model 'absent.gguf'"),
  ],
)
def test_bad_input_is_one_line(model, tmp_path, arguments, expected):
  arguments = [f"--model={model}", "--prompt=why", *arguments]
  done = commands.run("scripts.generate", *arguments, folder=tmp_path)
  assert done.returncode == 2
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert expected in line
  assert "Traceback" not in done.stderr
