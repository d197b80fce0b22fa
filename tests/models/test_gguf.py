"""GGUF files: the same model as from safetensors, quantized types, and bad files."""

from __future__ import annotations

import dataclasses
import math

import gguf
import jax
import numpy as np
import pytest

import models
from kvjax.config import RopeScaling
from tests.models import naive, tiny

QWEN2 = tiny.FAMILIES["qwen2"]
# Of every pair that Llama 3 leaves alone, blends and divides there is one.
LLAMA3 = dataclasses.replace(tiny.CONFIG, rope_theta=500_000.0)


def _config(tmp_path, config=tiny.CONFIG, weights=None, **extra):
  """What is read of a file with these settings."""
  extra = {f"{config.family}.{key.replace('__', '.')}": value for key, value in extra.items()}
  path = tmp_path / "a.gguf"
  weights = tiny.tensors(config) if weights is None else weights
  return models.load(str(tiny.write_gguf(path, config, weights, extra=extra))).model.config


@pytest.mark.parametrize(
  "config",
  [tiny.CONFIG, tiny.tied(), QWEN2, tiny.FAMILIES["qwen2-tied"]],
  ids=["llama", "llama-tied", "qwen2", "qwen2-tied"],
)
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


def _readable(kind):
  try:
    gguf.dequantize(_random_blocks(np.zeros((2, 256)), kind), kind)
  except NotImplementedError:
    return False
  return True


def _random_blocks(tensor, kind):
  """Bytes of which every pair is a small f16, as scales are; most kinds cannot be written."""
  shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
  rng = np.random.default_rng(tensor.size)
  return rng.integers(0, 0x3C, shape, np.uint8)


READABLE = [
  kind
  for kind, (values_of_a_block, _) in gguf.GGML_QUANT_SIZES.items()
  if values_of_a_block > 1 and _readable(kind)
]


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_quantized_type_that_the_package_can_read(tmp_path, kind):
  config = dataclasses.replace(
    tiny.CONFIG, num_layers=1, head_dim=64, embed_dim=256, ffn_dim=256, vocab_size=8
  )
  weights = tiny.tensors(config)
  path = tiny.write_gguf(
    tmp_path / "a.gguf",
    config,
    weights,
    kind,
    quantize=_random_blocks,
    extra={"llama.vocab_size": 8},
  )
  params = models.load(str(path)).params
  for found, name in (
    (params["embed"], "model.embed_tokens.weight"),
    (params["layers"][0]["down"].T, "model.layers.0.mlp.down_proj.weight"),
  ):
    expected = gguf.dequantize(_random_blocks(weights[name], kind), kind)
    np.testing.assert_array_equal(found, expected)
    assert np.ptp(expected) > 0


def test_there_are_quantized_types():
  assert len(READABLE) >= 20


def test_a_type_that_the_package_cannot_read(tmp_path, monkeypatch):
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, tiny.tensors())

  def dequantize(data, kind):
    raise NotImplementedError

  monkeypatch.setattr(gguf, "dequantize", dequantize)
  with pytest.raises(ValueError, match=r"tensor token_embd\.weight has type F32, which the gguf"):
    models.load(str(path))


def test_mistral_files_say_llama_and_may_have_a_window(tmp_path):
  mistral = tiny.FAMILIES["mistral"]
  weights = tiny.tensors(mistral)
  folder = models.load(str(tiny.write_folder(tmp_path / "hub", mistral, weights)))
  path = tiny.write_gguf(
    tmp_path / "a.gguf", tiny.CONFIG, weights, extra={"llama.attention.sliding_window": 5}
  )
  loaded = models.load(str(path))
  assert loaded.model.config.window_tokens == folder.model.config.window_tokens == 5
  jax.tree.map(np.testing.assert_array_equal, loaded.params, folder.params)
  tokens = np.arange(14)[None]
  one, other = (naive.logits(each.model, each.params, tokens) for each in (loaded, folder))
  np.testing.assert_allclose(one, other, atol=1e-5)
  assert _config(tmp_path, attention__sliding_window=0).window_tokens is None


