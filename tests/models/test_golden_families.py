"""Every family against the numbers of transformers: f32 logits, and 64 greedy tokens a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax.engine.generate import prefill
from kvjax.types import Model, Params
from scripts import golden_models
from tests.models import naive

GOLDEN = json.loads(
  (Path(__file__).resolve().parents[1] / "data" / "families" / "golden.json").read_text("utf-8")
)
PLACES, CASES = GOLDEN["places"], GOLDEN["cases"]
PROMPTS = golden_models.prompts()
STEPS = golden_models.NEW_TOKENS
CHUNK = 64


class Case(NamedTuple):
  name: str
  folder: Path
  model: Model
  params: Params
  runner: kvjax.Runner
  rows: list[dict]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
  name, golden = request.param, CASES[request.param]
  folder = tmp_path_factory.mktemp("golden") / name
  digest = golden_models.write(folder, golden_models.CASES[name], golden["seed"])
  assert digest == golden["sha256"], "these are not the weights that transformers was given"
  loaded = models.load(str(folder))
  runner = _runner(loaded.model, len(PROMPTS))  # one, so that it is compiled once
  return Case(name, folder, loaded.model, loaded.params, runner, golden["rows"])


def test_every_case_has_its_numbers():
  assert list(CASES) == list(golden_models.CASES)
  for golden in CASES.values():
    assert [len(row["tokens"]) for row in golden["rows"]] == [STEPS] * len(PROMPTS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_pass_over_a_padded_batch(case, side):
  # Each golden token being the best after those before it is greedy decoding.
  rows = [[*prompt, *row["tokens"]] for prompt, row in zip(PROMPTS, case.rows, strict=True)]
  longest = max(map(len, rows))
  tokens, valid = np.zeros((2, len(rows), longest), np.int32)
  starts = [longest - len(row) if side == "left" else 0 for row in rows]
  for index, (start, row) in enumerate(zip(starts, rows, strict=True)):
    tokens[index, start : start + len(row)] = row
    valid[index, start : start + len(row)] = 1
  logits = naive.logits(case.model, case.params, jnp.asarray(tokens), jnp.asarray(valid) > 0)
  for index, (start, row) in enumerate(zip(starts, rows, strict=True)):
    end = start + len(row)
    _check_row(logits[index, end - STEPS - 1 : end - 1], case.rows[index])


def test_prefill_in_chunks_and_steps_of_a_ragged_batch(case):
  last, cache = prefill(case.runner, case.params, PROMPTS)
  logits = [case.model.unembed(case.params, last)]
  golden = np.array([row["tokens"] for row in case.rows], np.int32)
  for tokens in golden[:, :-1].T:
    one, cache = kvjax.decode_step(case.runner, case.params, cache, tokens)
    logits.append(one)
  for found, row in zip(np.stack(logits, axis=1), case.rows, strict=True):
    _check_row(found, row)


def test_generate(case):
  made = kvjax.generate(case.runner, case.params, PROMPTS, max_new_tokens=STEPS)
  assert made.tokens == [row["tokens"] for row in case.rows]


def _runner(model, batch):
  longest = max(map(len, PROMPTS)) + STEPS
  cache_config = kvjax.CacheConfig(batch, longest, base_tokens=longest)
  assert min(map(len, PROMPTS)) < CHUNK < len(PROMPTS[0])  # some prompts need two chunks
  return kvjax.prepare(
    model, kvjax.make_policy("dense"), "resident", cache_config, chunk_tokens=CHUNK
  )


def _check_row(logits, golden):
  """logits f32[STEPS, V], those before each new token."""
  assert logits.argmax(-1).tolist() == golden["tokens"]
  for at, name in ((0, "first_logits"), (-1, "last_logits")):
    np.testing.assert_allclose(logits[at, np.array(PLACES)], golden[name], atol=1e-4, rtol=0)
