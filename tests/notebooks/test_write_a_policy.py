"""The notebook runs from top to bottom; its policy, which the page shows too, keeps the laws."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine import steps
from tests.kvjax import matrix, test_laws
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS
from tests.notebooks.running import ROOT, cells_of, run

NOTEBOOK = ROOT / "notebooks" / "write_a_policy.ipynb"
MAGIC = "%%writefile mean_key.py\n"


def _policy_source():
  sources = ["".join(cell["source"]) for cell in cells_of(NOTEBOOK)]
  (source,) = (one.removeprefix(MAGIC) for one in sources if one.startswith(MAGIC))
  return source.rstrip("\n") + "\n"


def test_the_policy_has_at_most_40_lines_and_the_page_shows_the_same():
  source = _policy_source()
  assert len(source.splitlines()) <= 40
  page = (ROOT / "docs" / "write_a_policy.md").read_text(encoding="utf-8")
  assert re.findall(r"```python\n(.*?)```", page, re.DOTALL) == [source]


@pytest.fixture
def entry(tmp_path, monkeypatch):
  """The policy's file as a cell of the matrix of laws."""
  path = tmp_path / "mean_key.py"
  path.write_text(_policy_source(), encoding="utf-8")
  harsh = {"budget_tokens": 32, "dense_layers": 1}
  monkeypatch.setitem(matrix.SETTINGS, str(path), {"harsh": harsh})
  return matrix.Entry(str(path), "harsh", "resident")


def test_the_policy_keeps_the_laws(entry):
  test_laws.test_full_budget_equals_dense(entry)
  test_laws.test_under_the_budget_a_row_is_dense_and_over_it_not(entry, test_laws.SHAPE)
  test_laws.test_the_budget_is_kept(entry)
  test_laws.test_masked_dense_attention_equals_the_method(entry, test_laws.SHAPE)
  test_laws.test_a_row_alone_equals_the_row_in_a_batch(entry, 2)


def test_the_policy_does_not_mind_what_its_state_held_before(entry, monkeypatch):
  runner, empty_cache = matrix.runner_of(entry, test_laws.SHAPE), steps.empty_cache
  expected = test_laws.base_run(entry, test_laws.SHAPE)

  def poisoned(runner):
    cache = empty_cache(runner)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == "float32" else x, cache)

  monkeypatch.setattr(steps, "empty_cache", poisoned)
  params = matrix.model_of(entry, test_laws.SHAPE)[1]
  run = matrix.teacher_forced(runner, params, matrix.ROWS, matrix.LENGTHS)
  np.testing.assert_allclose(run.logits, expected.logits, **test_laws.TOLERANCE)


def test_the_notebook_runs(tmp_path, monkeypatch):
  config = dataclasses.replace(tiny.tied(), max_tokens=2048, vocab_size=len(TOKENS), num_layers=3)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  model = tiny.write_gguf(tmp_path / "tiny.gguf", config, tiny.tensors(config), extra=extra)
  text = tmp_path / "book.txt"
  text.write_text(" ".join(f"Sentence number {n} ends here." for n in range(200)), "utf-8")
  settings = {"MODEL": model, "TEXT": text, "TOKENS": 1000}
  outputs = run(NOTEBOOK, tmp_path, monkeypatch, settings)
  assert "mean_key@250" in outputs and "image/png" in outputs
