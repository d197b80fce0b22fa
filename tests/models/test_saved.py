"""Our own checkpoints: equal to the bit, all that travels along, and everything that is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from kvjax.config import ModelConfig, RopeScaling
from models import families, orbax_tree, saved, tokenizer
from tests.models.test_tokenizer import CHATML, INFO, PATH, TEXTS

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ModelConfig(
  family="llama",
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  embed_dim=64,
  ffn_dim=96,
  vocab_size=320,
  max_tokens=512,
  rope_scaling=RopeScaling("llama3", 8.0, original_tokens=64),
)
CONFIGS = {
  "llama": LLAMA,
  "mistral": dataclasses.replace(LLAMA, family="mistral", window_tokens=32),
  "qwen2": dataclasses.replace(LLAMA, family="qwen2", tied_embeddings=True),
  "opt": dataclasses.replace(LLAMA, family="opt", num_kv_heads=4, tied_embeddings=True),
  "opt-350m": dataclasses.replace(
    LLAMA, family="opt", num_kv_heads=4, tied_embeddings=True, norm_last=True, token_dim=32
  ),
}
DTYPES = ("float32", "bfloat16", "float16")


def flat_params(config: ModelConfig, dtype: str) -> dict[str, np.ndarray]:
  params = models.build(config).init(jax.random.key(3), dtype)
  return {path: np.asarray(leaf) for path, leaf in families.by_path(params).items()}


def save(folder: Path, config: ModelConfig, read, dtype: str = "float32", **changes):
  described = {"name": "tiny", "tokenizer": None, "source_hash": "5" * 64} | changes
  return saved.write(folder, read, config=config, dtype=dtype, **described)


def write(folder: Path, config: ModelConfig = LLAMA, dtype: str = "float32", **changes):
  tensors = flat_params(config, dtype)
  return save(folder, config, tensors.get, dtype, **changes), tensors


def assert_same_bits(found, expected: dict[str, np.ndarray]) -> None:
  found = families.by_path(found)
  assert found.keys() == expected.keys()
  for path, tensor in expected.items():
    leaf = np.asarray(found[path])
    assert (leaf.shape, leaf.dtype) == (tensor.shape, tensor.dtype), path
    np.testing.assert_array_equal(leaf.view(np.uint8), tensor.view(np.uint8), err_msg=path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_equal_to_the_bit(name, dtype, tmp_path):
  written, tensors = write(tmp_path / "saved", CONFIGS[name], dtype)
  again = saved.describe(tmp_path / "saved")
  assert again == written
  assert (again.config, again.dtype, again.name) == (CONFIGS[name], dtype, "tiny")
  params = saved.restore(again)
  assert_same_bits(params, tensors)
  shapes = models.param_shapes(CONFIGS[name], dtype)
  assert jax.tree.structure(params) == jax.tree.structure(shapes)


def test_bits_that_are_no_numbers_survive(tmp_path):
  tensors = flat_params(LLAMA, "float32")
  tensors["norm"] = np.resize(np.float32([0.0, -0.0, 1e-45, 3e38]), tensors["norm"].shape)
  save(tmp_path / "saved", LLAMA, tensors.get)
  assert_same_bits(saved.restore(saved.describe(tmp_path / "saved")), tensors)


def test_tensors_of_several_chunks(tmp_path, monkeypatch):
  monkeypatch.setattr(orbax_tree, "_CHUNK_BYTES", 1 << 12)
  written, tensors = write(tmp_path / "saved")
  assert len([name for name in written.files if name.startswith("params/embed/")]) > 10
  assert_same_bits(saved.restore(written), tensors)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_other_dtypes_are_rounded_as_numpy_does(stored, wanted, tmp_path):
  written, tensors = write(tmp_path / "saved", dtype=stored)
  expected = {path: tensor.astype(jnp.dtype(wanted)) for path, tensor in tensors.items()}
  assert_same_bits(saved.restore(written, dtype=wanted), expected)


def test_models_load_takes_the_folder(tmp_path):
  words = tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)
  written, tensors = write(tmp_path / "saved", name="its-name", tokenizer=words)
  loaded = models.load(str(tmp_path / "saved"))
  assert (loaded.name, loaded.path) == ("its-name", tmp_path / "saved")
  assert loaded.model.config == LLAMA
  assert loaded.content_hash == written.content_hash
  assert_same_bits(loaded.params, tensors)
  model, shapes = models.abstract(str(tmp_path / "saved"), "bfloat16")
  assert model.config == LLAMA and shapes["embed"].dtype == jnp.bfloat16


def test_the_tokenizer_travels_along(tmp_path):
  words = tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)
  words = dataclasses.replace(words, add_bos=True, eos_ids=(2, 0))
  write(tmp_path / "saved", tokenizer=words)
  found = models.load(str(tmp_path / "saved")).tokenizer
  assert dataclasses.replace(found, backend=words.backend) == words
  assert found.backend.to_str() == words.backend.to_str()
  assert [found.encode(text) for text in TEXTS] == [words.encode(text) for text in TEXTS]
  question = [{"role": "user", "content": "why"}]
  assert found.chat(question) == words.chat(question)
  assert found.decode([1, 5, 2], skip_special=False) == words.decode([1, 5, 2], skip_special=False)


def test_the_content_hash_is_of_the_content_alone(tmp_path):
  first, _ = write(tmp_path / "first")
  again, _ = write(tmp_path / "again", name="another name", source_hash="6" * 64)
  assert first.content_hash == again.content_hash
  rounded, _ = write(tmp_path / "rounded", dtype="bfloat16")
  longer, _ = write(tmp_path / "longer", dataclasses.replace(LLAMA, max_tokens=1024))
  tensors = flat_params(LLAMA, "float32")
  tensors["norm"] = tensors["norm"] + np.float32(1e-6)
  moved = save(tmp_path / "moved", LLAMA, tensors.get)
  assert len({one.content_hash for one in (first, rounded, longer, moved)}) == 4


def test_the_hash_of_the_weights_a_config_came_with_is_not_written(tmp_path):
  plain, _ = write(tmp_path / "plain")
  known, _ = write(tmp_path / "known", dataclasses.replace(LLAMA, content_hash="ab" * 32))
  assert known.content_hash == plain.content_hash and known.config.content_hash == ""
  assert "abab" not in (tmp_path / "known" / "kvjax.json").read_text()
  config = models.load(str(tmp_path / "known")).model.config
  assert config.content_hash == known.content_hash and config == LLAMA


def test_one_tensor_is_alive_at_a_time(tmp_path):
  alive: list[weakref.ref] = []

  def read(path: str) -> np.ndarray:
    held = sum(ref() is not None for ref in alive)
    assert held <= 2, f"{held} tensors are held when {path} is read"  # a thread may be letting go
    tensor = np.ones(shapes[path].shape, np.float32)
    alive.append(weakref.ref(tensor))
    return tensor

  shapes = families.by_path(models.param_shapes(LLAMA))
  save(tmp_path / "saved", LLAMA, read)
  assert len(alive) == len(shapes)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_what_is_broken_off_leaves_nothing(error, tmp_path):
  tensors = flat_params(LLAMA, "float32")

  def read(path: str) -> np.ndarray:
    if path == "layers/1/q":
      made = list(tmp_path.rglob("*"))
      assert any(one.name.startswith("layers.0.") for one in made)  # it was under way
      assert not any(saved.is_saved(one) for one in made)
      raise error("stop")
    return tensors[path]

  with pytest.raises(error, match="stop"):
    save(tmp_path / "saved", LLAMA, read)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_exists_is_not_written_over(make, tmp_path):
  make(tmp_path / "saved")
  before = list(tmp_path.iterdir())
  with pytest.raises(ValueError, match="saved exists already, expected the path of a new folder"):
    write(tmp_path / "saved")
  assert list(tmp_path.iterdir()) == before


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
  monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
  with pytest.raises(ValueError, match="GB of free space, the checkpoint takes"):
    write(tmp_path / "saved")
  assert list(tmp_path.iterdir()) == []


def change_manifest(folder: Path, change: Callable[[dict], None], *, rehash: bool) -> None:
  path = folder / "kvjax.json"
  manifest = json.loads(path.read_text())
  change(manifest)
  if rehash:
    manifest["content_hash"] = saved._content_hash(manifest["content"])
  path.write_text(json.dumps(manifest))


def edit(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
  (folder / name).write_bytes(change((folder / name).read_bytes()))


def refit(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
  """Changes a file and makes the digests fit again, as a careful forger would."""
  edit(folder, name, change)

  def note(manifest):
    manifest["content"]["files"][name] = [
      (folder / name).stat().st_size,
      saved._digest(folder / name),
    ]

  change_manifest(folder, note, rehash=True)


def flip_a_bit(data: bytes) -> bytes:
  return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def set_in(*keys, value):
  def change(manifest):
    for key in keys[:-1]:
      manifest = manifest[key]
    manifest[keys[-1]] = value

  return change


QUERY = "params/layers.0.q/0.0"
DAMAGE = {
  "older version": (
    lambda f: change_manifest(f, set_in("version", value=0), rehash=True),
    "is a checkpoint of format version 0, expected 1; convert the model again",
  ),
  "no version": (
    lambda f: change_manifest(f, lambda manifest: manifest.pop("version"), rehash=True),
    "format version None, expected 1",
  ),
  "edited config": (
    lambda f: change_manifest(f, set_in("content", "config", "rope_theta", value=1), rehash=False),
    "kvjax.json was changed since it was written",
  ),
  "wrong content hash": (
    lambda f: change_manifest(f, set_in("content_hash", value="0" * 64), rehash=False),
    "kvjax.json was changed since it was written",
  ),
  "no json": (lambda f: edit(f, "kvjax.json", lambda data: data[:500]), "is not JSON"),
  "config of another model": (
    lambda f: change_manifest(f, set_in("content", "config", "num_layers", value=3), rehash=True),
    "does not hold the llama model that its config declares: 9 of 30 tensors are missing, "
    "unexpected or of another shape or dtype: layers/2/attn_norm, ",
  ),
  "another dtype than the arrays": (
    lambda f: change_manifest(f, set_in("content", "dtype", value="bfloat16"), rehash=True),
    "21 of 21 tensors are missing, unexpected or of another shape or dtype: embed, ",
  ),
  "arrays of another dtype": (
    lambda f: refit(f, "params/norm/.zarray", lambda data: data.replace(b"<f4", b"<i4")),
    "1 of 21 tensors are missing, unexpected or of another shape or dtype: norm;",
  ),
  "an unknown family": (
    lambda f: change_manifest(f, set_in("content", "config", "family", value="gpt"), rehash=True),
    "unknown model family 'gpt'",
  ),
  "a field of the future": (
    lambda f: change_manifest(f, set_in("content", "config", "experts", value=8), rehash=True),
    "kvjax.json lacks or has a field that this version of kvjax does not",
  ),
  "a missing field": (
    lambda f: change_manifest(f, lambda manifest: manifest["content"].pop("dtype"), rehash=True),
    "kvjax.json lacks or has a field that this version of kvjax does not",
  ),
  "truncated chunk": (
    lambda f: edit(f, QUERY, lambda data: data[:-4]),
    f"files are missing, truncated or changed since they were written: {QUERY}",
  ),
  "missing chunk": (  # which Orbax reads as zeros
    lambda f: (f / QUERY).unlink(),
    f"1 of 44 files are missing, truncated or changed since they were written: {QUERY}",
  ),
  "a flipped bit": (
    lambda f: edit(f, QUERY, flip_a_bit),
    f"1 of 44 files are missing, truncated or changed since they were written: {QUERY}",
  ),
  "another tokenizer": (
    lambda f: edit(f, "tokenizer.json", lambda data: data.replace(b"12", b"13")),
    "1 of 44 files are missing, truncated or changed since they were written: tokenizer.json",
  ),
  "no arrays": (
    lambda f: (f / "params").rename(f / "elsewhere"),
    "43 of 44 files are missing, truncated or changed since they were written: params/_METADATA",
  ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_in_one_line(case, tmp_path):
  folder = tmp_path / "saved"
  write(folder, tokenizer=tokenizer.from_gguf(INFO, PATH))
  damage, expected = DAMAGE[case]
  damage(folder)
  with pytest.raises(ValueError) as error:
    models.load(str(folder))
  message = str(error.value)
  assert expected in message and "\n" not in message
  assert str(folder) in message or "gpt" in case or "family" in case


def worker(name: str, folder: Path, **environment: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-m", "tests.models.saved_worker", name, str(folder)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=os.environ | environment,
  )


def test_each_of_8_devices_holds_its_shard_only(tmp_path):
  process = worker(
    "sharded", tmp_path / "saved", XLA_FLAGS="--xla_force_host_platform_device_count=8"
  )
  stdout, stderr = process.communicate()
  assert process.returncode == 0, stderr
  held, total = (int(word) for word in stdout.split() if word.isdecimal())
  assert total / 8 < held < total / 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
  process = worker("peak", tmp_path / "saved")
  stdout, stderr = process.communicate()
  assert process.returncode == 0, stderr
  growth, size = map(int, stdout.split())
  assert size > 100e6
  assert growth < size / 8, f"{growth} bytes, while {size} were written"


def test_an_interrupt_leaves_nothing(tmp_path):
  process = worker("slow", tmp_path / "saved")
  assert process.stdout.readline() == "embed\n"
  process.send_signal(signal.SIGINT)
  _, stderr = process.communicate()
  assert "KeyboardInterrupt" in stderr
  assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_nothing_that_looks_like_a_checkpoint(tmp_path):
  process = worker("slow", tmp_path / "saved")
  assert process.stdout.readline() == "embed\n"
  process.kill()
  process.communicate()
  [left] = tmp_path.iterdir()
  assert left.name.startswith(".saved.partial-") and not saved.is_saved(left)