@pytest.mark.parametrize("config", [tiny.CONFIG, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize(
  ("extra", "scaling", "max_tokens"),
  [
    ({"type": "none"}, RopeScaling(), 128),
    ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0), 128),
    ({"factor": 4.0}, RopeScaling("linear", 4.0), 128),
    ({"type": "yarn", "factor": 2.0}, RopeScaling("yarn", 2.0, 128), 256),
    (
      {"type": "yarn", "factor": 4.0, "original_context_length": 32}
      | {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "attn_factor": 1.0},
      RopeScaling("yarn", 4.0, 32, beta_fast=16.0, beta_slow=2.0),
      128,
    ),
  ],
)
def test_rope_scaling(tmp_path, config, extra, scaling, max_tokens):
  settings = {f"rope__scaling__{key}": value for key, value in extra.items()}
  found = _config(tmp_path, config, **settings)
  assert found.rope_scaling == scaling and found.max_tokens == max_tokens


def _llama3_divisors(factor, original, low=1.0, high=4.0):
  """By what each pair is divided, case by case as Llama 3.1 was published."""
  divisors = []
  for pair in range(LLAMA3.head_dim // 2):
    wave = 2 * math.pi * LLAMA3.rope_theta ** (2 * pair / LLAMA3.head_dim)
    blend = (original / wave - low) / (high - low)
    middle = 1 / ((1 - blend) / factor + blend)
    divisors.append(1 if wave < original / high else factor if wave > original / low else middle)
  return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("original", [None, 16_384])
def test_llama3_scaling_from_its_divisors(tmp_path, factor, original):
  divisors = _llama3_divisors(factor, original or 8192)
  assert len(set(divisors.tolist())) > 2
  weights = tiny.tensors(LLAMA3) | {"rope_freqs.weight": divisors}
  extra = {"rope__scaling__original_context_length": original} if original else {}
  found = _config(tmp_path, LLAMA3, weights, **extra)
  assert found.rope_scaling == RopeScaling("llama3", factor, original or 8192)
  weights["rope_freqs.weight"] = np.ones(8, np.float32)
  assert _config(tmp_path, LLAMA3, weights).rope_scaling == RopeScaling()


@pytest.mark.parametrize(
  "divisors",
  [
    _llama3_divisors(8.0, 4096),
    _llama3_divisors(8.0, 8192, low=2.0),
    np.linspace(1, 4, 8),
    np.full(4, 2.0),
    np.full(8, 0.5),
    np.full(8, np.nan),
  ],
)
def test_divisors_that_nothing_explains(tmp_path, divisors):
  weights = tiny.tensors(LLAMA3) | {"rope_freqs.weight": divisors.astype(np.float32)}
  with pytest.raises(ValueError, match=r"rope_freqs\.weight is not the rope scaling of Llama 3"):
    _config(tmp_path, LLAMA3, weights)


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
  with pytest.raises(
    ValueError, match=r"a\.gguf: unknown architecture 'bert', expected 'llama' or 'qwen2'$"
  ):
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
    ({"llama.rope.scaling.type": "longrope"}, "unknown rope scaling 'longrope', expected none"),
    ({"llama.rope.scaling.factor": 0.5}, "factor is 0.5, expected at least 1"),
    ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor 2.0 is not supported, expected 1"),
    ({"llama.rope.scale_linear": 2.0}, "rope.scale_linear 2.0 is not supported"),
    ({"llama.rope.dimension_count": 8}, "8 of 16 dimensions are rotated, expected all"),
    ({"llama.attention.value_length": 8}, "values of 8 dimensions and keys of 16"),
    ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
    ({"tokenizer.ggml.model": "bert"}, "unknown tokenizer 'bert', expected 'gpt2' .* or 'llama'"),
  ],
)
def test_features_that_are_not_supported(tmp_path, extra, expected):
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, tiny.tensors(), extra=extra)
  with pytest.raises(ValueError, match=expected):
    models.load(str(path))


def test_divisors_beside_another_scaling(tmp_path):
  weights = tiny.tensors() | {"rope_freqs.weight": np.ones(8, np.float32)}
  with pytest.raises(ValueError, match=r"scaling linear beside rope_freqs\.weight"):
    _config(tmp_path, weights=weights, rope__scaling__type="linear", rope__scaling__factor=2.0)


def test_weights_that_are_not_finite_are_named_as_in_the_file(tmp_path):
  weights = tiny.tensors()
  weights["model.layers.1.self_attn.k_proj.weight"][3, :2] = np.nan, np.inf
  path = tiny.write_gguf(tmp_path / "a.gguf", tiny.CONFIG, weights)
  with pytest.raises(ValueError, match=r"blk\.1\.attn_k\.weight holds 2 numbers that are not fin"):
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
