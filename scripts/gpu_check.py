"""Checks and times all GPU kernels on a Hopper GPU, in under 8 minutes.

    python -m scripts.gpu_check --out=gpu_check.json
    python -m scripts.gpu_check --checks=correctness,attention --out=some.json

Needs jax (0.11.2 or newer) with CUDA, numpy and this repository; the check `step` also needs what
kvjax and models import, and is left out where that is missing. Arguments are argparse's and not
absl's, as in the other scripts, because a machine with a GPU may have no absl-py.

A case that fails, ends the process or waits for ever stops no other case. The file holds everything
found so far after every case, so that a kill loses nothing. The exit status is 1 if a case failed.
`--interpret` tries the checks themselves on a CPU, with tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from scripts.gpu_checks import CHECKS, report

SECONDS = 420.0  # of all checks, after which cases are left out
START_SECONDS = 60.0  # until a worker's first case
CASE_SECONDS = 90.0  # that a case may take, its compilation included
LAST_SECONDS = 40.0  # that the last case may go on after the time of all


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the checks; returns the exit status."""
  flags = _parse(arguments)
  about = {**report.machine(), "interpret": flags.interpret}
  print(f"gpu_check on {about['gpu'] or 'no GPU'}, at most {flags.seconds:.0f} s: {flags.checks}")
  results: list[dict[str, Any]] = []
  report.write(flags.out, about, results)
  start = time.time()
  for result in run_cases(flags):
    results.append(result)
    report.write(flags.out, {**about, "wall_seconds": time.time() - start}, results)
  print(report.table(results))
  failed = sum(result["ok"] is False for result in results)
  print(f"{len(results)} cases, {failed} failed, {time.time() - start:.0f} s; wrote {flags.out}")
  return 1 if failed or not results else 0


def _parse(arguments) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  known = ",".join(CHECKS)
  parser.add_argument(
    "--checks", default=known, help=f"which of {known}, or modules of your own, with a dot"
  )
  parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="file to write")
  parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
  parser.add_argument("--case_seconds", type=float, default=CASE_SECONDS, help="for one case")
  parser.add_argument("--interpret", action="store_true", help="tiny, on a CPU")
  flags = parser.parse_args(arguments)
  unknown = [c for c in flags.checks.split(",") if c not in CHECKS and "." not in c]
  if unknown:
    parser.error(f"unknown check {unknown[0]!r}, expected some of {known}")
  if not flags.out.absolute().parent.is_dir():
    parser.error(f"the folder of --out={flags.out} does not exist; make it first")
  return flags


def run_cases(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
  """Results of all cases. A worker that dies or stays silent is followed by one for the rest."""
  until, first = time.time() + flags.seconds, 0
  while first is not None:
    with _start(flags, first, until) as worker:
      assert worker.stdout is not None
      lines: queue.Queue[str | None] = queue.Queue()
      reader = threading.Thread(target=_read, args=(worker.stdout, lines))
      reader.start()
      try:
        first = yield from _listen(lines, first, flags.case_seconds, until + LAST_SECONDS)
      finally:
        worker.kill()
        reader.join()


def _start(flags: argparse.Namespace, first: int, until: float) -> subprocess.Popen[str]:
  command = [sys.executable, "-m", "scripts.gpu_checks.worker", f"--checks={flags.checks}"]
  command += [f"--first={first}", f"--until={until}"]
  environment = dict(os.environ)
  environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
  if flags.interpret:
    command.append("--interpret")
    environment["JAX_PLATFORMS"] = "cpu"
  return subprocess.Popen(
    command, stdout=subprocess.PIPE, text=True, encoding="utf-8", cwd=report.ROOT, env=environment
  )


def _listen(lines: queue.Queue[str | None], first: int, patience: float, end: float):
  """Yields results; returns the case to go on with, None when all are done."""
  running: dict[str, Any] | None = None
  told = False
  while True:
    wait = min(patience, max(end - time.time(), 1)) if running else max(patience, START_SECONDS)
    message, reason = _next(lines, wait)
    if message.get("done"):
      return None
    if message.get("started"):
      running, told = message, True
      _show(running, "...")
    elif running is None and told:  # it ended itself after a case
      return first
    elif running is None:  # it could not even begin, and neither would another one
      yield _result({"check": "worker", "name": "start"}, {"ok": False, "note": reason}, 0.0)
      return None
    elif not message:
      yield _result(running, {"ok": False, "note": reason}, wait)
      return running["place"] + 1
    else:
      yield _result(running, message["result"], message["wall_seconds"])
      first, running = message["place"] + 1, None


def _next(lines: queue.Queue[str | None], patience: float) -> tuple[dict[str, Any], str]:
  """The next message of the worker, or none and why there is none."""
  try:
    line = lines.get(timeout=patience)
  except queue.Empty:
    return {}, f"no end after {patience:.0f} s"
  return ({}, "the process ended") if line is None else (json.loads(line), "")


def _result(running: dict[str, Any], result: dict[str, Any], seconds: float) -> dict[str, Any]:
  _show(running, report.MARKS[result["ok"]], result.get("note", ""))
  return {"check": running["check"], "name": running["name"], "wall_seconds": seconds, **result}


def _show(running: dict[str, Any], *words: str) -> None:
  print(running["check"], running["name"], *words, file=sys.stderr, flush=True)


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
  for line in stream:
    lines.put(line)
  lines.put(None)


if __name__ == "__main__":
  sys.exit(main())
