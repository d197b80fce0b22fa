"""The small models that ship: they recall what dense attention sees, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from eval import recall
from models import load
from scripts import small_models, small_report

FOLDER = Path(__file__).resolve().parents[2] / "models" / "small"
BOOK = recall.plain((Path(__file__).parents[1] / "data/alice_opening.txt").read_text("utf-8"))
LENGTH, WINDOW = 2048, 256
pytestmark = pytest.mark.usefixtures("fully_optimized")  # they compute longer than they compile


@pytest.fixture(scope="module", params=small_models.SHAPES)
def loaded(request, tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KVJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
    return load(str(FOLDER / request.param))


def _share(loaded, task, policy="dense", budget_tokens=None, depth=None):
  """Right answers to 20 questions, as a share."""
  rng = random.Random(f"{task} {depth}")
  texts = [recall.build(task, BOOK, LENGTH, rng, depth=depth) for _ in range(20)]
  runner = small_report.runner(loaded, LENGTH, policy, budget_tokens, rows=10)
  return sum(small_report.correct(loaded, runner, texts)) / len(texts)


def test_shape_and_tokenizer(loaded):
  assert loaded.model.config == small_models.SHAPES[loaded.name]
  assert loaded.tokenizer.encode("?QK=") == [256, *b"?QK="]
  assert loaded.tokenizer.eos_ids == (10,)


@pytest.mark.parametrize("task", ["lookup", "chain"])
def test_dense_recalls(loaded, task):
  assert _share(loaded, task) > 0.9


def test_dense_recalls_most_passkeys(loaded):
  """The rest goes on with another passkey that begins with the same two digits."""
  assert _share(loaded, "passkey") > 0.6


@pytest.mark.parametrize("task", recall.TASKS)
def test_what_has_left_the_window_is_lost(loaded, task):
  assert _share(loaded, task, "streaming", WINDOW, depth=0.5) < 0.1


def test_what_is_in_the_window_is_recalled(loaded):
  assert _share(loaded, "lookup", "streaming", WINDOW, depth=0.99) > 0.9


def test_the_card_is_of_these_weights(loaded):
  assert loaded.content_hash in (FOLDER / loaded.name / "README.md").read_text("utf-8")
