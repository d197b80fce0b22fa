"""A tiny model for lm-evaluation-harness, and what the harness expects of any model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance

from tests.models import naive, tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

TASKS = Path(__file__).resolve().parents[1] / "data" / "lm_harness"
TEXTS = ["the tin", "in the beginning there was a tin, and in the tin there was another", "12 in"]


def write_model(folder: Path) -> Path:
  """A file with a model of one layer."""
  config = dataclasses.replace(tiny.tied(), max_tokens=256, vocab_size=len(TOKENS), num_layers=1)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  return tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)


def go_offline(monkeypatch, folder: Path) -> None:
  """The harness reads two local files and asks nobody."""
  for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    monkeypatch.setenv(name, "1")
  monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")
  monkeypatch.chdir(TASKS)


def likelihoods(lm, pairs):
  requests = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
  return lm.loglikelihood(requests, disable_tqdm=True)


def generate_texts(lm, contexts=TEXTS, **asked):
  asked = {"until": ["\n"], "max_gen_toks": 12} | asked
  requests = [
    Instance("generate_until", {}, (text, asked), place) for place, text in enumerate(contexts)
  ]
  return lm.generate_until(requests, disable_tqdm=True)


def forward(loaded, ids):
  logits = naive.logits(loaded.model, loaded.params, jnp.asarray([ids]))[0]
  return np.asarray(jax.nn.log_softmax(logits))


def one_pass(loaded, context, continuation):
  """As the harness defines it: spaces at the end of a context belong to the continuation."""
  words = loaded.tokenizer
  whole = words.encode(context + continuation)
  before = len(words.encode(context.rstrip()))
  if not context:
    whole, before = [words.bos_id, *whole], 1
  wanted = whole[before:]
  log_probs = forward(loaded, whole)[before - 1 : -1]
  found = log_probs[np.arange(len(wanted)), wanted].sum()
  return found, (log_probs.argmax(-1) == wanted).all()
