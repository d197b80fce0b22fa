"""Bidaw's trace items: by hand on a few turns, on what is made, and the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from eval.results import append_row, read_rows
from eval.tables import table
from kvjax.config import ModelConfig
from kvjax.sim import machine
from kvjax.sim.generator import CONTROL, INTERACTIVE, generate
from kvjax.sim.workloads import Turn, from_turns
from scripts import bench_bidaw, reproduce
from scripts.reproduce_bidaw import (
  correlation,
  latency,
  overheads,
  serving,
  tensor_efficiency,
  trace,
)
from scripts.reproduce_bidaw.case import Case, label_of
from scripts.reproduce_bidaw.serving import SUSTAINED_S, at_rate, at_rates, every, sustained
from scripts.reproduce_bidaw.starting import AT_ONE_RATE, COUNTED, ITEMS, SERVED, WITHOUT_TRACE
from tests import commands

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig("opt", 2, 4, 4, 8, 32, 128, 100, 100)  # 2 * 2 * 4 * 8 * 2 = 256 bytes a token
TURNS = (  # user, time, question, answer, history
  Turn(1, 0.0, 10, 10, 0),
  Turn(2, 60.0, 30, 10, 0),
  Turn(1, 120.0, 5, 5, 20),
  Turn(3, 120.0, 200, 0, 0),
  Turn(2, 180.0, 10, 10, 40),
)


def _case(*workloads, host_bytes=200e9, config=CONFIG):
  return Case("shape", config, workloads, host_bytes, machine("a800"))


@pytest.fixture(scope="module")
def made():
  return generate(INTERACTIVE, 150, 10, 0), generate(CONTROL, 800, 30, 0)


@pytest.mark.parametrize("name", COUNTED)
def test_an_item(name, made, tmp_path):
  _check(name, _case(*made, host_bytes=3e6), tmp_path)


def _slow(*rates):
  """Conversations for a machine whose disk is too slow, the more so the more of them there are."""
  workloads = [generate(INTERACTIVE, 5 * rate, rate, 0) for rate in rates]
  slow = machine("a800")._replace(disk_bytes_per_s=5e3)
  return _case(*workloads, host_bytes=2e5)._replace(machine=slow)


@pytest.mark.parametrize("name", SERVED)
def test_an_item_that_is_served(name, tmp_path):
  rows = _check(name, _slow(4, 16), tmp_path)
  assert len(rows) == 2 * len(
    {(row.get("system"), row.get("eviction"), row.get("kept")) for row in rows}
  )


@pytest.mark.parametrize("name", AT_ONE_RATE)
def test_an_item_of_one_rate(name, tmp_path):
  rows = _check(name, _slow(6), tmp_path)
  cases = {(row["system"], row["host_kv_bytes"], row["ssd_gb_per_second"]) for row in rows}
  assert len(rows) == len(cases)


@pytest.mark.parametrize("name", WITHOUT_TRACE)
def test_an_item_without_conversations(name, monkeypatch, tmp_path):
  monkeypatch.setattr(bench_bidaw, "WINDOW", 1000)
  monkeypatch.setattr(overheads, "TURNS", 500)
  _check(name, _case()._replace(conversations=(100, 200)), tmp_path)


def _check(name, case, tmp_path):
  item = ITEMS[name]
  for row in item.run(case):
    append_row(tmp_path, row)
  rows = read_rows(tmp_path)
  assert table(rows, item.columns).count("\n") == len(rows) + 1
  known = {column for row in rows for column, value in row.items() if value is not None}
  assert known >= {*item.columns}
  ran = [row for row in rows if row.get("mean_latency_s", 0) is not None]
  always = {*item.columns} - {"rebuild_gflop_per_saved_mb", "saved_read_s", "memory_bytes"}
  assert all(row[column] is not None for row in ran for column in always)
  simulated = name not in ("correlation", "overheads")
  assert all(row["simulated"] is simulated for row in rows)
  item.plot(rows, "a $title", tmp_path / "plot.png")
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
  assert all(one.paper and one.ours and one.reason for one in item.compare(rows))
  return rows


def test_rates_and_latencies_by_hand():
  """From 1 to 100 s between 10 and 20 users a minute: 10 s in the middle, 5 s before it."""
  rate, text = sustained([10, 20], [1.0, 100.0])
  assert rate == pytest.approx(10 + 5 * math.log10(5)) and text == f"{rate:.3g}"
  assert at_rate([10, 20], [1.0, 100.0], 15) == pytest.approx(10)
  assert sustained([10, 20], [1.0, 2.0]) == (20, "20 or more")
  assert sustained([10, 20], [6.0, 7.0]) == (10, "under 10")


def test_a_system_far_beyond_the_limit_is_not_run_at_higher_rates(monkeypatch):
  case, names = _slow(4, 8), ("cached_attention", "ideal")
  whole = every(at_rates(case), names, "latency")
  assert whole[0]["mean_latency_s"] > 2 * whole[1]["mean_latency_s"]
  monkeypatch.setattr(serving, "HOPELESS", whole[0]["mean_latency_s"] / SUSTAINED_S / 1.5)
  rows = every(at_rates(case), names, "latency")
  assert [row["system"] for row in rows] == [*names, *names]
  assert rows[2]["mean_latency_s"] is None and "miss_ratio" not in rows[2]
  assert [rows[n] == whole[n] for n in range(4)] == [True, True, False, True]
  without = every(at_rates(case), names, "latency", ("ideal",))
  assert [row["mean_latency_s"] is None for row in without] == [False, True, True, True]


def test_latencies_beside_each_other_by_hand(tmp_path):
  """FlashGen sustains 10 + 10 log2(5/4) = 13.2, where Bidaw has 1.25 s."""
  seconds = {
    "recompute": (200.0, None, None),
    "cached_attention": (2.0, 50.0, None),
    "flashgen": (4.0, 8.0, 200.0),
    "bidaw": (1.0, 2.0, 4.0),
    "ideal": (1.0, 1.0, 2.0),
  }
  rows = [
    {"trace": "made", "system": name, "users_per_minute": rate, "mean_latency_s": mean}
    | {"over_ideal_ratio": mean}
    for name, means in seconds.items()
    for rate, mean in zip((10.0, 20.0, 30.0), means, strict=True)
  ]
  ratio, rates, ideal = latency.compare(rows)
  assert ratio.ours == "50.00 at 30 users a minute; 4.00 at 13.2, the most that flashgen sustains"
  assert rates.ours.startswith("2.27 (cached_attention 12.8, flashgen 13.2, bidaw 30 or more")
  assert ideal.ours == "2.00, at 24 users a minute"
  assert ratio.figure == "Fig. 15" and ratio.paper == "up to 3.58"
  latency.plot(rows, "by hand", tmp_path / "plot.png")
  control = latency.compare([row | {"trace": "control"} for row in rows])
  assert [one.figure for one in control] == ["Fig. 17"] * 3 and control[1].paper.startswith("1.40")
  assert control[1].ours.startswith("1.21 (cached_attention 19.1, flashgen 24.8, bidaw 30 or more")


def test_what_a_kept_byte_saves():
  rows = {row["model"]: row for row in tensor_efficiency.run(_case())}
  opt, grouped = rows["opt-13b"], rows["llama-3.1-8b"]
  saves = [opt[f"{form}_gflop_per_mb"] for form in ("kv", "activation")]
  assert saves == pytest.approx([30.72, 51.2])
  assert opt["rebuild_gflop_per_saved_mb"] == pytest.approx(10.24)  # 2 * 5120 operations a byte
  assert opt["saved_read_s"] == pytest.approx(2048 * 409_600 / 1.5e9, rel=1e-3)
  assert opt["pays"] == "yes" and opt["rebuild_s"] < opt["saved_read_s"] / 10
  assert grouped["pays"] == "no" and grouped["saved_read_s"] is None
  assert {*rows} > {"shape", "opt-30b", "qwen2.5-7b"}


def test_a_trace_by_hand():
  """Of 100 tokens of context, user 3 keeps 100; reuse distances are 40, and 30 + 100 tokens."""
  [row] = trace.run(_case(from_turns("five", TURNS), host_bytes=256 * 60))
  assert (row["conversations"], row["num_examples"], row["max_turns"]) == (3, 5, 2)
  assert row["mean_turns"] == pytest.approx(5 / 3) and row["median_minutes"] == 2
  assert row["median_reuse_bytes"] == 256 * 85 and row["beyond_host_ratio"] == 0.5
  assert row["lru_hit_ratio"] == 0.5  # 40 + 20 tokens fit exactly
  held = [20, 20 + 40, 30 + 40, 40 + 100, 60]  # user 1 is under way up to its last turn
  assert row["under_way_bytes"] == pytest.approx(256 * np.mean(held))
  kept, loaded = np.array([0, 0, 20, 0, 40]), np.array([0, 0, 0, 0, 40])
  assert row["load_cv"] == pytest.approx(kept.std() / kept.mean())
  assert row["lru_load_cv"] == pytest.approx(loaded.std() / loaded.mean())
  assert row["mean_disk_load_s"] == pytest.approx(256 * 40 / 1.5e9 + 10e-6)
  less = trace.run(_case(from_turns("five", TURNS), host_bytes=256 * 60 - 1))
  assert less[0]["lru_hit_ratio"] == 0


def test_a_trace_in_which_nobody_comes_back(tmp_path):
  alone = from_turns("alone", [Turn(n, float(n), 5, 5, 0) for n in range(4)])
  rows = ITEMS["trace"].run(_case(alone))
  assert rows[0]["lru_hit_ratio"] is None and rows[0]["load_cv"] is None
  trace.plot(rows, "alone", tmp_path / "plot.png")
  assert len(trace.compare(rows)) == 2
  with pytest.raises(
    ValueError, match="0 turns of alone continue a conversation, which makes no 20"
  ):
    ITEMS["correlation"].run(_case(alone))


def test_hours_and_the_whole(made):
  rows = correlation.run(_case(made[0]))
  hours = {row["hour"]: row for row in rows}
  assert [*hours][:2] == ["whole", "0"] and label_of(rows[0]).startswith("interactive, ")
  begun = made[0].previous >= 0
  for hour, row in hours.items():
    inside = begun if hour == "whole" else begun & (made[0].arrival_s // 3600 == int(hour))
    assert row["turns"] == inside.sum() >= 1000
    assert len(row["by_group"][0]) == 20 and row["group_spearman"] > 0.6


@pytest.mark.parametrize(("name", "simulated"), [("latency", True), ("miss_rate", False)])
def test_what_is_simulated_says_so(name, simulated, capsys):
  before = {*flags.FLAGS}
  try:
    reproduce.define_flags()
    flags.FLAGS(["reproduce", "--paper=bidaw", f"--item={name}", "--small"])
    title = reproduce.PAPERS["bidaw"].start(flags.FLAGS, name).title
  finally:
    for one in {*flags.FLAGS} - before:
      delattr(flags.FLAGS, one)
  assert title.endswith(", a800, simulated") == simulated
  assert ("machine a800, simulated\n" in capsys.readouterr().out) == simulated


COMMAND = ("scripts.reproduce", "--paper=bidaw", "--out_dir=out")


def _run(folder, *arguments):
  return subprocess.run(
    [sys.executable, "-m", *COMMAND, *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )


def test_the_command_on_a_file(tmp_path):
  lines = ["user_id time_stamp(seconds) query_length response_length round_index"]
  lines += [f"{n % 7} {1 if n == 9 else 3 * n} 20 {2 + n % 11} {n // 7}" for n in range(70)]
  (tmp_path / "own.txt").write_text("\n".join(lines), encoding="utf-8")
  done = _run(tmp_path, "--item=correlation", "--trace=own.txt")
  assert done.returncode == 0, done.stderr
  assert "trace   own.txt, 70 requests, 20 users a minute\n" in done.stdout
  assert "1 of them went back in time" in done.stdout
  assert "model   the shape of opt-13b, 0.8 MB a token\n" in done.stdout
  assert "\nFig. 12: " in done.stdout and done.stdout.endswith("written to out\n")
  names = {path.name for path in (tmp_path / "out").iterdir()}
  assert names == {"results.jsonl", "manifest.json", "comparison.json", "correlation.png"}
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
  assert {*manifest["data"]} == {"own.txt"} and manifest["flags"]["host_gb"] is None
  [row] = read_rows(tmp_path / "out")
  assert row["turns"] == 63 and math.isfinite(row["group_spearman"])


@pytest.mark.parametrize(
  ("arguments", "complaint"),
  [
    (("--trace=none.txt", "--users=5"), "--users is for what is made; none.txt is a file"),
    (("--users_per_minute=10,x",), "--users_per_minute=10,x; expected positive numbers"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, complaint):
  done = commands.run(*COMMAND, "--item=trace", *arguments, folder=tmp_path)
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert complaint in line
  assert done.returncode == 2 and not (tmp_path / "out").exists()
