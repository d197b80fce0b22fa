"""What was found: the machine, the JSON file, the table."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "flax")
MARKS = {True: "ok", False: "FAILED", None: "left out"}


def machine() -> dict[str, Any]:
  """Which machine, versions and commit. Asks no device, which workers have to themselves."""
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "gpu": _line(
      "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
    ),
    "host": platform.processor() or platform.machine(),
    "cpus": os.cpu_count(),
    "python": platform.python_version(),
    "versions": {name: _version(name) for name in PACKAGES},
    "commit": _line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    "changed_files": bool(_line("git", "-C", str(ROOT), "status", "--porcelain")),
  }


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _line(*command: str) -> str | None:
  """What a program prints, None where it is missing or fails."""
  if shutil.which(command[0]) is None:
    return None
  run = subprocess.run(command, capture_output=True, text=True, check=False)
  return run.stdout.strip() if run.returncode == 0 else None


def write(path: Path, about: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
  """The whole file anew, so that there is a whole one at any time."""
  text = json.dumps({**about, "results": [_plain(r) for r in results]}, indent=1, allow_nan=False)
  part = path.with_name(path.name + ".part")
  part.write_text(text + "\n", "utf-8")
  part.replace(path)


def _plain(value: Any) -> Any:
  """JSON knows no infinity."""
  if isinstance(value, dict):
    return {key: _plain(x) for key, x in value.items()}
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def table(results: Sequence[dict[str, Any]]) -> str:
  """Counts of what only is right or wrong, a line for what was timed, failed or was left out."""
  lines = [f"{'':9} {'check':12} {'case':58} {'time':>10} {'floor':>10} {'ratio':>6}"]
  for check in dict.fromkeys(result["check"] for result in results):
    of_check = [result for result in results if result["check"] == check]
    good = [r for r in of_check if r["ok"] and "seconds" not in r]
    lines += [f"{'ok':9} {check:12} {len(good)} of {len(of_check)} cases"] if good else []
    lines += [_row(r) for r in of_check if "seconds" in r]
    lines += [_row(r) for r in of_check if r["ok"] is False and "seconds" not in r]
    lines += _left_out(check, [r for r in of_check if r["ok"] is None])
  return "\n".join(lines)


def _row(result: dict[str, Any]) -> str:
  times = [_time(result.get(key)) for key in ("seconds", "floor_seconds")]
  ratio = f"{result['ratio']:.2f}" if "ratio" in result else ""
  mark = MARKS[result["ok"]]
  columns = f"{mark:9} {result['check']:12} {result['name'][:58]:58} {times[0]:>10} {times[1]:>10}"
  found = f"error {result['max_error']:.2g}" if "max_error" in result else ""
  note = result.get("note") or result.get("best") or (found if result["ok"] is False else "")
  return f"{columns} {ratio:>6}  {note}".rstrip()


def _left_out(check: str, results: Sequence[dict[str, Any]]) -> list[str]:
  """One line for each reason."""
  reasons: dict[str, int] = {}
  for result in results:
    reasons[result["note"]] = reasons.get(result["note"], 0) + 1
  return [f"{'left out':9} {check:12} {n} cases: {note[:90]}" for note, n in reasons.items()]


def _time(seconds: float | None) -> str:
  if seconds is None:
    return ""
  return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
