"""Notebooks run from top to bottom on a small model, and are stored without outputs."""

from __future__ import annotations

import pytest

from tests.notebooks.running import ROOT, assert_stored_bare, cells_of, run

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODEL = ROOT / "models" / "small" / "small-llama"  # reads bytes
SAYS = {  # what only a run that got that far has said, and how many pictures it has drawn
  "quickstart": (("quest, 1/16", "KV on device"), 1),
  "inside_a_cache": (("most often at the hidden number: layer", "CacheBytes(keys_values="), 5),
  "reproduce_a_figure": (("agreement about unstable heads", "new pages of stable heads"), 1),
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_stored_without_outputs(notebook):
  assert_stored_bare(notebook)


def test_all_are_run():
  assert {path.stem for path in NOTEBOOKS} == {"write_a_policy", *SAYS}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_code_installs(notebook):
  first = next(cell for cell in cells_of(notebook) if cell["cell_type"] == "code")
  assert "%pip install" in "".join(first["source"])


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name, tmp_path, monkeypatch):
  text = tmp_path / "book.txt"
  text.write_text(" ".join(f"Sentence number {n} ends here." for n in range(200)), "utf-8")
  settings = {"MODEL": MODEL, "TEXT": text, "TOKENS": 800, "STEPS": 48}
  outputs = run(ROOT / "notebooks" / f"{name}.ipynb", tmp_path, monkeypatch, settings)
  said, pictures = SAYS[name]
  assert all(one in outputs for one in said)
  assert outputs.count('"image/png"') == pictures
