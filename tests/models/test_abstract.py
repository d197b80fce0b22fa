"""Models without weights, and weights that do not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import models
from models import memory
from models.memory import params_bytes
from tests.models import tiny


@pytest.mark.parametrize("name", models.PRESETS)
def test_every_preset_has_its_real_size_on_any_machine(name):
  model, shapes = models.abstract(f"random:{name}", "bfloat16")
  assert model.config == models.PRESETS[name]
  leaves = jax.tree.leaves(shapes)
  assert all(type(leaf) is jax.ShapeDtypeStruct and leaf.dtype == jnp.bfloat16 for leaf in leaves)
  assert params_bytes(shapes) == 2 * sum(leaf.size for leaf in leaves)


def test_bytes_of_a_published_model():
  assert params_bytes(models.abstract("random:llama-3.1-8b", "bfloat16")[1]) == 2 * 8_030_261_248
  assert params_bytes(models.abstract("random:llama-3.1-8b")[1]) == 4 * 8_030_261_248


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shapes_are_those_of_load(dtype, tmp_path):
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors())
  file = tiny.write_gguf(tmp_path / "model.gguf", tiny.CONFIG, tiny.tensors())
  for source in (str(folder), str(file), "random:stories260k", "random:stories260k@99"):
    model, shapes = models.abstract(source, dtype)
    loaded = models.load(source, dtype)
    assert model.config == loaded.model.config
    assert shapes == jax.eval_shape(lambda params: params, loaded.params)


def test_abstract_refuses_what_load_refuses():
  with pytest.raises(ValueError, match="unknown model 'absent'"):
    models.abstract("absent")
  with pytest.raises(ValueError, match="unknown dtype 'int8'"):
    models.abstract("random:stories260k", "int8")


def test_weights_that_do_not_fit_are_refused_in_one_line(monkeypatch):
  shapes = models.abstract("random:llama-3.1-8b")[1]
  monkeypatch.setattr(memory, "available_bytes", lambda: 20_000_000_000)
  with pytest.raises(ValueError) as error:
    memory.check_fits("random:llama-3.1-8b", shapes)
  assert str(error.value) == (
    "random:llama-3.1-8b: its weights take 32.1 GB in float32 and this machine has 20.0 GB of "
    "memory left; use a narrower dtype or a smaller model, or look at it without weights: "
    "scripts.inspect_model"
  )


def test_load_asks_before_it_makes_weights(tmp_path, monkeypatch):
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors())
  for source in ("random:stories260k", str(folder)):
    needed = params_bytes(models.abstract(source)[1])
    before = len(jax.live_arrays())
    monkeypatch.setattr(memory, "available_bytes", lambda needed=needed: needed - 1)
    with pytest.raises(ValueError, match="its weights take"):
      models.load(source)
    assert len(jax.live_arrays()) <= before + 1  # a random key


def test_weights_that_just_fit(monkeypatch):
  needed = params_bytes(models.abstract("random:stories260k")[1])
  monkeypatch.setattr(memory, "available_bytes", lambda: needed)
  assert params_bytes(models.load("random:stories260k").params) == needed


def test_available_memory(tmp_path, monkeypatch):
  assert 1e6 < memory.available_bytes() < 1e15
  told = tmp_path / "meminfo"
  told.write_text("MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:    1234567 kB\n")
  monkeypatch.setattr(memory, "_MEMINFO", told)
  assert memory.available_bytes() == 1234567 * 1024
  monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "absent")
  monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get)
  assert memory.available_bytes() == 4_096_000
