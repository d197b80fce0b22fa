"""Folders of Hugging Face safetensors: `config.json` with one file, or shards and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.config import ModelConfig
from models.checkpoint import Checkpoint, model_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def weight_files(folder: Path) -> list[Path]:
  """The safetensors files of a folder, sorted by name.

  Raises:
    ValueError: there are none, or the index names shards that are not there; all are named.
  """
  index = folder / INDEX
  if not index.exists():
    if not (folder / SINGLE).exists():
      raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}; is it a model folder?")
    return [folder / SINGLE]
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{index} has no weight_map; download it again")
  if not all(isinstance(name, str) for name in weight_map.values()):
    raise ValueError(f"{index}: weight_map holds other things than file names; download it again")
  files = [folder / name for name in sorted(set(weight_map.values()))]
  absent = [file.name for file in files if not file.exists()]
  if absent:
    raise ValueError(
      f"{folder}: {len(absent)} of {len(files)} shards of {INDEX} are missing: "
      f"{', '.join(absent)}; download them"
    )
  return files


def read(folder: Path) -> Checkpoint:
  """Describes a model folder as a `Checkpoint`.

  Raises:
    ValueError: another architecture, files missing or damaged, or a feature not supported yet.
  """
  config = _config(read_json(folder / "config.json"), folder)
  shapes: dict[str, tuple[int, ...]] = {}
  holders: dict[str, Path] = {}
  for file in weight_files(folder):
    found = _shapes(file)
    shapes |= found
    holders |= dict.fromkeys(found, file)

  def read_tensor(name: str) -> np.ndarray:
    with safe_open(holders[name], framework="numpy") as tensors:
      return tensors.get_tensor(name)

  return Checkpoint(str(folder), config, shapes, read_tensor)


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object from a file.

  Raises:
    ValueError: no such file, or not a JSON object.
  """
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError as error:
    raise ValueError(f"{path} is missing; is {path.parent} a complete model folder?") from error
  except ValueError as error:
    raise ValueError(f"{path} is not JSON ({error}); download it again") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds a JSON {type(value).__name__}, expected an object")
  return value


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
  try:
    with safe_open(file, framework="numpy") as tensors:
      slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
      dtypes = {name: one.get_dtype() for name, one in slices.items()}
      shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
  except SafetensorError as error:
    raise ValueError(
      f"{file} is a truncated or damaged safetensors file of {file.stat().st_size} bytes "
      f"({error}); download it again"
    ) from error
  refused = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _DTYPES]
  if refused:
    raise ValueError(
      f"{file}: dtypes other than {', '.join(_DTYPES)} are not supported: {', '.join(refused)}"
    )
  return shapes


def _config(raw: Mapping[str, Any], folder: Path) -> ModelConfig:
  architectures = raw.get("architectures") or ["LlamaForCausalLM"]
  if raw.get("model_type") != "llama" or "LlamaForCausalLM" not in architectures:
    raise ValueError(
      f"{folder}: unknown architecture {', '.join(architectures)} (model_type "
      f"{raw.get('model_type')!r}), expected LlamaForCausalLM (model_type 'llama')"
    )
  required = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
  )
  absent = [key for key in required if key not in raw]
  if absent:
    raise ValueError(f"{folder / 'config.json'} lacks {', '.join(absent)}; download it again")
  heads = raw["num_attention_heads"]
  return model_config(
    str(folder / "config.json"),
    head_dim=raw.get("head_dim"),
    num_layers=raw["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=raw.get("num_key_value_heads") or heads,
    embed_dim=raw["hidden_size"],
    ffn_dim=raw["intermediate_size"],
    vocab_size=raw["vocab_size"],
    max_tokens=raw["max_position_embeddings"],
    rope_theta=_rope_theta(raw, folder),
    norm_eps=raw.get("rms_norm_eps", 1e-6),
    tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
  )


def _rope_theta(raw: Mapping[str, Any], folder: Path) -> Any:
  """The base, after refusing what would run and be wrong if it were ignored.

  Newer files hold `rope_parameters`; older ones `rope_scaling` with the base beside it.
  """
  rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  if not isinstance(rope, dict):
    raise ValueError(f"{folder / 'config.json'}: rope_scaling is {rope!r}, expected an object")
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind != "default":
    raise ValueError(f"{folder}: rope_scaling {kind!r} is not supported yet, expected none")
  expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
  expected |= {"partial_rotary_factor": 1, "quantization_config": None}
  for key, value in expected.items():
    found = rope.get(key, raw.get(key, value))
    if found != value:
      raise ValueError(f"{folder}: {key} {found!r} is not supported, expected {value!r}")
  return rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
