"""Training of tiny models: runs that are stopped and go on, what they write, what they refuse."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eval import recall
from kvjax import CacheConfig, generate, make_policy, prepare
from models import families, load
from models.fetch import file_sha256
from scripts import small_models, small_report, small_training, train_small
from scripts.small_training import Phase

ROOT = Path(__file__).resolve().parents[2]
TEXT = "\n".join(f"Sentence number {n} of the book ends here." for n in range(60))
BOOK = recall.plain(TEXT)
PHASES = (Phase(steps=5, length=48, rows=3), Phase(steps=4, length=256, rows=1))
TINY = {
  name: dataclasses.replace(
    config, num_layers=2, head_dim=8, embed_dim=32, ffn_dim=48, max_tokens=300
  )
  for name, config in small_models.SHAPES.items()
}
RECIPES = {name: (config, PHASES) for name, config in TINY.items()}
FAMILIES = pytest.mark.parametrize("config", TINY.values(), ids=TINY)


@pytest.fixture(autouse=True)
def _optax_promotes():
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(autouse=True)
def _frequent_checkpoints(monkeypatch):
  monkeypatch.setattr(small_training, "_KEEP_EVERY", 2)


def _train(config, folder, stop=None):
  """Trains, and is interrupted once `stop` steps are done."""

  def progress(phase, done, loss, accuracy):
    if done == stop:
      raise KeyboardInterrupt

  return small_training.train(config, PHASES, BOOK, 0, folder, progress)


def _assert_equal(one, other):
  """To the bit, but for the clock."""
  same = jax.tree.map(np.array_equal, one[:3], other[:3])
  assert all(jax.tree.leaves(same)), same


@FAMILIES
def test_an_interrupted_run_ends_with_the_same_weights(config, tmp_path):
  whole = _train(config, tmp_path / "whole")
  assert whole.step == 9
  for stop in (1, 4, 7):  # before the first checkpoint, just before one, in the next phase
    with pytest.raises(KeyboardInterrupt):
      _train(config, tmp_path / "parts", stop)
  parts = _train(config, tmp_path / "parts")
  _assert_equal(parts, whole)
  assert parts.seconds > 0
  _assert_equal(_train(config, tmp_path / "parts"), whole)  # nothing is left to do


def test_a_killed_run_ends_with_the_same_weights(tmp_path):
  """Killed twice, wherever it then is: between two steps, or inside a checkpoint."""
  code = (
    "import pathlib, sys\n"
    "from tests.scripts import test_train_small as t\n"
    "t.small_training._KEEP_EVERY = 1\n"
    "say = lambda phase, done, *_: print(done, flush=True)\n"
    "t.small_training.train(\n"
    "  t.TINY['small-llama'], t.PHASES, t.BOOK, 0, pathlib.Path(sys.argv[1]), say)\n"
  )
  seen = []
  for steps in (2, 3):
    with subprocess.Popen(
      [sys.executable, "-c", code, str(tmp_path / "parts")],
      stdout=subprocess.PIPE,
      text=True,
      cwd=ROOT,
      env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
      assert process.stdout is not None
      seen.append([int(line) for line in itertools.islice(process.stdout, steps)])
      process.send_signal(signal.SIGKILL)
  assert seen[0] == [1, 2] and len(seen[1]) == 3 and seen[1][0] > 1  # it went on, and was not done
  _assert_equal(
    _train(TINY["small-llama"], tmp_path / "parts"), _train(TINY["small-llama"], tmp_path / "whole")
  )


@FAMILIES
def test_seeds(config, tmp_path):
  def trained(seed):
    return small_training.train(config, PHASES[:1], BOOK, seed, tmp_path / f"{seed}").params

  assert not np.array_equal(trained(1)["embed"], trained(2)["embed"])


@FAMILIES
def test_what_is_trained_is_what_runs(config):
  """The logits of training choose the tokens that `generate` makes."""
  params = small_models.start(config, jax.random.key(1))
  model = families.build(config)
  runner = prepare(model, make_policy("dense"), "resident", CacheConfig(1, 300), chunk_tokens=64)
  prompt = [small_models.BOS_ID, *b"The passkey QK: 73014. And the earth was without form"]
  (said,) = generate(runner, params, [prompt], max_new_tokens=200).tokens
  tokens = jnp.asarray([prompt + said[:-1]], jnp.int32)
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  logits = small_training._logits(params, model, tokens, positions)[0]
  assert np.argmax(logits[len(prompt) - 1 :], axis=-1).tolist() == said
  assert len(set(said)) > 2  # not one token over and over


def test_attention_in_parts_equals_attention_at_once():
  keys = jax.random.split(jax.random.key(0), 3)
  q, k, v = (
    jax.random.normal(key, (2, 256, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True)
  )
  expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
  np.testing.assert_allclose(small_training._attention(q, k, v), expected, atol=2e-6)


@pytest.mark.parametrize("name", small_models.SHAPES)
def test_heads_start_out_looking_back(name):
  config = small_models.SHAPES[name]
  params, model = small_models.start(config, jax.random.key(0)), families.build(config)
  scores = {}

  def attend(layer, q, k, v, cache, hidden):
    q, k = (model.rotate(x, positions)[0].swapaxes(0, 1) for x in (q, k))
    k = jnp.repeat(k, len(q) // len(k), axis=0)
    past = np.tri(q.shape[1], dtype=bool)[None]
    scores[layer] = jax.nn.softmax(jnp.where(past, q @ k.mT * 32**-0.5, -jnp.inf))
    return jnp.zeros((1, q.shape[1], len(q), 32)), cache

  tokens = jnp.asarray([[small_models.BOS_ID, *BOOK[:400].encode()]], jnp.int32)
  positions = 3000 + jnp.arange(401, dtype=jnp.int32)[None]
  model.forward(params, tokens, positions, None, attend)
  for head, weights in enumerate(scores[1]):
    assert np.diagonal(weights, -(head + 1))[8:].mean() > 0.4
  assert all(np.diagonal(weights, -1)[8:].mean() < 0.1 for weights in scores[2])


@FAMILIES
def test_batches(config):
  batch = small_training.make_batch(config, Phase(1, 200, 8), BOOK, random.Random(0))
  assert batch.tokens.shape == (8, 201) and batch.is_answer.shape == (8, 200)
  assert (batch.tokens[:, 0] == small_models.BOS_ID).all()
  assert batch.positions.min() >= 0 and batch.positions.max() < config.max_tokens
  assert len(set(batch.positions[:, 0])) > 1
  steps, breaks = np.diff(batch.positions), batch.tokens[:, 1:-1] == ord("\n")
  assert (steps[~breaks] == 1).all()
  assert (steps[breaks] >= 1).all() and (steps[breaks] > 1).any() == (config.family == "llama")
  for tokens, is_answer in zip(batch.tokens, batch.is_answer, strict=True):
    text = bytes(tokens[1:].tolist()).decode()
    marked = "".join(np.where(is_answer, list(text), " ")).split()
    lines = text.split("\n")[1:]
    assert lines and all(line.endswith(answer) for line, answer in zip(lines, marked, strict=True))


@FAMILIES
def test_the_folder_loads(config, tmp_path):
  params = small_models.start(config, jax.random.key(0))
  small_models.write_folder(tmp_path / "tiny", config, params)
  loaded = load(str(tmp_path / "tiny"))
  assert loaded.model.config == config
  same = jax.tree.map(
    lambda a, b: np.array_equal(np.asarray(a).astype(ml_dtypes.bfloat16).astype("float32"), b),
    params,
    loaded.params,
  )
  assert all(jax.tree.leaves(same))


def test_text_becomes_bytes(tmp_path):
  config = TINY["small-opt"]
  small_models.write_folder(tmp_path, config, small_models.start(config, jax.random.key(0)))
  words = load(str(tmp_path)).tokenizer
  text = "".join(map(chr, range(128))) + "ägö♞ \n"
  assert words is not None and words.vocab_size == 257
  assert words.encode(text) == [256, *text.encode()]
  assert words.decode([256, *text.encode()]) == text
  assert words.eos_ids == (10,)


@pytest.fixture
def book_file(tmp_path):
  path = tmp_path / "book.txt"
  path.write_text(TEXT, encoding="utf-8")
  return str(path)


def _run(out_dir, book_file, seed=0):
  train_small.run(out_dir, RECIPES, text_file=book_file, seed=seed)


@pytest.fixture
def _no_flags(monkeypatch):
  """Not the flags of pytest."""
  monkeypatch.setattr(sys, "argv", ["train_small", "--seed=0", "--out_dir=somewhere"])


@pytest.mark.usefixtures("_no_flags")
def test_a_run_and_its_cards(tmp_path, book_file, monkeypatch, capsys):
  monkeypatch.setattr(small_report, "LENGTHS", (256,))
  monkeypatch.setattr(small_report, "POLICIES", (("streaming", 64),))
  monkeypatch.setattr(small_report, "_POLICY_LENGTH", 256)
  monkeypatch.setattr(small_report, "_EXAMPLES", 2)
  monkeypatch.setattr(small_report, "_ROWS", 2)
  _run(tmp_path / "out", book_file)
  plan = capsys.readouterr().out
  assert "a new run" in plan and plan.count("  9        1,744           256\n") == 2
  for name in TINY:
    folder = tmp_path / "out" / name
    card = (folder / "README.md").read_text()
    assert f"# {name}\n" in card and "| chain | 256 | 0% | 0% | 0% |" in card
    assert "| streaming | 64 | 0% | 0% | 0% |" in card and "| 5 | 48 | 3 |" in card
    assert "    python -m scripts.train_small --seed=0\n" in card and "book.txt, sha256" in card
    assert load(str(folder)).content_hash in card
  weights = (tmp_path / "out/small-opt/model.safetensors").read_bytes()
  monkeypatch.setattr(small_report, "measure", lambda *_: dict.fromkeys(small_report.cells(), 0.5))
  _run(tmp_path / "out", book_file)
  assert "where the run goes on" in capsys.readouterr().out
  assert (tmp_path / "out/small-opt/model.safetensors").read_bytes() == weights


def test_what_is_no_run_of_this_is_left_alone(tmp_path, book_file, monkeypatch):
  monkeypatch.setattr(small_training, "train", None)  # it does not come to that
  out_dir = tmp_path / "out"
  out_dir.mkdir()
  (out_dir / "thesis.tex").touch()
  with pytest.raises(ValueError, match="out holds other things than a run of this command"):
    _run(out_dir, book_file)
  assert [path.name for path in out_dir.iterdir()] == ["thesis.tex"]
  with pytest.raises(ValueError, match=r"thesis\.tex is a file; choose another --out_dir"):
    _run(out_dir / "thesis.tex", book_file)


def test_another_run_is_left_alone(tmp_path, book_file, monkeypatch):
  monkeypatch.setattr(small_training, "train", None)
  recipe = train_small._record(RECIPES, 0, file_sha256(Path(book_file)))
  (tmp_path / "out").mkdir()
  (tmp_path / "out/recipe.json").write_text(json.dumps(recipe | {"seed": 1, "jax": "0.1"}))
  with pytest.raises(ValueError, match="out holds a run with another seed and jax") as caught:
    _run(tmp_path / "out", book_file)
  assert "\n" not in str(caught.value)


def test_a_short_text(tmp_path):
  (tmp_path / "short.txt").write_text("In the beginning.")
  with pytest.raises(ValueError, match=r"short\.txt has only 17 characters"):
    _run(tmp_path / "out", str(tmp_path / "short.txt"))
  assert not (tmp_path / "out").exists()


def test_bad_input_exits_with_one_line(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "scripts.train_small", "--text_file=nowhere.txt", "--out_dir=out"],
    capture_output=True,
    text=True,
    check=False,
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )
  assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
  assert done.stderr.startswith("error: nowhere.txt is not a file")
  assert list(tmp_path.iterdir()) == []
