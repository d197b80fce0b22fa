"""Real models against numbers made by other implementations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.models import naive
from tests.models.llama2c import BOS, DATA, load_stories, read_words

TEST_DATA = Path(__file__).resolve().parents[1] / "data"
STORIES = json.loads((DATA / "golden.json").read_text("utf-8"))
SMOLLM2 = json.loads((TEST_DATA / "smollm2_golden.json").read_text("utf-8"))
CASES = range(len(SMOLLM2["cases"]))


@pytest.fixture(scope="module")
def stories():
  return load_stories()


@pytest.fixture(scope="module")
def words():
  return read_words(DATA / "tok512.bin", 512)


@pytest.fixture(scope="module")
def smollm2():
  return models.load("smollm2-135m")


def test_stories_config_is_the_preset(stories):
  assert stories[0].config == models.PRESETS["stories260k"]


def test_stories_first_logits(stories):
  model, params = stories
  ids = jnp.asarray([STORIES["greedy_ids_from_bos"][:3]])
  logits = naive.logits(model, params, ids)[0]
  for found, golden in zip(logits, STORIES["first_logits"], strict=True):
    top = jax.lax.top_k(found, 5)
    assert top[1].tolist() == golden["top5_ids"]
    np.testing.assert_allclose(top[0], golden["top5_logits"], atol=1e-3)


def test_stories_greedy_tokens(stories):
  # One pass over the golden ids: each being the best after those before it is greedy decoding.
  model, params = stories
  ids = STORIES["greedy_ids_from_bos"]
  best = naive.logits(model, params, jnp.asarray([ids]))[0].argmax(-1)
  assert best[:-1].tolist() == ids[1:]


def test_stories_text(words):
  ids = STORIES["greedy_ids_from_bos"]
  assert words.decode(ids) == STORIES["greedy_text"]
  opening = "Once upon a time, there was a little girl named Lily."
  assert words.encode(opening) == ids[: len(words.encode(opening))]
  assert words.encode("")[0] == BOS
  assert words.decode(words.encode("Zoë said 100%")) == " Zoë said 100%"


@pytest.mark.slow
def test_smollm2_config_is_the_preset(smollm2):
  found = smollm2.model.config
  assert found.norm_eps == pytest.approx(1e-5)
  assert dataclasses.replace(found, norm_eps=1e-5) == models.PRESETS["smollm2-135m"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_smollm2_logits_and_greedy_tokens(smollm2, case):
  golden = SMOLLM2["cases"][case]
  prompt, answer = golden["ids"], golden["greedy_ids"]
  logits = naive.logits(smollm2.model, smollm2.params, jnp.asarray([prompt + answer]))[0]
  logits = logits[len(prompt) - 1 : -1]
  top = jax.lax.top_k(logits[0], 10)
  assert top[1].tolist() == golden["top10_ids"]
  np.testing.assert_allclose(top[0], golden["top10_logits"], atol=1e-3)
  assert logits.argmax(-1).tolist() == answer


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_smollm2_ids_and_text(smollm2, case):
  golden, tokenizer = SMOLLM2["cases"][case], smollm2.tokenizer
  assert tokenizer.encode(golden["prompt"]) == golden["ids"]
  assert tokenizer.decode(golden["ids"], skip_special=False) == golden["prompt"]
  assert tokenizer.decode(golden["greedy_ids"], skip_special=False) == golden["greedy_text"]
  without = golden["greedy_text"].removesuffix("<|im_end|>")
  assert tokenizer.decode(golden["greedy_ids"]) == without


@pytest.mark.slow
def test_smollm2_chat_is_the_golden_prompt(smollm2):
  tokenizer = smollm2.tokenizer
  question = [{"role": "user", "content": "Name three primary colors."}]
  prompt = SMOLLM2["cases"][2]["prompt"]
  assert tokenizer.chat(question) == prompt
  closed = tokenizer.chat(question, add_generation_prompt=False)
  assert closed == prompt.removesuffix("<|im_start|>assistant\n")
  assert tokenizer.eos_ids == (2,) and tokenizer.bos_id == 1 and tokenizer.vocab_size == 49152
  assert tokenizer.encode(prompt).count(1) == prompt.count("<|im_start|>")  # none was added


@pytest.mark.slow
@pytest.mark.usefixtures("fully_optimized")  # it computes longer than it compiles
def test_smollm2_mean_nll_of_a_book(smollm2):
  golden = SMOLLM2["nll"]
  text = (TEST_DATA / "alice_opening.txt").read_text("utf-8")
  ids = smollm2.tokenizer.encode(text)[:2048]
  assert ids[:16] == golden["ids_first16"]
  # Causal: the loss of every prefix is in the one pass over the whole.
  hidden = naive.hidden(smollm2.model, smollm2.params, jnp.asarray([ids]))[0, :-1]
  nll = []
  for start in range(0, len(hidden), 512):  # in pieces: all logits at once are 400 MB
    logits = smollm2.model.unembed(smollm2.params, hidden[start : start + 512])
    following = jnp.asarray(ids[start + 1 : start + 1 + len(logits)])[:, None]
    nll.append(-jnp.take_along_axis(jax.nn.log_softmax(logits), following, axis=-1)[:, 0])
  losses = np.concatenate(nll)
  for count, expected in golden["mean_nll"].items():
    assert losses[: int(count) - 1].mean() == pytest.approx(expected, abs=1e-3)
