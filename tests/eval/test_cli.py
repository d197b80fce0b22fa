"""Errors are one line with an exit code, defects keep their traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from eval import cli, results

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """
from eval import cli
def define():
  cli.define_model_flag()
  cli.define_policy_flags()
  cli.define_out_dir("probe")
def main(args):
  print(args.model, args.budget_tokens, args.out_dir, sorted(cli.flag_values()))
cli.run(main, define)
"""


def _run(*arguments, folder=ROOT):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(
    [sys.executable, "-c", COMMAND, *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=environment,
  )


def test_flags_and_their_values(tmp_path):
  done = _run("--budget_tokens=64", folder=tmp_path)
  assert done.returncode == 0, done.stderr
  model, budget, out_dir, names = done.stdout.split(maxsplit=3)
  assert (model, budget) == ("smollm2-135m", "64")
  assert out_dir.startswith("runs/probe-2")
  assert names.strip() == "['budget_tokens', 'model', 'out_dir', 'page_size', 'policy', 'store']"
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("argument", "complaint"),
  [
    ("--polcy=quest", "Unknown command line flag 'polcy'"),
    ("--budget_tokens=many", "flag --budget_tokens=many"),
    ("--page_size=0", "flag --page_size=0: expected one of (8, 16, 32, 64)"),
    ("--out_dir=", "flag --out_dir=: expected the path of a new folder"),
    ("book.txt", "unexpected argument 'book.txt'"),
  ],
)
def test_bad_flags_are_one_line(argument, complaint):
  done = _run(argument)
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
  assert complaint in done.stderr


def test_arguments_for_a_command_that_takes_them():
  code = "from eval import cli\ncli.run(lambda _, more: print(more), lambda: None, True)"
  done = subprocess.run(
    [sys.executable, "-c", code, "a b", "c"],
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
  )
  assert (done.returncode, done.stdout) == (0, "['a b', 'c']\n"), done.stderr


def test_help_lists_the_flags_of_the_command():
  done = _run("--help")
  assert "--model" in done.stdout and "--budget_tokens" in done.stdout


def _raise(error):
  def main(args):
    raise error

  return main


@pytest.mark.parametrize(
  ("error", "code", "line"),
  [
    (OSError(errno.ENOSPC, "No space left on device", "a/b"), 2, "error: a/b: No space left"),
    (FileNotFoundError(errno.ENOENT, "No such file", "c"), 2, "error: c: No such file"),
    (OSError("odd"), 2, "error: odd"),
    (MemoryError("a lot"), 2, "error: not enough memory (a lot); ask for fewer"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x"), 2, "error: not enough memory (RES"),
    (KeyboardInterrupt(), 130, "stopped: interrupted"),
  ],
)
def test_errors_of_the_system(capsys, error, code, line):
  assert cli._guarded(_raise(error), []) == code
  err = capsys.readouterr().err
  assert err.startswith(line) and err.count("\n") == 1


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_notes_are_part_of_the_line(capsys, error):
  error.add_note("3 answers are in x")
  cli._guarded(_raise(error), [])
  assert capsys.readouterr().err.endswith("; 3 answers are in x\n")


def test_a_reader_that_goes_away():
  read, write = os.pipe()
  os.close(read)
  done = subprocess.run(
    [sys.executable, "-c", COMMAND],
    stdout=write,
    stderr=subprocess.PIPE,
    text=True,
    check=False,
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )
  os.close(write)
  assert done.returncode == 2
  assert done.stderr == "stopped: the reader of standard output closed it\n"


def test_our_own_value_error_is_one_line(capsys, tmp_path):
  (tmp_path / "results.jsonl").touch()
  assert cli._guarded(lambda args: results.start_run(tmp_path, {}), []) == 2
  err = capsys.readouterr().err
  assert err.count("\n") == 1
  assert "already holds results.jsonl; choose another --out_dir" in err


def test_other_value_errors_keep_their_traceback():
  def of_jax(args):
    jax.jit(lambda x: jnp.broadcast_shapes((2,), (3,)))(1.0)

  with pytest.raises(ValueError, match="shapes"):
    cli._guarded(of_jax, [])
  with pytest.raises(ValueError, match="test"):  # raised here, which is no code of ours
    cli._guarded(_raise(ValueError("test")), [])
  with pytest.raises(TypeError):
    cli._guarded(_raise(TypeError()), [])


def test_positive_ints():
  assert cli.positive_ints("sizes", ["1", "32"]) == [1, 32]
  for bad in ([], ["0"], ["-1"], ["a"], ["1", ""], ["1.5"]):
    with pytest.raises(ValueError, match="--sizes"):
      cli.positive_ints("sizes", bad)
