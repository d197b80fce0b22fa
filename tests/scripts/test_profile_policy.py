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
from kvjax.profiling import check_model, load_profile
from models import load
from scripts import passkeys, profile_policy
from tests import commands
from tests.models import tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

ROOT = Path(__file__).resolve().parents[2]
ALICE = ROOT / "tests" / "data" / "alice_opening.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  config = dataclasses.replace(tiny.tied(), max_tokens=1024, vocab_size=len(TOKENS), num_layers=5)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  return tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=extra)


def _run_in_process(model, method, out, *arguments):
  return commands.run(*_command(model, method, out), *arguments, folder=out.parent)


def _command(model, method, out):
  return (
    *("scripts.profile_policy", f"--model={model}", f"--method={method}"),
    *(f"--text_file={ALICE}", "--prompt_tokens=80", f"--out={out}"),
  )


def _run(model, method, out, *arguments):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(
    [sys.executable, "-m", *_command(model, method, out), *arguments],
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
  profile = load_profile(out, "skewing")
  assert profile.settings["seed"] == 0 and profile.settings["prompt_tokens"] == 80
  assert profile.arrays["skew"].shape == (5, 2, 16, 16)
  make_policy("infinigen", profile=out).register(loaded.model.config, CacheConfig(1, 64))
  again = _run_in_process(model, "skewing", out)
  assert again.returncode == 2 and "exists; give --out the name of a new file" in again.stderr


def test_filter_layers_that_omnikv_takes(model, tmp_path):
  out = tmp_path / "filters.npz"
  done = _run_in_process(model, "filter_layers", out, "--steps=5", "--num_filters=2", "--seed=1")
  assert done.returncode == 0, done.stderr
  loaded = load(str(model))
  profile = load_profile(out, "filter_layers")
  mass, filters = profile.arrays["mass"], tuple(profile.arrays["filters"].tolist())
  assert mass.shape == (5, 5) and np.isfinite(mass).all() and (np.diagonal(mass) > 0).all()
  assert filters[0] == 1 and f"filter layers {filters[0]} (" in done.stdout
  policy = make_policy(f"omnikv:profile={out}:wait_layers=0")
  plan = policy.register(loaded.model.config, CacheConfig(1, 64))[0]
  assert set(range(1, 5)) - set(filters) == set(plan.select_layers)


def test_gates_that_duo_takes(model, tmp_path):
  out, again, other = (tmp_path / f"{name}.npz" for name in ("gates", "again", "other"))
  done = _run(model, "duo_gates", out, "--prompt_tokens=600", "--steps=2")
  assert done.returncode == 0, done.stderr
  assert "2 pieces with passkeys, 600 tokens each, seed 0" in done.stdout
  assert "of 10 gates over 0.5" in done.stdout
  loaded, profile = load(str(model)), load_profile(out, "duo_gates")
  check_model(profile, loaded.content_hash)
  assert profile.settings["steps"] == 2 and profile.settings["prompt_tokens"] == 600
  gates = profile.arrays["gates"]
  assert gates.shape == (5, 2) and 0 <= gates.min() <= gates.max() < 1
  policy = make_policy(f"duo:profile={out}")
  policy.register(loaded.model.config, CacheConfig(1, 64))
  assert policy.joins_heads  # some of its heads keep everything
  for name, seed in ((again, 0), (other, 1)):
    flags = "--prompt_tokens=600", "--steps=2", f"--seed={seed}"
    assert _run_in_process(model, "duo_gates", name, *flags).returncode == 0
  assert again.read_bytes() == out.read_bytes() != other.read_bytes()


def test_passkeys_are_asked_for_at_the_end(model):
  loaded, text = load(str(model)), ALICE.read_text("utf-8") * 4
  batch = passkeys.batches(loaded, text, 600, 7)
  for step in range(3):
    tokens, answers = batch(step)
    assert tokens.shape == answers.shape == (1, 600) and answers.sum() >= 5 * passkeys.PASSKEYS
    content = loaded.tokenizer.decode(tokens[0, : tokens[0].nonzero()[0][-1] + 1])
    told, *asked = content.split("\nThe passkey ")
    assert len(asked) == passkeys.PASSKEYS
    for one in asked:
      assert f" The passkey {one}." in told  # word for word, with its number
    after = loaded.tokenizer.decode(tokens[0, 1:][answers[0, :-1]])
    assert after == "".join(one.rpartition(": ")[2] for one in asked)
  first, same, other = (passkeys.batches(loaded, text, 600, seed)(0)[0] for seed in (7, 7, 8))
  assert (first == same).all() and (first != other).any() and (first != tokens).any()


def test_texts_that_gates_are_not_trained_with(model):
  loaded, text = load(str(model)), ALICE.read_text("utf-8") * 4
  with pytest.raises(ValueError, match="streaming heads see 320 tokens, which is all of a text of"):
    passkeys.train(loaded, text, tokens=320, steps=1, seed=0)
  with pytest.raises(ValueError, match="has no tokenizer"):
    passkeys.batches(loaded._replace(tokenizer=None), text, 600, 0)


def test_passages_are_seeded(model):
  loaded, text = load(str(model)), ALICE.read_text("utf-8") * 4
  first, again, other = (profile_policy.passage(loaded, text, 50, seed) for seed in (3, 3, 4))
  assert first == again != other and len(first) == 50


def test_what_passage_refuses(model):
  loaded = load(str(model))
  with pytest.raises(ValueError, match="1100 tokens exceed the context of 1024"):
    profile_policy.passage(loaded, "text " * 1000, 1100, 0)
  with pytest.raises(ValueError, match="tokens and 200 are needed; give a longer one"):
    profile_policy.passage(loaded, "short", 200, 0)
  with pytest.raises(ValueError, match="has no tokenizer"):
    profile_policy.passage(loaded._replace(tokenizer=None), "text", 5, 0)
