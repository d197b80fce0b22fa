"""Speed commands: the floor's arithmetic, a whole run on a tiny model, and what they refuse."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from eval import floor, run_throughput
from kvjax import CacheConfig, generate, prepare
from kvjax.engine import steps
from models import load
from models.memory import params_bytes
from scripts import bench_peers, peer_worker
from tests import commands
from tests.models import tiny

ROOT = Path(__file__).resolve().parents[2]
MODEL = "random:stories260k"


def _run(module, *arguments, folder):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(folder / "cache")}
  return subprocess.run(
    [sys.executable, "-m", module, *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=environment,
  )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  arguments = [f"--model={MODEL}", "--prompt_tokens=100", "--batch_sizes=1,2", "--out_dir=out"]
  arguments += ["--output_tokens=6", "--budget_tokens=32,48", "--capacity_tokens=200"]
  done = _run("eval.run_throughput", *arguments, folder=folder)
  assert done.returncode == 0, done.stderr
  lines = (folder / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
  return done, [json.loads(line) for line in lines], folder


def test_one_row_for_each_combination(finished):
  _, rows, _ = finished
  keys = [(row["batch_size"], row["policy"], row["store"], row["budget_tokens"]) for row in rows]
  policies = [
    ("dense", "resident", None),
    ("quest", "resident", 32),
    ("quest", "resident", 48),
    ("streaming", "compact", 32),
    ("streaming", "compact", 48),
  ]
  assert keys == [(batch, *policy) for batch in (1, 2) for policy in policies]


def test_the_fields_of_a_row(finished):
  for row in finished[1]:
    assert row["prompt_tokens"] == 100 and row["output_tokens"] == 6
    assert row["model"] == MODEL and row["simulated"] is False and row["score"] is None
    assert 0 < row["tpot_s_p50"] <= row["tpot_s_p99"] and row["ttft_s_p50"] > 0
    assert row["compile_s"] > 0 and row["bandwidth_bytes_per_s"] > 1e8
    assert row["floor_ratio"] == pytest.approx(row["tpot_s_p50"] / row["floor_s"])
    assert 0 < row["device_kv_bytes"] <= row["peak_kv_bytes"]


def test_speedups_are_against_dense_of_the_same_batch_size(finished):
  for batch in (1, 2):
    dense, *others = [row for row in finished[1] if row["batch_size"] == batch]
    assert dense["speedup_vs_dense"] == 1.0
    for row in others:
      assert row["speedup_vs_dense"] == dense["tpot_s_p50"] / row["tpot_s_p50"]


def test_plan_comes_before_the_table_and_results_are_not_overwritten(finished):
  done, _, folder = finished
  plan, result = done.stdout.index("KV at peak"), done.stdout.index("TPOT p50")
  assert done.stdout.index("layers quest: 3 of 5 layers select; streaming: 5 of 5") < plan < result
  again = commands.run("eval.run_throughput", f"--model={MODEL}", "--out_dir=out", folder=folder)
  assert again.returncode == 2
  assert "out already holds results.jsonl; choose another --out_dir" in again.stderr


@pytest.mark.parametrize("rows", [1, 2])  # one row decodes with the weights as they are
@pytest.mark.parametrize("policy", ["dense", "quest", "streaming"])
def test_a_lane_says_what_generate_says(policy, rows):
  loaded = load(MODEL)
  [(policy, store)] = run_throughput.pick_policies([policy], [], [32], 16)
  runner = prepare(loaded.model, policy, store, CacheConfig(rows, 80, 16), chunk_tokens=64)
  prompts = run_throughput.make_prompts(loaded, None, 70, rows)
  params = run_throughput.weights(loaded, rows)
  run_throughput.compile_runner(runner, params)
  compiled = [step._cache_size() for step in (steps.prefill_chunk, steps.next_token)]
  lane = run_throughput.start_lane(runner, params, prompts)
  assert lane.params is params.decoding
  lane = run_throughput.advance(run_throughput.advance(lane, 3), 2)
  assert compiled == [step._cache_size() for step in (steps.prefill_chunk, steps.next_token)]
  expected = generate(runner, loaded.params, prompts, max_new_tokens=6).tokens[0]
  assert list(lane.made) == expected
  assert len(lane.step_s) == 5


def test_policies_and_prompts_that_are_refused():
  loaded = load(MODEL)
  with pytest.raises(ValueError, match="names 1 stores for 2 policies"):
    run_throughput.pick_policies(["dense", "quest"], ["resident"], [32], 16)
  with pytest.raises(ValueError, match="--policies is empty"):
    run_throughput.pick_policies([], [], [32], 16)
  with pytest.raises(ValueError, match="has no tokenizer; leave --text_file out"):
    run_throughput.make_prompts(loaded, "text", 8, 1)


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["--policies=best"], "unknown policy 'best'"),
    (["--budget_tokens=8"], "under one page of 16"),
    (["--stores=compact,compact,compact"], "cannot run on store 'compact'"),
    (["--prompt_tokens=512"], "the model's context is 512"),
    (["--prompt_tokens=100", "--capacity_tokens=50"], "the cache holds 50 a row"),
    (["--prompt_tokens=100", "--capacity_tokens=0"], "--capacity_tokens=0"),
    (["--batch_sizes=999999999"], "not enough memory"),
    (["--batch_sizes=0"], "--batch_sizes: '0' is not a positive number"),
    (["--page_size=10"], "--page_size=10: expected one of (8, 16, 32, 64)"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, expected):
  done = commands.run(
    "eval.run_throughput", f"--model={MODEL}", "--out_dir=out", *arguments, folder=tmp_path
  )
  assert done.returncode == 2
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert expected in line
  assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_floor_bytes_by_hand():
  config = tiny.tied()  # L 2, K 2, D 16: 64 values a token and layer
  shape = {"page_size": 16, "batch_size": 3}
  dense = floor.floor_bytes(config, 1000, "dense", budget_tokens=None, tokens=100, **shape)
  assert dense == 1000 + 3 * 2 * 64 * 100 * 4
  streaming = floor.floor_bytes(config, 1000, "streaming", budget_tokens=32, tokens=100, **shape)
  assert streaming == 1000 + 3 * 2 * 64 * 32 * 4
  deep = dataclasses.replace(config, num_layers=5)
  quest = floor.floor_bytes(deep, 1000, "quest", budget_tokens=32, tokens=100, **shape)
  assert quest == 1000 + 3 * 64 * 4 * (2 * 100 + 3 * 7 + 3 * 32)
  all_of_it = floor.floor_bytes(deep, 1000, "quest", budget_tokens=128, tokens=100, **shape)
  assert all_of_it == 1000 + 3 * 64 * 4 * 5 * 100
  untied = floor.floor_bytes(tiny.CONFIG, 100_000, "dense", budget_tokens=None, tokens=100, **shape)
  assert untied == dense - 1000 + 100_000 - (300 - 3) * 64 * 4
  other = floor.floor_bytes(config, 1000, "other", budget_tokens=32, tokens=100, **shape)
  assert other == streaming


def test_params_are_counted_exactly():
  loaded = load(MODEL)
  assert params_bytes(loaded.params) == 4 * sum(
    leaf.size for leaf in jax.tree.leaves(loaded.params)
  )


def test_peers_need_an_interpreter_that_has_them(tmp_path):
  done = commands.run("scripts.bench_peers", folder=tmp_path)
  assert done.returncode == 2 and "--peer_python is missing" in done.stderr
  arguments = "--peer_python=x", "--peers=vllm"
  done = commands.run("scripts.bench_peers", *arguments, folder=tmp_path)
  assert done.returncode == 2 and "expected some of transformers, llama_cpp" in done.stderr
  # The standard library alone is no peer; -S hides the packages of this environment.
  python = tmp_path / "bare"
  python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
  python.chmod(0o755)
  with (
    pytest.raises(ValueError, match=r"peer llama_cpp does not work in .*No module named"),
    peer_worker.start_peer("llama_cpp", str(python), tmp_path / "absent.gguf", 64, 1),
  ):
    pass


def test_the_worker_needs_nothing_of_ours_and_runs_on_python_3_11():
  tree = ast.parse(Path(peer_worker.__file__).read_text(encoding="utf-8"), feature_version=(3, 11))
  imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
  imports |= {
    name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
  }
  assert {name.partition(".")[0] for name in imports} <= sys.stdlib_module_names


def test_peers_get_the_same_weights_in_f32(tmp_path):
  config = tiny.tied()
  kind = gguf.GGMLQuantizationType.Q8_0
  source = tiny.write_gguf(tmp_path / "q8.gguf", config, tiny.tensors(config), kind)
  copy = bench_peers.f32_weights(source, tmp_path / "cache" / "f32.gguf")
  assert [path.name for path in copy.parent.iterdir()] == ["f32.gguf"]
  before, after = load(str(source)), load(str(copy))
  assert before.model.config == after.model.config
  leaves = jax.tree.leaves
  for one, other in zip(leaves(before.params), leaves(after.params), strict=True):
    np.testing.assert_array_equal(one, other)
  types = {tensor.tensor_type for tensor in gguf.GGUFReader(copy).tensors}
  assert types == {gguf.GGMLQuantizationType.F32}


def test_where_two_continuations_part():
  assert bench_peers.same_tokens([1, 2, 3], [1, 2, 3]) == "agree"
  assert bench_peers.same_tokens([1, 2, 4], [1, 2, 3]) == "differs at token 3"


@pytest.mark.parametrize("spec", ["snapkv", "streaming", "duo:sinks=8:full_heads=((0, 0),)"])
def test_results_name_the_budget_that_was_asked_for(spec):
  picked = run_throughput.pick_policies([spec], [], [40, 72], 16)
  assert [policy.asked_tokens for policy, _ in picked] == [40, 72]
  assert all(policy.budget_tokens not in (40, 72) for policy, _ in picked)  # rounded, more, or none


def test_what_has_no_budget_comes_once():
  [(policy, _)] = run_throughput.pick_policies(["dense"], [], [32, 64], 16)
  assert policy.asked_tokens is None
