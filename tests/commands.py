"""Runs commands in the process of the test, which has imported and compiled what they need.

Each file that does so runs its command once, at least, in a process of its own, as users do.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
from absl import app, flags
from absl.testing import flagsaver


class Done(NamedTuple):
  """What a command left, by the names of `subprocess.CompletedProcess`."""

  returncode: int
  stdout: str
  stderr: str


def run(module: str, *arguments: str, folder: Path) -> Done:
  """`python -m module arguments` in folder, which gets the files that it fetches too."""
  out, err = io.StringIO(), io.StringIO()
  with (
    _flags_of_its_own(),
    mock.patch.object(sys, "argv", [module, *arguments]),
    mock.patch.object(app, "run", _run_once_more),
    mock.patch.dict(os.environ, KVJAX_CACHE=str(folder / "cache")),
    jax.numpy_dtype_promotion("standard"),  # as users have it
    jax.numpy_rank_promotion("allow"),
    warnings.catch_warnings(),
    contextlib.chdir(folder),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    # It may have been imported by a test, and is made anew here as by a process of its own.
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    try:
      runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
      code = end.code or 0
  return Done(code, out.getvalue(), err.getvalue())


def _run_once_more(start, flags_parser):
  """absl's `app.run`, which a process may call once."""
  sys.exit(start(flags_parser(sys.argv)))


@contextlib.contextmanager
def _flags_of_its_own():
  """Takes away the flags that are defined inside, and what was given to others."""
  app.define_help_flags()
  parsed = flags.FLAGS.is_parsed()
  try:
    with flagsaver.flagsaver():
      yield
  finally:
    if not parsed:
      flags.FLAGS.unparse_flags()
