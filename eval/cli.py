"""What every command shares: flags with the same names, and errors that are one line.

A command defines its flags in a function, so that importing it has no side effect:

    if __name__ == "__main__":
      cli.run(main, define_flags)
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from kvjax.config import PAGE_SIZES
from kvjax.policies import KVPRESS, POLICIES

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
_POLICY = (
  f"one of {', '.join(POLICIES)}, kvpress' name of one ({', '.join(KVPRESS)}), or the path of a "
  ".py file; with options, NAME:option=value:..., as quest:score=mean or omnikv:profile=FILE"
)
_OURS = ("__main__", "kvjax", "models", "pallas_kernels", "eval", "scripts")

# Flags that are defined here belong to the command that asked for them, in --help too.
flags.disclaim_key_flags()


def run(
  main: Callable[..., None], define_flags: Callable[[], None], takes_arguments: bool = False
) -> None:
  """Runs a command and exits.

  Bad flags, a `ValueError` that our own code raised, errors of the operating system (no such file,
  disk full) and lack of memory end with one line on stderr and exit code 2; an interrupt ends with
  one line and 130. Notes of an error of the system or an interrupt are part of its line. Any other
  exception is a defect and keeps its traceback.

  Args:
    main: the command, given the parsed flags.
    define_flags: defines them; called first.
    takes_arguments: main is also given a list of what stands beside the flags; otherwise that is
      refused.
  """
  define_flags()

  def start(argv: list[str]) -> int | None:
    if flags.FLAGS.verbosity == 0:  # what absl's app sets where the user does not
      logging.set_verbosity(logging.WARNING)  # JAX informs about every backend that is not there
    if takes_arguments:
      return _guarded(lambda args: main(args, argv[1:]), [])
    return _guarded(main, argv[1:])

  app.run(start, flags_parser=_parse)


def define_model_flag() -> None:
  """--model."""
  flags.DEFINE_string(
    "model",
    "smollm2-135m",
    "smollm2-135m (fetched once), a .gguf file, a folder with safetensors or one that "
    "scripts.convert_checkpoint wrote, or random:NAME.",
  )


def define_policy_flags(policy: str = "quest", budget_tokens: int = 2048) -> None:
  """--policy, --store, --budget_tokens and --page_size, for commands that run one policy."""
  flags.DEFINE_string("policy", policy, f"Which keys and values count: {_POLICY}.")
  flags.DEFINE_string("store", None, "Where they live; by default the policy's own first choice.")
  flags.DEFINE_integer("budget_tokens", budget_tokens, "Tokens that a policy attends to.")
  define_page_size_flag()


def define_policies_flags(policies: Sequence[str], budget_tokens: Sequence[int]) -> None:
  """--policies, --stores, --budget_tokens and --page_size, for commands that compare policies."""
  flags.DEFINE_list(
    "policies",
    list(policies),
    f"Policies to compare, separated by commas. Each is {_POLICY}. One whose options have commas "
    "stands in double quotes: 'dense,\"omnikv:filter_layers=(2,8)\"'.",
  )
  flags.DEFINE_list("stores", [], "A store for each policy; by default its own first choice.")
  flags.DEFINE_list(
    "budget_tokens", [str(one) for one in budget_tokens], "Budgets, separated by commas."
  )
  define_page_size_flag()


def define_page_size_flag() -> None:
  """--page_size."""
  flags.DEFINE_integer("page_size", 16, f"Tokens of a page, one of {PAGE_SIZES}.")
  flags.register_validator(
    "page_size", lambda value: value in PAGE_SIZES, f"expected one of {PAGE_SIZES}"
  )


def define_out_dir(name: str, text: str = "New folder for rows, manifest and plots.") -> None:
  """--out_dir, by default a new folder under runs/ named after the command and the time."""
  now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
  names = itertools.chain([f"{name}-{now}"], (f"{name}-{now}-{n}" for n in itertools.count(2)))
  default = next(path for path in map(Path("runs").joinpath, names) if not path.exists())
  flags.DEFINE_string("out_dir", str(default), text)
  flags.register_validator("out_dir", bool, "expected the path of a new folder")


def flag_values() -> dict[str, Any]:
  """Name -> value of every flag of the running command, for its manifest."""
  return {flag.name: flag.value for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}


def positive_ints(name: str, values: Sequence[str]) -> list[int]:
  """The numbers of a list flag.

  Raises:
    ValueError: the list is empty, or an entry is not a positive whole number.
  """
  if not values:
    raise ValueError(f"--{name} is empty, expected positive numbers separated by commas")
  for value in values:
    if not value.strip().isdecimal() or int(value) < 1:
      raise ValueError(f"--{name}: {value!r} is not a positive number")
  return [int(value) for value in values]


def _parse(argv: list[str]) -> list[str]:
  app.define_help_flags()
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _complain(f"{error}; --help lists the flags")
    sys.exit(BAD_INPUT)


def _guarded(main: Callable[[flags.FlagValues], None], arguments: list[str]) -> int:
  if arguments:
    _complain(f"unexpected argument {arguments[0]!r}, expected --flag=value; --help lists them")
    return BAD_INPUT
  try:
    main(flags.FLAGS)
    _flush()  # here, where a reader that has gone is noticed in time
  except KeyboardInterrupt as error:
    _complain(_with_notes("interrupted", error), label="stopped")
    return INTERRUPTED
  except BrokenPipeError:
    # Whoever read the output has gone; Python must not try to write the rest of it when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _complain("the reader of standard output closed it", label="stopped")
    return BAD_INPUT
  except OSError as error:
    where = f"{error.filename}: " if error.filename else ""
    _complain(_with_notes(f"{where}{error.strerror or error}", error))
    return BAD_INPUT
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
      raise
    _complain(f"not enough memory ({error}); ask for fewer tokens or a smaller batch")
    return BAD_INPUT
  except ValueError as error:
    if not _is_ours(error):
      raise
    _complain(str(error))
    return BAD_INPUT
  return 0


def _is_ours(error: ValueError) -> bool:
  """Our own code raised it, so that its message is meant for the user."""
  # JAX hides its own frames and leaves a note, which would make its errors look like ours.
  if getattr(error, "__notes__", None):
    return False
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  return frame.f_globals.get("__name__", "").partition(".")[0] in _OURS


def _with_notes(message: str, error: BaseException) -> str:
  return "; ".join([message, *getattr(error, "__notes__", ())])


def _complain(message: str, label: str = "error") -> None:
  with contextlib.suppress(OSError):  # the output itself may be what failed
    _flush()
  print(f"{label}: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _flush() -> None:
  if sys.stdout is not None:  # as it is when it was closed from the start
    sys.stdout.flush()
