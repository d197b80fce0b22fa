"""scripts.gpu_check on a CPU: every check runs, and none that fails stops another."""

from __future__ import annotations

import json
import queue

import pytest

from pallas_kernels.arg_specs import named, small
from scripts import gpu_check
from scripts.gpu_checks import CHECKS, in_place

# Measured elsewhere, or not at all here.
_LEFT_OUT = ("cannot run", "cuDNN needs a GPU")


def _run(out, *arguments) -> tuple[int, list[dict]]:
  status = gpu_check.main(["--interpret", f"--out={out}", *arguments])
  return status, json.loads(out.read_text())["results"]


def test_all_checks_run_interpreted(tmp_path, capsys):
  status, results = _run(tmp_path / "found.json")
  failed = [result for result in results if result["ok"] is False]
  assert not failed and status == 0
  assert {result["check"] for result in results} == set(CHECKS)
  for result in results:
    if result["ok"] is None:
      assert any(reason in result["note"] for reason in _LEFT_OUT), result
  timed = [r for r in results if r["check"] in ("attention", "step") and r["ok"]]
  assert len(timed) >= 9
  for result in timed:
    assert result["ratio"] == pytest.approx(result["seconds"] / result["floor_seconds"])
  compared = [r["name"] for r in results if r["check"] == "correctness" and r["ok"]]
  assert sum(" mosaic " in name for name in compared) >= 10
  assert "flexicache batch 1" in capsys.readouterr().out


def test_failures_of_every_kind_stop_nothing(tmp_path, capsys):
  out = tmp_path / "found.json"
  checks = "tests.scripts.broken_checks,tests.no_such_file"
  status, results = _run(out, f"--checks={checks}", "--case_seconds=8")
  assert status == 1
  found = {result["name"]: (result["ok"], result.get("note", "")) for result in results}
  assert found == {
    "raises": (False, "RuntimeError: two lines"),
    "is wrong": (False, ""),
    "ends the process": (False, "the process ended"),
    "is right": (True, ""),
    "never ends": (False, "no end after 8 s"),
    "is left out": (None, "not here"),
    "prints": (True, ""),
    "import": (False, "ModuleNotFoundError: No module named 'tests.no_such_file'"),
  }
  about = json.loads(out.read_text())
  assert {"date", "gpu", "versions", "commit", "interpret"} <= set(about)
  printed = capsys.readouterr().out
  assert "5 failed" in printed and "10.0 us" in printed


def test_the_last_case_does_not_outlast_all():
  """However long a case may take: its end is past, so that it gets a last second."""
  lines = queue.Queue()
  lines.put(json.dumps({"place": 3, "check": "some", "name": "hangs", "started": True}))
  (result,) = gpu_check._listen(lines, 3, patience=3600.0, end=0.0)
  assert result["note"] == "no end after 1 s" and result["ok"] is False


@pytest.mark.usefixtures("fully_optimized")
def test_pools_that_are_copied_are_not_in_place():
  """Their addresses may well stay the same."""
  shape = small(named("opt-350m-f32"))
  found = in_place.check(shape, lambda pools, *_: tuple(x[::-1] for x in pools), False)
  assert not found["ok"]
  assert in_place.check(shape, lambda pools, *_: tuple(x + 1 for x in pools), False)["ok"]


def test_after_the_time_is_over_cases_are_left_out(tmp_path):
  status, results = _run(tmp_path / "found.json", "--checks=in_place", "--seconds=-1")
  assert {result["note"] for result in results} == {"no time left"}
  assert status == 0


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--checks=speed", "unknown check 'speed', expected some of correctness,in_place"),
    ("--out=nowhere/found.json", "the folder of --out=nowhere/found.json does not exist"),
  ],
)
def test_bad_arguments(argument, message, capsys):
  with pytest.raises(SystemExit) as stopped:
    gpu_check.main([argument])
  assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_without_a_gpu_it_fails(tmp_path, capfd):
  out = tmp_path / "found.json"
  assert gpu_check.main([f"--out={out}", "--checks=in_place"]) == 1
  assert "jax finds no NVIDIA GPU" in capfd.readouterr().err
