"""scripts.inspect_model: bytes that agree with what a real run allocates, without allocating."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from kvjax import CacheConfig, cache_bytes, make_policy, prepare
from kvjax.engine import steps
from models import abstract, load
from models.memory import params_bytes
from scripts import inspect_model
from tests import commands

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments, folder):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(
    [sys.executable, "-m", "scripts.inspect_model", *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=environment,
  )


@pytest.mark.parametrize(("policy", "store"), [("quest", "resident"), ("streaming", "compact")])
def test_the_bytes_are_those_of_a_real_run(policy, store):
  model, shapes = abstract("random:stories260k", "float32")
  chosen = make_policy(policy, budget_tokens=64, page_size=16)
  runner = prepare(model, chosen, store, CacheConfig(2, 256, base_tokens=256))
  memory = inspect_model.compile_decode_step(runner, shapes).memory_analysis()
  rows = {row["what"]: row for row in inspect_model.report(runner, shapes, memory)}
  params = load("random:stories260k").params
  empty = steps.empty_cache(runner)
  cache = cache_bytes(steps.seal(runner, empty))
  assert rows["weights"]["device_bytes"] == params_bytes(params)
  assert rows["keys and values"]["device_bytes"] == cache.keys_values
  assert rows["page tables"]["device_bytes"] == cache.tables
  assert rows["metadata of policy and store"]["device_bytes"] == cache.metadata
  assert rows["cache while the prompt is read"]["device_bytes"] == cache_bytes(empty).total
  arguments = params_bytes(params) + cache.total + 2 * 4  # and two tokens
  assert arguments <= rows["decode step: arguments"]["device_bytes"] < arguments * 1.01
  results = rows["decode step: results, but for updates in place"]["device_bytes"]
  logits = 2 * model.config.vocab_size * 4
  assert logits <= results < logits + 4096
  assert sum(row["host_bytes"] for row in rows.values()) == 0


def test_the_command_prints_plan_and_table(tmp_path):
  arguments = ["--policy=dense", "--batch_size=2", "--capacity_tokens=64"]
  done = _run("--model=random:stories260k", *arguments, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[:3] == [
    "model   random:stories260k, llama of 5 layers, 260,032 parameters",
    "policy  dense on store resident",
    "cache   2 rows of 64 tokens in bfloat16",
  ]
  assert lines[3].startswith("step    compiled for cpu in ")
  assert [line.split("  ")[0] for line in lines[7:]] == [
    "weights",
    "keys and values",
    "page tables",
    "metadata of policy and store",
    "cache while the prompt is read",
    "decode step: arguments",
    "decode step: results, but for updates in place",
    "decode step: temporaries",
  ]
  assert "weights" in lines[7] and "0.5 MB" in lines[7]


def test_the_context_is_the_default_capacity(tmp_path):
  arguments = "--model=random:stories260k@96", "--policy=quest:score=mean"
  done = commands.run("scripts.inspect_model", *arguments, folder=tmp_path)
  policy = "policy  quest:score=mean with 2,048 tokens on store resident; 3 of 5 layers select\n"
  assert policy in done.stdout
  assert "cache   1 rows of 96 tokens in bfloat16" in done.stdout


def test_a_profile_must_be_of_these_weights(tmp_path):
  model, small = f"--model={ROOT}/models/small/small-llama", f"{ROOT}/profiles/small"
  arguments = ["--budget_tokens=64", "--capacity_tokens=128"]
  of_it = f"--policy=omnikv:profile={small}-llama-filter_layers.npz"
  done = commands.run("scripts.inspect_model", model, of_it, *arguments, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  assert "layers select\n" in done.stdout and "metadata of policy and store" in done.stdout
  of_another = f"--policy=omnikv:profile={small}-opt-filter_layers.npz"
  refused = commands.run("scripts.inspect_model", model, of_another, *arguments, folder=tmp_path)
  assert refused.returncode == 2 and "the profile is one of small-opt with sha256" in refused.stderr


@pytest.mark.slow
def test_a_model_of_8b_takes_no_memory(tmp_path):
  before = jax.live_arrays()
  model, shapes = abstract("random:llama-3.1-8b", "bfloat16")
  cache = CacheConfig(4, 32_768, dtype="bfloat16", base_tokens=32_768)
  runner = prepare(model, make_policy("quest", budget_tokens=1024, page_size=16), "resident", cache)
  memory = inspect_model.compile_decode_step(runner, shapes).memory_analysis()
  kept = runner.decode_bytes.total
  assert kept > 17e9
  assert memory.argument_size_in_bytes > kept + 16e9
  assert memory.alias_size_in_bytes >= runner.decode_bytes.keys_values
  assert memory.temp_size_in_bytes < kept // 100
  assert len(jax.live_arrays()) <= len(before) + 1


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["--model=random:gpt-5"], "no preset 'gpt-5'"),
    (["--store=compact"], "policy 'quest' cannot run on store 'compact'"),
    (["--batch_size=0"], "batch_size"),
    (["--dtype=int4"], "value should be one of"),
  ],
)
def test_bad_input_is_one_line(arguments, expected, tmp_path):
  arguments = ["--model=random:stories260k", *arguments]
  done = commands.run("scripts.inspect_model", *arguments, folder=tmp_path)
  assert done.returncode == 2
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert expected in line
  assert "Traceback" not in done.stderr
