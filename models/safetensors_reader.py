"""Folders of Hugging Face safetensors: `config.json` with one file, or shards and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from models.checkpoint import Checkpoint, tensor_name
from models.hub_config import read_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_UNUSED = ".rotary_emb.inv_freq"  # rotary frequencies, which follow from the config

_TOP = {"head": "lm_head"}
_DECODER = _TOP | {
  "embed": "model.embed_tokens",
  "norm": "model.norm",
  "attn_norm": "model.layers.{}.input_layernorm",
  "q": "model.layers.{}.self_attn.q_proj",
  "k": "model.layers.{}.self_attn.k_proj",
  "v": "model.layers.{}.self_attn.v_proj",
  "o": "model.layers.{}.self_attn.o_proj",
  "mlp_norm": "model.layers.{}.post_attention_layernorm",
  "gate": "model.layers.{}.mlp.gate_proj",
  "up": "model.layers.{}.mlp.up_proj",
  "down": "model.layers.{}.mlp.down_proj",
}
_OPT = _TOP | {
  "embed": "model.decoder.embed_tokens",
  "positions": "model.decoder.embed_positions",
  "project_in": "model.decoder.project_in",
  "project_out": "model.decoder.project_out",
  "norm": "model.decoder.final_layer_norm",
  "attn_norm": "model.decoder.layers.{}.self_attn_layer_norm",
  "q": "model.decoder.layers.{}.self_attn.q_proj",
  "k": "model.decoder.layers.{}.self_attn.k_proj",
  "v": "model.decoder.layers.{}.self_attn.v_proj",
  "o": "model.decoder.layers.{}.self_attn.out_proj",
  "mlp_norm": "model.decoder.layers.{}.final_layer_norm",
  "up": "model.decoder.layers.{}.fc1",
  "down": "model.decoder.layers.{}.fc2",
}
NAMES = {"llama": _DECODER, "mistral": _DECODER, "yi": _DECODER, "qwen2": _DECODER, "opt": _OPT}
"""What the hub calls each parameter of a family; see `Checkpoint.names`."""


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
  unnamed = [file.name for file in _same_split(files) if file not in files]
  if unnamed:
    raise ValueError(
      f"{index} does not name {', '.join(unnamed)} beside it; download the index again"
    )
  return files


def _same_split(files: list[Path]) -> list[Path]:
  """Files beside these that say they are of as many, as model-00001-of-00003.safetensors does."""
  ends = {f"*{mark}{rest}" for _, mark, rest in (f.name.partition("-of-") for f in files) if mark}
  return sorted(file for end in ends for file in files[0].parent.glob(end))


def read(folder: Path) -> Checkpoint:
  """Describes a model folder as a `Checkpoint`.

  Raises:
    ValueError: another architecture, files missing or damaged, or a feature not supported yet.
  """
  path = folder / "config.json"
  config = read_config(read_json(path), path)
  shapes: dict[str, tuple[int, ...]] = {}
  holders: dict[str, Path] = {}
  for file in weight_files(folder):
    found = {name: shape for name, shape in _shapes(file).items() if not name.endswith(_UNUSED)}
    shapes |= found
    holders |= dict.fromkeys(found, file)

  def read_tensor(name: str) -> np.ndarray:
    with safe_open(holders[name], framework="numpy") as tensors:
      return tensors.get_tensor(name)

  return Checkpoint(str(folder), config, _names(config.family, shapes), shapes, read_tensor)


def _names(family: str, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
  """What this file calls each parameter: older files of OPT leave out the first "model."."""
  names = NAMES[family]
  bare = {key: name.removeprefix("model.") for key, name in names.items()}
  return bare if tensor_name(bare, "embed") in shapes else names


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
