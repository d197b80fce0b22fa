"""`models.load`: the names that it takes and the ones that it refuses."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import models


def test_random_weights_are_seeded():
  one, two = models.load("random:stories260k"), models.load("random:stories260k")
  assert one.model.config == models.PRESETS["stories260k"]
  assert one.tokenizer is None and one.path is None and one.name == "random:stories260k"
  assert one.content_hash == two.content_hash
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_the_config_knows_the_weights_and_equals_others_of_its_shape():
  f32, bf16 = (models.load("random:stories260k", dtype) for dtype in ("float32", "bfloat16"))
  assert f32.model.config.content_hash == f32.content_hash != bf16.model.config.content_hash
  assert f32.model.config == bf16.model.config == models.abstract("random:stories260k")[0].config
  assert hash(f32.model.config) == hash(bf16.model.config)
  assert models.abstract("random:stories260k")[0].config.content_hash == ""
  known = models.abstract("random:stories260k", "bfloat16", hashed=True)[0].config.content_hash
  assert known == bf16.content_hash


def test_random_weights_with_a_longer_context():
  loaded = models.load("random:stories260k@32768", "bfloat16")
  preset = models.PRESETS["stories260k"]
  assert loaded.model.config == dataclasses.replace(preset, max_tokens=32768)
  assert loaded.params["embed"].dtype.name == "bfloat16"


@pytest.mark.parametrize("source", ["smollm3", "no/such/folder", "no/such/file.gguf", "random", ""])
def test_unknown_source(source, tmp_path, monkeypatch):
  if not source:
    source = str(tmp_path / "weights.bin")
    (tmp_path / "weights.bin").write_bytes(b"x")
  with pytest.raises(ValueError) as error:
    models.load(source)
  message = str(error.value)
  assert repr(source) in message and "\n" not in message
  for accepted in ("smollm2-135m", ".gguf file", "folder with safetensors", "random:NAME"):
    assert accepted in message


@pytest.mark.parametrize(
  ("source", "expected"),
  [
    ("random:gpt-5", "no preset 'gpt-5', expected one of llama-2-7b"),
    ("random:stories260k@many", "'many' is not a positive number of tokens"),
    ("random:stories260k@0", "'0' is not a positive number of tokens"),
  ],
)
def test_bad_random_source(source, expected):
  with pytest.raises(ValueError, match=expected):
    models.load(source)


def test_unknown_dtype():
  with pytest.raises(ValueError, match="unknown dtype 'int8', expected one of float32"):
    models.load("random:stories260k", "int8")
