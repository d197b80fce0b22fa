"""config.json: what each family's says, all spellings of rotary scaling, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.config import ModelConfig, RopeScaling
from models.hub_config import read_config
from scripts.golden_models import CASES

PATH = Path("config.json")


def _read(case, **changes):
  raw = CASES[case].config | changes
  return read_config({key: value for key, value in raw.items() if value is not ...}, PATH)


def _shape(family, **changes):
  shape = {
    "family": family,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "embed_dim": 64,
    "ffn_dim": 96,
    "vocab_size": 160,
    "max_tokens": 256,
    "rope_theta": 500.0,
  }
  return ModelConfig(**shape | changes)


OPT = {"num_kv_heads": 4, "max_tokens": 160, "rope_theta": 10_000.0, "tied_embeddings": True}


@pytest.mark.parametrize(
  ("case", "expected"),
  [
    ("llama", _shape("llama")),
    ("mistral", _shape("mistral", head_dim=32)),
    ("mistral-window", _shape("mistral", window_tokens=24)),
    ("yi", _shape("llama", num_kv_heads=1, rope_theta=5e6)),
    ("qwen2", _shape("qwen2")),
    ("qwen2-tied", _shape("qwen2", tied_embeddings=True)),
    ("opt", _shape("opt", **OPT)),
    ("opt-350m", _shape("opt", **OPT, norm_last=True, token_dim=32)),
  ],
)
def test_families(case, expected):
  assert _read(case) == expected


def test_yi_and_what_files_may_leave_out():
  for name in ("YiForCausalLM", "LlamaForCausalLM"):
    assert _read("llama", model_type="yi", architectures=[name]) == _shape("yi")
  assert _read("llama", architectures=..., hidden_act=..., bos_token_id=...) == _shape("llama")
  assert _read("llama", num_key_value_heads=...) == _shape("llama", num_kv_heads=4)
  assert _read("opt", word_embed_proj_dim=...) == _shape("opt", **OPT)
  untied = _shape("opt", **OPT | {"tied_embeddings": False})
  assert _read("opt", tie_word_embeddings=False) == untied


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
  ("kind", "fields", "scaling", "max_tokens"),
  [
    ("default", {}, RopeScaling(), 256),
    ("linear", {"factor": 4.0}, RopeScaling("linear", 4.0), 256),
    ("dynamic", {"factor": 2.0}, RopeScaling("dynamic", 2.0, 256), 512),
    ("llama3", LLAMA3, RopeScaling("llama3", 8, 256), 256),
    (
      "llama3",
      LLAMA3 | {"original_max_position_embeddings": 64, "low_freq_factor": 2},
      RopeScaling("llama3", 8, 64, low_freq_factor=2),
      256,
    ),
    ("yarn", {"factor": 4.0}, RopeScaling("yarn", 4.0, 256), 1024),
    (
      "yarn",
      {"factor": 2.0, "original_max_position_embeddings": 64, "finetuned": True, "truncate": True}
      | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "mscale": None},
      RopeScaling("yarn", 2.0, 64, beta_fast=16, beta_slow=2, attention_factor=1.5),
      256,
    ),
  ],
)
def test_rope_scaling(kind, fields, scaling, max_tokens, place, spelling):
  theta = {"rope_theta": 7.0} if place == "rope_parameters" else {}
  found = _read("llama", **{place: fields | {spelling: kind} | theta})
  expected = theta.get("rope_theta", 500.0)
  assert found == _shape("llama", rope_scaling=scaling, max_tokens=max_tokens, rope_theta=expected)


@pytest.mark.parametrize(
  ("changes", "window"),
  [
    ({}, None),
    ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, None),
    ({"use_sliding_window": True, "sliding_window": 8}, None),  # 28 layers before the first
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, None),
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
    (
      {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
      8,
    ),
  ],
)
def test_windows_of_qwen2(changes, window):
  assert _read("qwen2", **changes).window_tokens == window


@pytest.mark.parametrize(
  ("case", "changes", "message"),
  [
    ("llama", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
     r"unknown architecture GPT2LMHeadModel \(model_type 'gpt2'\), expected LlamaForCausalLM "
     r"\('llama'\) or MistralForCausalLM"),
    ("llama", {"model_type": ...}, r"\(model_type 'None'\), expected LlamaForCausalLM"),
    ("opt", {"architectures": ["OPTForSequenceClassification"]}, "expected OPTForCausalLM$"),
    ("llama", {"hidden_size": ..., "vocab_size": ...}, "lacks hidden_size, vocab_size"),
    ("opt", {"ffn_dim": ...}, "lacks ffn_dim"),
    ("mistral", {"sliding_window": ...}, "lacks sliding_window"),
    ("qwen2", {"num_key_value_heads": ...}, "lacks num_key_value_heads"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, expected 'silu'"),
    ("opt", {"activation_function": "gelu"}, "'gelu' is not supported, expected 'relu'"),
    ("llama", {"attention_bias": True}, "attention_bias True is not supported, expected False"),
    ("llama", {"mlp_bias": True}, "mlp_bias True is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config .* is not supported"),
    ("opt", {"enable_bias": False}, "enable_bias False is not supported"),
    ("opt", {"layer_norm_elementwise_affine": False}, "elementwise_affine False is not"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not"),
    ("opt", {"word_embed_proj_dim": "x"}, "word_embed_proj_dim is 'x', expected a whole number"),
    ("opt", {"num_attention_heads": 0}, "num_heads is 0, expected a positive whole number"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected a whole number of at least"),
    ("mistral", {"sliding_window": "all"}, "sliding_window is 'all', expected a whole number"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
     "with 1 of 2 layers that slide is not supported, expected all of them or none"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "lacks sliding_window"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers is 'x'"),
    ("qwen2", {"use_sliding_window": True, "num_hidden_layers": "x"}, "num_layers is 'x'"),
  ],
)  # fmt: skip
def test_what_is_refused(case, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    _read(case, **changes)
  assert str(error.value).startswith("config.json") and "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("rope", "message"),
  [
    ("linear", "rope_scaling is 'linear', expected an object"),
    ({"type": "su"}, "unknown rope type 'su', expected one of default, linear, dynamic, llama3, y"),
    ({"rope_type": "longrope", "factor": 2.0}, "unknown rope type 'longrope'"),
    ({"rope_type": "llama3"}, "'llama3' lacks factor, low_freq_factor, high_freq_factor"),
    ({"type": "linear"}, "rope type 'linear' lacks factor"),
    ({"type": "linear", "factor": "4"}, "rope factor is '4', expected a number of at least 1"),
    ({"type": "linear", "factor": True}, "rope factor is True"),
    ({"type": "dynamic", "factor": 0.5}, "rope factor is 0.5, expected a number of at least 1"),
    ({"type": "yarn", "factor": 4.0, "beta_slow": -1}, "beta_slow is -1, expected a positive"),
    ({"type": "yarn", "factor": 4.0, "beta_slow": 8, "beta_fast": 8}, "beta_slow 8 must be below"),
    ({"type": "yarn", "factor": 4.0, "mscale": 0.7}, "mscale 0.7 of rope type 'yarn' is not supp"),
    ({"type": "yarn", "factor": 4.0, "truncate": False}, "truncate False of rope type 'yarn'"),
    ({"type": "linear", "factor": 2, "beta_fast": 3}, "beta_fast 3 of rope type 'linear'"),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"},
     "original_max_position_embeddings is 'x', expected a whole number"),
    ({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
     "original_max_position_embeddings 64 of rope type 'dynamic' is not supported, .* 256$"),
    ({"full_attention": {"rope_type": "default"}}, "full_attention .* of rope type 'default' is"),
    ({"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
     "low_freq_factor 4 must be below high_freq_factor 4"),
  ],
)  # fmt: skip
def test_rope_scalings_that_are_refused(rope, message):
  with pytest.raises(ValueError, match=rf"^config\.json: .*{message}") as error:
    _read("llama", rope_scaling=rope)
  assert "\n" not in str(error.value)
