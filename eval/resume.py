"""Runs that go on with what an earlier start left in their folder.

A command finds what is there before it loads anything, compares before it computes anything, and
writes as the only one:

    earlier = resume.earlier_run(out_dir, cli.flag_values())
    manifest = results.make_manifest(...)
    with resume.kept_lines(out_dir, manifest, earlier, FIELDS, ELEMENTS) as (found, keep):
      keep([line])  # whatever is not in found

`eval.grid`, whose processes share a run, uses the parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import lines
from eval.lines import Fields, Line
from eval.results import (
  LINES,
  MANIFEST,
  Row,
  append_lines,
  check_new_run,
  read_rows,
  run_folder,
  write_atomically,
  write_rows,
)

OUT_DIR = "Folder for rows, what they are made of, manifest and plots: new, or of a run to end."
# What may differ when a run is gone on with: where it and its data lie (the content of the data is
# compared), and who shares the work.
_FREE_FLAGS = (
  *("out_dir", "download", "coordinator_address", "num_processes", "process_id"),
  *("data_dir", "text_file", "text_dir"),
)
# Entries of a manifest that must be the same; of a commit, versions and the like it is told.
_SAME = ("command", "model", "data", "device", "backend")


def earlier_run(out_dir: Path, flags: Mapping[str, Any]) -> dict[str, Any] | None:
  """The manifest of a run that the folder holds; None for a new folder.

  Args:
    out_dir: the folder.
    flags: of this run.

  Raises:
    ValueError: see `check_new_run`, a manifest that cannot be read, or one of other flags.
  """
  path = out_dir / MANIFEST
  if not path.exists():
    check_new_run(out_dir)
    return None
  try:
    manifest = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is no manifest ({error}); choose another --out_dir") from error
  if not isinstance(manifest, dict):
    kind = type(manifest).__name__
    raise ValueError(
      f"{path} is no manifest (it is a JSON {kind}, expected an object); choose another --out_dir"
    )
  check_same_run(out_dir, manifest, flags=flags)
  return manifest


def check_manifest(out_dir: Path, earlier: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
  """`check_same_run` of all that a manifest says and that must not differ, but for the flags."""
  check_same_run(out_dir, earlier, **{name: manifest[name] for name in _SAME})


def check_same_run(out_dir: Path, earlier: Mapping[str, Any], **now: Any) -> None:
  """Says whether a run can go on with what an earlier one left in its folder.

  Args:
    out_dir: the folder.
    earlier: its manifest.
    now: entries of the manifest that this run would write, those that are known: command, flags,
      model, data, device, backend. Flags that say where something lies or runs may differ.

  Raises:
    ValueError: something else differs; it names the first difference.
  """
  for entry, value in json.loads(json.dumps(now, default=str)).items():
    before = earlier.get(entry)
    if isinstance(before, dict) and isinstance(value, dict):
      names = dict.fromkeys([*before, *value])
      pairs = [(name, before.get(name), value.get(name)) for name in names]
    else:
      pairs = [(entry, before, value)]
    for name, there, here in pairs:
      if there != here and not (entry == "flags" and name in _FREE_FLAGS):
        kinds = {"flags": f"--{name}", "model": f"the model's {name}", "data": f"the data {name}"}
        raise ValueError(
          f"{out_dir} holds another run: {kinds.get(entry, name)} was {there!r} there and is "
          f"{here!r} now; choose another --out_dir, or ask for the same"
        )


@contextlib.contextmanager
def kept_lines(
  out_dir: Path,
  manifest: Mapping[str, Any],
  earlier: Mapping[str, Any] | None,
  fields: Fields,
  elements: Fields,
) -> Generator[tuple[list[Line], Callable[[Sequence[Line]], None]]]:
  """The folder of a run while it is written to, by one process.

  Args:
    out_dir: the folder.
    manifest: of this run.
    earlier: of the run that the folder holds, see `earlier_run`; None for a new one.
    fields: of a line, see `lines.read`.
    elements: of its lists.

  Yields:
    The lines that are there, and a function that adds some: on the disk when it returns, none of
    them when it raises. What a run that is cut short says (Ctrl-C, a full disk) tells how many are
    kept.

  Raises:
    ValueError: it is another run, another process writes to it, or a line is damaged.
  """
  path = out_dir / LINES
  if earlier is not None:
    check_manifest(out_dir, earlier, manifest)
  with told_what_is_kept(out_dir, lambda: _count(path)), contextlib.ExitStack() as stack:
    if earlier is None:
      stack.enter_context(run_folder(out_dir, manifest))
    stack.enter_context(sole_writer(out_dir))  # before anything is read
    found = lines.read(path, fields, elements) if path.exists() else []
    lines.cut_torn_line(path)
    to_tell = earlier is not None

    def keep(fresh: Sequence[Line]) -> None:
      nonlocal to_tell
      if to_tell:  # not when nothing is left to do
        note_resumed(out_dir, earlier or {}, manifest)
        to_tell = False
      append_lines(path, fresh)

    yield found, keep


def update_rows(out_dir: Path, rows: Sequence[Row]) -> None:
  """Writes rows that are made anew from the beginning, but for those that are there already.

  Raises:
    ValueError: results.jsonl holds something else than rows.
  """
  known = read_rows(out_dir)
  if known[: len(rows)] != rows:
    write_rows(out_dir, rows)


@contextlib.contextmanager
def told_what_is_kept(out_dir: Path, count: Callable[[], int]) -> Generator[None]:
  """Notes on what cuts a run short, as Ctrl-C or a full disk, where answers are; see `cli.run`."""
  try:
    yield
  except (KeyboardInterrupt, OSError) as error:
    kept = count()
    if kept:
      error.add_note(
        f"{kept} answers are in {out_dir}, go on with the same command and --out_dir={out_dir}"
      )
    raise


@contextlib.contextmanager
def sole_writer(out_dir: Path) -> Generator[None]:
  """Keeps other processes out of a folder; a process that is killed keeps none out.

  Raises:
    ValueError: another process is there.
  """
  folder = os.open(out_dir, os.O_RDONLY)
  try:
    _lock(folder, out_dir)
    yield
  finally:
    os.close(folder)  # which ends the lock


def note_resumed(out_dir: Path, earlier: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
  """Adds to the manifest of an earlier run that it was gone on with, when, and what is new since.

  What is not as it was (commit, versions, machine) is warned of.
  """
  kinds = ("commit", "versions", "platform", "cpu", "cores")
  changed = {name: manifest[name] for name in kinds if manifest[name] != earlier.get(name)}
  resumed = [*earlier.get("resumed", ()), {"utc": manifest["utc"]} | changed]
  content = json.dumps(dict(earlier) | {"resumed": resumed}, indent=2, default=str) + "\n"
  write_atomically(out_dir / MANIFEST, content)
  if changed:
    told = (f"{name} {value} (was {earlier.get(name)})" for name, value in changed.items())
    print(f"warning: this is not as when the run began: {', '.join(told)}", file=sys.stderr)


def _count(path: Path) -> int:
  return path.read_bytes().count(b"\n") if path.exists() else 0


def _lock(folder: int, out_dir: Path) -> None:
  try:
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ValueError(
      f"another process is writing to {out_dir}; wait for it, or choose another --out_dir"
    ) from error
  except OSError:  # some network file systems lock no folders: there it is up to the user
    pass
