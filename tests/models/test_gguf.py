"""GGUF files: the same model as from safetensors, quantized types, and bad files."""

from __future__ import annotations

import dataclasses

import gguf
import jax
import numpy as np
import pytest

import models
from tests.models import tiny

F32 = gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize("config", [tiny.CONFIG, tiny.tied()], ids=["untied", "tied"])
def test_equals_the_same_model_from_safetensors(tmp_path, config):
  weights = tiny.tensors(config)
  folder = models.load(str(tiny.write_folder(tmp_path / "hub", config, weights)))
  loaded = models.load(str(tiny.write_gguf(tmp_path / "tiny.gguf", config, weights)))
  found = loaded.model.config
  assert found.norm_eps == pytest.approx(config.norm_eps)  # f32 in the file
  assert dataclasses.replace(found, norm_eps=config.norm_eps) == config
  assert loaded.name == "tiny" and loaded.tokenizer is None
  jax.tree.map(np.testing.assert_array_equal, loaded.params, folder.params)


@pytest.mark.parametrize(
  ("kind", "step"),
  [
    (gguf.GGMLQuantizationType.F16, 0.001),
    (gguf.GGMLQuantizationType.BF16, 0.005),
    (gguf.GGMLQuantizationType.Q8_0, 0.005),
    (gguf.GGMLQuantizationType.Q4_0, 0.1),
    (gguf.GGMLQuantizationType.Q4_1, 0.05),
    (gguf.GGMLQuantizationType.Q5_1, 0.025),
  ],
)
def test_quantized_types(tmp_path, kind, step):
  weights = tiny.tensors()
  exact = models.load(str(tiny.write_gguf(tmp_path / "f32.gguf", tiny.CONFIG, weights))).params
  path = tiny.write_gguf(tmp_path / "small.gguf", tiny.CONFIG, weights, kind)
  params = models.load(str(path)).params
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=step), params, exact)
  assert path.stat().st_size < 0.6 * (tmp_path / "f32.gguf").stat().st_size
  layer = tiny.tensors()["model.layers.0.mlp.up_proj.weight"]
  expected = gguf.dequantize(gguf.quantize(layer, kind), kind)
  np.testing.assert_array_equal(params["layers"][0]["up"], expected.T)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.002, 0.01, 0.5, 0.999])
def test_truncated_file(tmp_path, share):
  path = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.CONFIG, tiny.tensors())
  raw = path.read_bytes()
  path.write_bytes(raw[: int(len(raw) * share)])
  with pytest.raises(ValueError, match=r"tiny\.gguf is a truncated or damaged GGUF file") as error:
    models.load(str(path))
  assert "\n" not in str(error.value)


def test_file_that_is_not_gguf(tmp_path):
  path = tmp_path / "page.gguf"
  path.write_text("<html>not found</html>" * 100)
  with pytest.raises(ValueError, match="truncated or damaged GGUF"):
    models.load(str(path))


def test_text_that_is_not_utf8(tmp_path):
  extra = {"tokenizer.ggml.model": "gpt2"}
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, tiny.tensors(), extra=extra)
  path.write_bytes(path.read_bytes().replace(b"gpt2", b"\xff\xff\xff\xff"))
  with pytest.raises(ValueError, match=r"a\.gguf: metadata tokenizer\.ggml\.model is damaged"):
    models.load(str(path))


def test_unknown_architecture(tmp_path):
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, tiny.tensors(), architecture="bert")
  with pytest.raises(ValueError, match=r"a\.gguf: unknown architecture 'bert', expected 'llama'"):
    models.load(str(path))


def test_all_bad_tensors_are_listed_at_once_by_the_names_of_the_file(tmp_path):
  weights = tiny.tensors()
  del weights["model.embed_tokens.weight"], weights["model.layers.1.self_attn.q_proj.weight"]
  weights["model.norm.weight"] = np.zeros(63, np.float32)
  weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, weights, extra={"llama.vocab_size": 300})
  with pytest.raises(ValueError) as error:
    models.load(str(path))
  message = str(error.value)
  assert "2 missing tensors: token_embd.weight, blk.1.attn_q.weight" in message
  assert "1 unexpected tensors: blk.0.attn_q.bias" in message
  assert "output_norm.weight has shape [63], expected [64]" in message
  assert "\n" not in message


@pytest.mark.parametrize(
  ("extra", "expected"),
  [
    ({"llama.rope.scaling.type": "yarn"}, "rope scaling yarn is not supported yet"),
    ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
    ({"tokenizer.ggml.model": "llama"}, "unknown tokenizer 'llama', expected 'gpt2'"),
  ],
)
def test_features_that_are_not_supported(tmp_path, extra, expected):
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, tiny.tensors(), extra=extra)
  with pytest.raises(ValueError, match=expected):
    models.load(str(path))


def test_stored_rope_factors_are_refused(tmp_path):
  weights = tiny.tensors() | {"rope_freqs.weight": np.ones(8, np.float32)}
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, weights)
  with pytest.raises(ValueError, match="rope scaling llama3"):
    models.load(str(path))


def test_missing_metadata(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
  writer.add_block_count(1)
  writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(ValueError, match=r"lacks llama\.attention\.head_count, llama\.embedding"):
    models.load(str(tmp_path / "a.gguf"))
