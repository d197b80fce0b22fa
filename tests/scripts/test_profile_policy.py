"""scripts.profile_policy on a tiny random model with a real tokenizer, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvjax import CacheConfig, make_policy
from kvjax.profiling import load_profile
from models import load
from scripts import profile_policy
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

ROOT = Path(__file__).resolve().parents[2]
ALICE = ROOT / "tests" / "data" / "alice_opening.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  config = dataclasses.replace(tiny.tied(), max_tokens=256, vocab_size=len(TOKENS), num_layers=5)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  return tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)


def _run(model, method, out, *arguments):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(
    [
      *(sys.executable, "-m", "scripts.profile_policy", f"--model={model}", f"--method={method}"),
      *(f"--text_file={ALICE}", "--prompt_tokens=80", f"--out={out}", *arguments),
    ],
    capture_output=True,
    text=True,
    check=False,
    cwd=out.parent,
    env=environment,
  )


def test_a_skew_that_infinigen_takes(model, tmp_path):
  out = tmp_path / "skew.npz"
  done = _run(model, "skewing", out)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("model   tiny, sha256 ")
  assert "of the energy of the queries" in done.stdout
  loaded = load(str(model))
  profile = load_profile(out, "skewing", loaded.content_hash)
  assert profile.settings["seed"] == 0 and profile.settings["prompt_tokens"] == 80
  policy = make_policy("infinigen", skew=profile.arrays["skew"])
  policy.register(loaded.model.config, CacheConfig(1, 64))
  again = _run(model, "skewing", out)
  assert again.returncode == 2 and "exists; give --out the name of a new file" in again.stderr


def test_filter_layers_that_omnikv_takes(model, tmp_path):
  out = tmp_path / "filters.npz"
  done = _run(model, "filter_layers", out, "--steps=5", "--num_filters=2", "--seed=1")
  assert done.returncode == 0, done.stderr
  loaded = load(str(model))
  profile = load_profile(out, "filter_layers", loaded.content_hash)
  mass, filters = profile.arrays["mass"], tuple(profile.arrays["filters"].tolist())
  assert mass.shape == (5, 5) and np.isfinite(mass).all() and (np.diagonal(mass) > 0).all()
  assert filters[0] == 2 and f"filter layers {filters[0]} (" in done.stdout
  make_policy("omnikv", filter_layers=filters).register(loaded.model.config, CacheConfig(1, 64))


def test_passages_are_seeded(model):
  loaded, text = load(str(model)), ALICE.read_text("utf-8") * 4
  first, again, other = (profile_policy.passage(loaded, text, 50, seed) for seed in (3, 3, 4))
  assert first == again != other and len(first) == 50


def test_what_passage_refuses(model):
  loaded = load(str(model))
  with pytest.raises(ValueError, match="300 tokens exceed the context of 256"):
    profile_policy.passage(loaded, "text " * 1000, 300, 0)
  with pytest.raises(ValueError, match="tokens and 200 are needed; give a longer one"):
    profile_policy.passage(loaded, "short", 200, 0)
  with pytest.raises(ValueError, match="has no tokenizer"):
    profile_policy.passage(loaded._replace(tokenizer=None), "text", 5, 0)
