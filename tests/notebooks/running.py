"""Runs a notebook as a reader would, with the model and the text that a test gives it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def cells_of(notebook: Path) -> list[dict[str, Any]]:
  """The cells as they are stored."""
  return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def assert_stored_bare(notebook: Path) -> None:
  """Outputs would grow the repository, and age."""
  code = [cell for cell in cells_of(notebook) if cell["cell_type"] == "code"]
  assert len(code) > 5
  assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


def run(
  notebook: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any]
) -> str:
  """All outputs of a run in folder, as JSON; settings are the KVJAX_NOTEBOOK_... it reads."""
  nbformat = pytest.importorskip("nbformat", reason="needs the extra: pip install -e .[notebooks]")
  nbclient = pytest.importorskip("nbclient", reason="needs the extra: pip install -e .[notebooks]")
  pytest.importorskip("ipykernel", reason="needs the extra: pip install -e .[notebooks]")
  for name, value in settings.items():
    monkeypatch.setenv(f"KVJAX_NOTEBOOK_{name}", str(value))
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
  monkeypatch.delenv("MPLBACKEND", raising=False)  # or the kernel would not show its pictures
  read = nbformat.read(notebook, as_version=4)
  place = {"metadata": {"path": str(folder)}}
  nbclient.NotebookClient(read, timeout=300, resources=place).execute()
  return json.dumps([cell.get("outputs", []) for cell in read["cells"]])
