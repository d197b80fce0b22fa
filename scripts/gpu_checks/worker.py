"""Runs cases one after another and tells of each in a line of JSON on stdout.

A process of its own: a kernel that reads what it may not ends every later call of the process, and
one that waits for what never comes cannot be interrupted. `scripts.gpu_check` starts another one
behind such a case.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scripts.gpu_checks.case import Case, LeftOut, Setting


class Placed(NamedTuple):
  """A case and the check it belongs to, with the seconds that the check may take."""

  check: str
  case: Case
  seconds: float


def all_cases(checks: list[str], setting: Setting) -> Iterator[Placed]:
  """In a fixed order. A check that cannot even be imported is one case, which fails."""
  for check in checks:
    path = check if "." in check else f"scripts.gpu_checks.{check}"
    try:
      module = importlib.import_module(path)
      for case in module.cases(setting):
        yield Placed(check, case, module.SECONDS)
    except Exception as error:
      yield Placed(check, Case("import", _raising(error)), 60)


def _raising(error: Exception) -> Callable[[], dict[str, Any]]:
  def run():
    raise error

  return run


def outcome(case: Case) -> dict[str, Any]:
  """Numbers of a case, with `ok`: True, False, or None for one that was left out."""
  try:
    return {"ok": True, **case.run()}
  except LeftOut as reason:
    return {"ok": None, "note": _line(reason)}
  except Exception as error:
    if isinstance(error, ValueError) and "cannot run:" in str(error):  # `dispatch.choose` says so
      return {"ok": None, "note": _line(error)}
    return {"ok": False, "note": f"{type(error).__name__}: {_line(error)}"}


def _line(error: Exception) -> str:
  text = " ".join(str(error).split())
  return text if len(text) <= 300 else text[:297] + "..."


def main() -> None:
  """See `scripts.gpu_check`, which starts this."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--checks", required=True)
  parser.add_argument("--first", type=int, required=True, help="cases before this one are passed")
  parser.add_argument("--until", type=float, required=True, help="seconds since the epoch")
  parser.add_argument("--interpret", action="store_true")
  flags = parser.parse_args()
  if not flags.interpret and jax.default_backend() != "gpu":
    sys.exit("jax finds no NVIDIA GPU here; --interpret tries the checks on a CPU")
  tell = _messages()
  spent: dict[str, float] = {}
  for place, placed in enumerate(all_cases(flags.checks.split(","), Setting(flags.interpret))):
    if place < flags.first:
      continue
    tell(place=place, check=placed.check, name=placed.case.name, started=True)
    start = time.time()
    if start > flags.until or spent.get(placed.check, 0.0) > placed.seconds:
      result = {"ok": None, "note": "no time left"}
    else:
      result = outcome(placed.case)
    spent[placed.check] = spent.get(placed.check, 0.0) + time.time() - start
    tell(place=place, wall_seconds=time.time() - start, result=result)
    if result["ok"] is False and not _healthy():
      sys.exit("the device no longer works in this process")
  tell(done=True)


def _messages() -> Callable[..., None]:
  """Lines go to the stdout that was inherited; whatever else is printed goes to stderr."""
  stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)

  def tell(**message):
    print(json.dumps(message), file=stream, flush=True)

  return tell


def _healthy() -> bool:
  try:
    return bool(jax.block_until_ready(jnp.arange(4).sum()) == 6)
  except Exception:
    return False


if __name__ == "__main__":
  main()
