"""Whether a run may go on with what an earlier one left in its folder, and that only one does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from eval.results import MANIFEST, check_new_run, write_atomically

# What may differ when a run is gone on with: where it and its data lie (the content of the data is
# compared), and who shares the work.
_FREE_FLAGS = (
  *("out_dir", "download", "coordinator_address", "num_processes", "process_id"),
  *("data_dir", "text_file", "text_dir"),
)


def earlier_run(out_dir: Path) -> dict[str, Any] | None:
  """The manifest of a run that the folder holds; None for a new folder.

  Raises:
    ValueError: see `check_new_run`, or a manifest that cannot be read.
  """
  path = out_dir / MANIFEST
  if not path.exists():
    check_new_run(out_dir)
    return None
  try:
    manifest = json.loads(path.read_bytes())
    return {name: manifest[name] for name in manifest}  # fails for what is no object
  except (ValueError, TypeError, LookupError, RecursionError) as error:
    raise ValueError(f"{path} is no manifest ({error}); choose another --out_dir") from error


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


def note_resumed(out_dir: Path, earlier: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
  """Adds to the manifest of an earlier run that it was gone on with, when, and what is new since.

  Returns:
    Names and values of what is not as it was: commit, versions, machine. Empty if all is.
  """
  kinds = ("commit", "versions", "platform", "cpu", "cores")
  changed = {name: manifest[name] for name in kinds if manifest[name] != earlier.get(name)}
  resumed = [*earlier.get("resumed", ()), {"utc": manifest["utc"]} | changed]
  content = json.dumps(dict(earlier) | {"resumed": resumed}, indent=2, default=str) + "\n"
  write_atomically(out_dir / MANIFEST, content)
  return ", ".join(f"{name} {value} (was {earlier.get(name)})" for name, value in changed.items())


def _lock(folder: int, out_dir: Path) -> None:
  try:
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ValueError(
      f"another process is writing to {out_dir}; wait for it, or choose another --out_dir"
    ) from error
  except OSError:  # some network file systems lock no folders: there it is up to the user
    pass
