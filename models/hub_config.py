"""The config.json of a Hugging Face folder: which family it is, and its static shape.

A setting that this code does not follow is refused: a model that ignored it would run and be wrong.
Settings that change nothing of what is computed (dropout, initializer, dtype) are ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.config import ROPE_KINDS, ModelConfig, RopeScaling
from models.checkpoint import model_config

Raw = Mapping[str, Any]

_CLASSES = {  # model_type, which is also what we call the family -> what "architectures" may name
  "llama": ("LlamaForCausalLM",),
  "mistral": ("MistralForCausalLM",),
  "yi": ("YiForCausalLM", "LlamaForCausalLM"),
  "qwen2": ("Qwen2ForCausalLM",),
  "opt": ("OPTForCausalLM",),
}
_SHAPE = (
  "num_hidden_layers",
  "num_attention_heads",
  "hidden_size",
  "vocab_size",
  "max_position_embeddings",
)
_LLAMA_SHAPE = (*_SHAPE, "intermediate_size")
_REQUIRED = {
  "llama": _LLAMA_SHAPE,
  "mistral": (*_LLAMA_SHAPE, "num_key_value_heads", "sliding_window"),
  "yi": _LLAMA_SHAPE,
  "qwen2": (*_LLAMA_SHAPE, "num_key_value_heads"),
  "opt": (*_SHAPE, "ffn_dim"),
}
_ROTARY = {"hidden_act": "silu", "partial_rotary_factor": 1, "quantization_config": None}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_FOLLOWED = {  # the only value of each setting that is followed, and what its absence means
  "llama": _ROTARY | _NO_BIAS,
  "mistral": _ROTARY,
  "yi": _ROTARY | _NO_BIAS,
  "qwen2": _ROTARY,
  "opt": {
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
    "quantization_config": None,
  },
}
# Fields of a rope scaling, called the same in RopeScaling; those of the second table may be absent.
_NEEDED = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
  "yarn": ("factor",),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor")}
_ORIGINAL = "original_max_position_embeddings"
_READ_ELSEWHERE = ("type", "rope_type", "rope_theta", _ORIGINAL)
_WITHOUT_EFFECT = {"truncate": (True,), "partial_rotary_factor": (1,), "finetuned": (True, False)}


def read_config(raw: Raw, path: Path) -> ModelConfig:
  """The static shape that a config.json declares.

  Args:
    raw: its content.
    path: the file, for messages.

  Raises:
    ValueError: another architecture, a missing key, a value that makes no sense, or a setting that
      is not followed here.
  """
  family = _family(raw, path)
  absent = [key for key in _REQUIRED[family] if key not in raw]
  if absent:
    raise ValueError(f"{path} lacks {', '.join(absent)}; download it again")
  for key, value in _FOLLOWED[family].items():
    found = raw.get(key, value)
    if found != value:
      raise ValueError(f"{path}: {key} {found!r} is not supported, expected {value!r}")
  return _opt_config(raw, path) if family == "opt" else _decoder_config(raw, family, path)


def _family(raw: Raw, path: Path) -> str:
  family = str(raw.get("model_type"))
  known = _CLASSES.get(family, ())
  found = raw.get("architectures") or known
  if not set(known) & set(found):
    expected = known or [f"{classes[0]} ({name!r})" for name, classes in _CLASSES.items()]
    raise ValueError(
      f"{path}: unknown architecture {', '.join(map(str, found))} (model_type {family!r}), "
      f"expected {' or '.join(expected)}"
    )
  return family


def _opt_config(raw: Raw, path: Path) -> ModelConfig:
  embed, width = raw["hidden_size"], raw.get("word_embed_proj_dim")
  config = model_config(
    str(path),
    family="opt",
    head_dim=None,
    num_layers=raw["num_hidden_layers"],
    num_heads=raw["num_attention_heads"],
    num_kv_heads=raw["num_attention_heads"],
    embed_dim=embed,
    ffn_dim=raw["ffn_dim"],
    vocab_size=raw["vocab_size"],
    max_tokens=raw["max_position_embeddings"],
    rope_theta=10_000.0,  # unused
    norm_eps=1e-5,
    tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
    norm_last=not raw.get("do_layer_norm_before", True),
  )
  if width in (None, embed):
    return config
  return dataclasses.replace(config, token_dim=_whole("word_embed_proj_dim", width, path))


def _decoder_config(raw: Raw, family: str, path: Path) -> ModelConfig:
  # Newer files hold base and scaling in `rope_parameters`, older ones keep the base outside.
  rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
  if not isinstance(rope, dict):
    raise ValueError(f"{path}: rope_scaling is {rope!r}, expected an object")
  config = model_config(
    str(path),
    family=family,
    head_dim=raw.get("head_dim"),
    num_layers=raw["num_hidden_layers"],
    num_heads=raw["num_attention_heads"],
    num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
    embed_dim=raw["hidden_size"],
    ffn_dim=raw["intermediate_size"],
    vocab_size=raw["vocab_size"],
    max_tokens=raw["max_position_embeddings"],
    rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
    norm_eps=raw.get("rms_norm_eps", 1e-6),
    tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
  )
  original = rope.get(_ORIGINAL) or raw.get(_ORIGINAL) or config.max_tokens
  scaling = _scaling(rope, _whole(_ORIGINAL, original, path), config, path)
  return dataclasses.replace(
    config,
    rope_scaling=scaling,
    max_tokens=stretched_tokens(config.max_tokens, scaling),
    window_tokens=_window(raw, config, path),
  )


def stretched_tokens(max_tokens: int, scaling: RopeScaling) -> int:
  """Longest context with a scaling; of dynamic and yarn, files state the one before."""
  if scaling.kind not in ("dynamic", "yarn"):
    return max_tokens
  return max(max_tokens, int(scaling.factor * scaling.original_tokens))


def _scaling(rope: Raw, original: int, config: ModelConfig, path: Path) -> RopeScaling:
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind not in ROPE_KINDS:
    raise ValueError(f"{path}: unknown rope type {kind!r}, expected one of {', '.join(ROPE_KINDS)}")
  known = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
  for key, value in rope.items():
    followed = key in known or key in _READ_ELSEWHERE
    if not followed and value not in (None, *_WITHOUT_EFFECT.get(key, ())):
      raise ValueError(f"{path}: {key} {value!r} of rope type {kind!r} is not supported")
  absent = [key for key in _NEEDED[kind] if rope.get(key) is None]
  if absent:
    raise ValueError(f"{path}: rope type {kind!r} lacks {', '.join(absent)}; download it again")
  if kind == "dynamic" and original != config.max_tokens:
    raise ValueError(
      f"{path}: {_ORIGINAL} {original} of rope type 'dynamic' is not supported, expected that of "
      f"max_position_embeddings, {config.max_tokens}"
    )
  fields = {key: rope[key] for key in known if rope.get(key) is not None}
  _check_numbers(fields, path)
  if kind in ("default", "linear"):
    return RopeScaling(kind, **fields)
  return RopeScaling(kind, original_tokens=original, **fields)


def _check_numbers(fields: Raw, path: Path) -> None:
  for name, value in fields.items():
    least = 1 if name == "factor" else 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value == 0 or not least <= value < math.inf:
      expected = "a number of at least 1" if least else "a positive number"
      raise ValueError(f"{path}: rope {name} is {value!r}, expected {expected}")
  for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
    if low in fields and high in fields and fields[low] >= fields[high]:
      raise ValueError(f"{path}: rope {low} {fields[low]} must be below {high} {fields[high]}")


def _window(raw: Raw, config: ModelConfig, path: Path) -> int | None:
  """One window for all layers, or None: the families know no other kind."""
  window = None
  if config.family == "mistral":
    window = raw["sliding_window"]
  elif config.family == "qwen2" and raw.get("use_sliding_window"):
    window = _qwen2_window(raw, config.num_layers, path)
  return None if window is None else _whole("sliding_window", window, path)


def _qwen2_window(raw: Raw, layers: int, path: Path) -> Any:
  full = min(_whole("max_window_layers", raw.get("max_window_layers", 28), path, least=0), layers)
  kinds = raw.get("layer_types") or ["full_attention"] * full
  full = kinds.count("full_attention")
  if 0 < full < layers:
    raise ValueError(
      f"{path}: use_sliding_window with {layers - full} of {layers} layers that slide is not "
      "supported, expected all of them or none"
    )
  if full:
    return None
  if "sliding_window" not in raw:
    raise ValueError(f"{path} lacks sliding_window; download it again")
  return raw["sliding_window"]


def _whole(name: str, value: Any, path: Path, least: int = 1) -> int:
  if type(value) is not int or value < least:
    raise ValueError(f"{path}: {name} is {value!r}, expected a whole number of at least {least}")
  return value
