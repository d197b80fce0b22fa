"""scripts.convert_checkpoint from every format that it reads, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import models
from models import saved
from tests import commands
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dataclasses.replace(tiny.CONFIG, vocab_size=len(TOKENS), max_tokens=256)


def run(command, *arguments, folder):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(folder / "cache")}
  return subprocess.run(
    [sys.executable, "-m", command, *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=environment,
  )


def convert(source, *arguments, folder, run=commands.run):
  return run(
    "scripts.convert_checkpoint",
    f"--model={source}",
    f"--out_dir={folder / 'saved'}",
    *arguments,
    folder=folder,
  )


def write_gguf(folder: Path) -> Path:
  extra = INFO | {"tokenizer.chat_template": CHATML}
  return tiny.write_gguf(folder / "tiny.gguf", CONFIG, tiny.tensors(CONFIG), extra=extra)


def write_shards(folder: Path) -> Path:
  return tiny.write_folder(folder / "tiny", CONFIG, tiny.tensors(CONFIG), shards=3)


@pytest.mark.parametrize("make", [write_gguf, write_shards])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_converted_is_the_same_model(make, dtype, tmp_path):
  source = make(tmp_path)
  done = convert(source, f"--dtype={dtype}", folder=tmp_path)
  assert done.returncode == 0, done.stderr
  before, after = (models.load(str(path), dtype) for path in (source, tmp_path / "saved"))
  assert after.name == before.name == "tiny"
  assert after.model.config == before.model.config
  assert jax.tree.structure(after.params) == jax.tree.structure(before.params)
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
  assert saved.describe(tmp_path / "saved").source_hash == before.content_hash
  if before.tokenizer is None:
    assert after.tokenizer is None
  else:
    question = before.tokenizer.chat([{"role": "user", "content": "the 12 tins"}])
    assert after.tokenizer.chat([{"role": "user", "content": "the 12 tins"}]) == question
    assert after.tokenizer.encode(question) == before.tokenizer.encode(question)


def test_plan_and_result(tmp_path):
  done = convert(write_gguf(tmp_path), folder=tmp_path, run=run)
  model, text, source, target, wrote = done.stdout.splitlines()
  count = sum(leaf.size for leaf in jax.tree.leaves(models.param_shapes(CONFIG)))
  assert model == f"model   tiny, llama of 2 layers, {count:,} parameters in 21 tensors"
  assert text == f"text    tokenizer of {len(TOKENS)} ids"
  assert source == "from    tiny.gguf"
  assert target == f"to      {tmp_path / 'saved'}, {count * 4 / 1e6:.1f} MB in float32"
  digest = saved.describe(tmp_path / "saved").content_hash
  assert wrote.startswith("wrote   44 files, ") and wrote.endswith(f"sha256 {digest}")
  assert f"/{count * 4 / 1e3:.0f}k [" in done.stderr  # the progress bar


def test_every_command_takes_the_folder(tmp_path):
  convert(write_gguf(tmp_path), folder=tmp_path)
  arguments = [f"--model={tmp_path / 'saved'}", "--prompt=the tin", "--max_new_tokens=4"]
  done = commands.run("scripts.generate", *arguments, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("model   tiny, weights ")


def test_missing_tensors_are_named_before_anything_is_written(tmp_path):
  weights = tiny.tensors(CONFIG)
  absent = [name for name in weights if ".1.mlp." in name]
  for name in absent:
    del weights[name]
  source = tiny.write_folder(tmp_path / "tiny", CONFIG, weights)
  done = convert(source, folder=tmp_path)
  assert done.returncode == 2 and "Traceback" not in done.stderr
  assert len(absent) == 3 and all(name in done.stderr for name in absent)
  assert done.stdout == "" and not (tmp_path / "saved").exists()


def test_weights_that_are_not_finite_leave_nothing(tmp_path):
  weights = tiny.tensors(CONFIG)
  weights["model.layers.1.self_attn.q_proj.weight"][2, 3] = np.nan
  source = tiny.write_folder(tmp_path / "tiny", CONFIG, weights)
  done = convert(source, folder=tmp_path)
  assert done.returncode == 2 and "Traceback" not in done.stderr
  assert "model.layers.1.self_attn.q_proj.weight holds 1 numbers that are not f" in done.stderr
  assert not [path for path in tmp_path.iterdir() if "saved" in path.name]


@pytest.mark.parametrize(
  ("source", "arguments", "expected"),
  [
    ("random:llama-3.1-8b", (), "random:llama-3.1-8b has no files to convert; give a .gguf file"),
    ("absent", (), "unknown model 'absent': it is neither a known name nor a path"),
    ("absent", ("--dtype=int8",), "flag --dtype=int8: value should be one of"),
    ("absent", ("--out_dir=.",), ". exists already, expected the path of a new folder"),
    ("absent", ("--out_dir=",), ". exists already, expected the path of a new folder"),
  ],
)
def test_bad_input_is_one_line(source, arguments, expected, tmp_path):
  done = convert(source, *arguments, folder=tmp_path)
  assert done.returncode == 2
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert expected in line
  assert "Traceback" not in done.stderr


def test_a_checkpoint_of_ours_is_not_converted_again(tmp_path):
  source = write_gguf(tmp_path)
  assert convert(source, folder=tmp_path).returncode == 0
  done = convert(source, folder=tmp_path)
  assert f"error: {tmp_path / 'saved'} exists already" in done.stderr
  done = convert(tmp_path / "saved", f"--out_dir={tmp_path / 'again'}", folder=tmp_path)
  assert "saved is a checkpoint of kvjax already; give --model what it came from" in done.stderr
