"""A run folder: manifest.json says what ran, results.jsonl has one row per combination.

Commands that ask a model keep every answer too, in predictions.jsonl (`eval.predictions`), and
those that measure likelihoods what each text or request gave, in measured.jsonl (`eval.lines`).
`eval.run_serving` keeps its turns in turns.jsonl.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import Runner
from kvjax.engine.steps import kernels_of
from models import Loaded

Row = dict[str, Any]

RESULTS, MANIFEST, PREDICTIONS = "results.jsonl", "manifest.json", "predictions.jsonl"
LINES, TURNS = "measured.jsonl", "turns.jsonl"
_KEPT = (RESULTS, "predictions*.jsonl", LINES, TURNS)  # what makes a folder worth keeping
# Seconds and bytes; the percentiles of a quantity are fields of their own. device_kv_bytes are the
# keys and values that stay on the device while decoding, peak_kv_bytes the most at any time, and
# metadata_bytes what lies beside them: page tables, page bounds, lengths.
ROW_FIELDS = (
  "model",
  "policy",
  "store",
  "budget_tokens",
  "page_size",
  "batch_size",
  "device",
  "kernels",
  "task",
  "metric",
  "score",
  "dense_score",
  "retention",
  "num_examples",
  "limit_hits",
  "prompt_tokens",
  "output_tokens",
  "compile_s",
  "ttft_s_p50",
  "ttft_s_p90",
  "ttft_s_p99",
  "tpot_s_p50",
  "tpot_s_p90",
  "tpot_s_p99",
  "prefill_tokens_per_s",
  "decode_tokens_per_s",
  "speedup_vs_dense",
  "device_kv_bytes",
  "peak_kv_bytes",
  "host_kv_bytes",
  "metadata_bytes",
  "recall_bytes_per_step",
  "page_hit_ratio",
  "token_hit_ratio",
  "recall_stall_s_p50",
  "recall_stall_s_p99",
  "simulated",
)


def make_row(**fields: Any) -> Row:
  """A result row: every field of `ROW_FIELDS` in that order, None where nothing was measured.

  Raises:
    ValueError: a field that is not in `ROW_FIELDS`, or a number that JSON cannot hold.
  """
  unknown = sorted(set(fields) - set(ROW_FIELDS))
  if unknown:
    raise ValueError(f"unknown fields {', '.join(unknown)}; eval/results.py has the list")
  return {name: _plain(name, fields.get(name)) for name in ROW_FIELDS}


def runner_row(runner: Runner, **fields: Any) -> Row:
  """`make_row` with what a runner says of itself: policy, store, budget, sizes, device, bytes."""
  return make_row(
    policy=runner.policy.name,
    store=runner.store.name,
    budget_tokens=runner.policy.asked_tokens,
    page_size=runner.prefill_config.page_size,
    batch_size=runner.prefill_config.batch_size,
    device=device_kind(),
    kernels=kernels(runner),
    simulated=False,
    **byte_fields(runner),
    **fields,
  )


def kernels(runner: Runner) -> str:
  """Which implementation of each operation decodes: "append_kv=xla page_products=mosaic"."""
  return " ".join(f"{name}={chosen}" for name, chosen in sorted(kernels_of(runner).items()))


def percentiles(name: str, values: Sequence[float], wanted: Sequence[int] = (50, 90, 99)) -> Row:
  """Fields NAME_p50, NAME_p90, ... of a sample that is not empty."""
  return {f"{name}_p{q}": float(np.percentile(values, q)) for q in wanted}


def byte_fields(runner: Runner) -> Row:
  """The byte fields of a row, known before anything is allocated."""
  decode, prefill = runner.decode_bytes, runner.prefill_bytes
  return {
    "device_kv_bytes": decode.keys_values,
    "peak_kv_bytes": max(decode.keys_values, prefill.keys_values),
    "host_kv_bytes": decode.host,
    "metadata_bytes": decode.tables + decode.metadata,
  }


def recall_fields(total: Mapping[str, int], steps: int) -> Row:
  """The fields of a row about what came back from the host.

  Args:
    total: `kvjax.stores.traffic.totals`, or sums of them.
    steps: decode steps in which that was moved, at least 1.
  """
  return {
    "recall_bytes_per_step": total["moved_bytes"] / steps,
    "page_hit_ratio": total["pages_hit"] / total["pages_used"] if total["pages_used"] else None,
    "token_hit_ratio": total["resident"] / max(1, total["selected"]),
  }


def check_new_run(out_dir: Path) -> None:
  """Says early what `start_run` would say late.

  Raises:
    ValueError: the folder already holds a run, is not a folder, or cannot be made.
  """
  if out_dir.exists() and not out_dir.is_dir():
    raise ValueError(f"{out_dir} is a file; choose another --out_dir")
  place = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
  if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
    kind = "cannot be written to" if place.is_dir() else "is not a folder"
    raise ValueError(f"{out_dir} cannot be made: {place} {kind}; choose another --out_dir")
  for pattern in (*_KEPT, MANIFEST):
    for path in sorted(out_dir.glob(pattern)):
      raise ValueError(f"{out_dir} already holds {path.name}; choose another --out_dir")


def start_run(out_dir: Path, manifest: Mapping[str, Any]) -> None:
  """Makes the folder and writes its manifest, whole or not at all.

  Raises:
    ValueError: the folder already holds a run, or is not a folder.
  """
  check_new_run(out_dir)
  out_dir.mkdir(parents=True, exist_ok=True)
  write_atomically(out_dir / MANIFEST, json.dumps(manifest, indent=2, default=str) + "\n")


@contextlib.contextmanager
def run_folder(
  out_dir: Path, manifest: Mapping[str, Any], *, keep: bool = False
) -> Generator[None]:
  """`start_run`, taken back when what follows is cut short before its first row or line.

  What is already on the disk stays there: each line is whole. With `keep` all of it stays.
  """
  parents = (out_dir, *out_dir.parents)
  made = [path for path in parents if not path.exists()]
  start_run(out_dir, manifest)
  try:
    yield
  except BaseException:
    files = [file for pattern in _KEPT for file in out_dir.glob(pattern)]
    with contextlib.suppress(OSError):
      if not keep and not any(file.stat().st_size for file in files):
        for file in files:
          file.unlink()
        (out_dir / MANIFEST).unlink()
        for path in made:
          path.rmdir()
    raise


def append_row(out_dir: Path, row: Mapping[str, Any]) -> None:
  """Adds one line to results.jsonl: on the disk when this returns, not at all when it raises."""
  append_lines(out_dir / RESULTS, [row])


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
  """Adds lines to a file: on the disk when this returns, none of them when it raises."""
  rest = _lines(rows).encode()
  with _named(path), path.open("ab", buffering=0) as file:
    before = file.tell()
    try:
      while rest:
        rest = rest[file.write(rest) :]
      os.fsync(file.fileno())
    except BaseException:
      file.truncate(before)
      raise


def write_rows(out_dir: Path, rows: Iterable[Row]) -> None:
  """Makes results.jsonl hold these rows, whole or not at all."""
  write_atomically(out_dir / RESULTS, _lines(rows))


def read_rows(out_dir: Path) -> list[Row]:
  """The rows of results.jsonl; none where there is no such file.

  Raises:
    ValueError: a line is no row.
  """
  path = out_dir / RESULTS
  lines = path.read_bytes().splitlines() if path.exists() else []
  rows = []
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
    except (ValueError, RecursionError):
      row = None
    if not isinstance(row, dict) or not set(ROW_FIELDS) <= set(row):
      raise ValueError(f"{path}, line {number}: expected a row of results as one JSON object")
    rows.append(row)
  return rows


def write_atomically(path: Path, content: str | bytes) -> None:
  """Writes a file so that it holds all of the content or does not exist."""
  data = content.encode() if isinstance(content, str) else content
  with (
    _named(path),
    tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file,
  ):
    try:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
      os.chmod(file.name, 0o644)
      os.replace(file.name, path)
    except BaseException:
      os.unlink(file.name)
      raise


@contextlib.contextmanager
def _named(path: Path) -> Generator[None]:
  """Errors of writing say which file it was; a full disk alone does not."""
  try:
    yield
  except OSError as error:
    raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def device_kind() -> str:
  """What computes, for the `device` of a row: the accelerator, or the model of the CPU."""
  device = jax.devices()[0]
  return _cpu_model() if device.platform == "cpu" else device.device_kind


def make_manifest(
  flags: Mapping[str, Any], loaded: Loaded | None, data: Mapping[str, Any]
) -> dict[str, Any]:
  """What is needed to repeat a run and to know where it ran.

  Args:
    flags: name -> value, all of them.
    loaded: the model, if there is one.
    data: name -> sha256 of each file that was read.
  """
  return {
    "command": Path(sys.argv[0]).name,
    "flags": dict(flags),
    "commit": _commit(),
    "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "versions": {"python": platform.python_version()}
    | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    "device": device_kind(),
    "backend": jax.default_backend(),
    "num_devices": jax.device_count(),
    "platform": platform.platform(),
    "cpu": _cpu_model(),
    "cores": _cores(),
    "model": loaded and {"name": loaded.name, "sha256": loaded.content_hash},
    "data": dict(data),
  }


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
  return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _plain(name: str, value: Any) -> Any:
  if isinstance(value, np.generic | np.ndarray | jax.Array):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f"{name} is {value}, expected a finite number or None")
  return value


def _commit() -> str | None:
  """The commit of the checkout, with -dirty when it has changes; None outside a checkout."""
  root = Path(__file__).resolve().parents[1]
  if not (root / ".git").exists():
    return None
  describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*"]
  try:
    done = subprocess.run([*describe, "--dirty"], capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()


def _cpu_model() -> str:
  info = Path("/proc/cpuinfo")
  if info.exists():
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return platform.processor() or platform.machine()


def _cores() -> int | None:
  affinity = getattr(os, "sched_getaffinity", None)  # not on every system
  return len(affinity(0)) if affinity else os.cpu_count()
