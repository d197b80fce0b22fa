"""GGUF files of architecture `llama`, read with the PyPI package gguf and dequantized by numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvjax.config import ModelConfig
from models.checkpoint import EMBED, HEAD, NORM, Checkpoint, layer_name, model_config

_TOP_NAMES = {EMBED: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
_LAYER_NAMES = {
  "attn_norm": "attn_norm",
  "q": "attn_q",
  "k": "attn_k",
  "v": "attn_v",
  "o": "attn_output",
  "mlp_norm": "ffn_norm",
  "gate": "ffn_gate",
  "up": "ffn_up",
  "down": "ffn_down",
}


class _PlainReader(gguf.GGUFReader):
  """Slices a plain array; a vocabulary is 10^5 small reads, each slow on a memmap object."""

  def __setattr__(self, name: str, value: Any) -> None:
    super().__setattr__(name, np.asarray(value) if name == "data" else value)


def open_gguf(path: Path) -> gguf.GGUFReader:
  """Maps a GGUF file; tensors stay on disk until they are used.

  Raises:
    ValueError: the file is truncated or not GGUF.
  """
  try:
    return _PlainReader(path)
  except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
    raise ValueError(
      f"{path} is a truncated or damaged GGUF file: it ends or breaks at "
      f"{path.stat().st_size} bytes ({error}); download it again"
    ) from error


def metadata(reader: gguf.GGUFReader, path: Path) -> dict[str, Any]:
  """All key-value pairs of the file as plain Python values.

  Raises:
    ValueError: one of them is damaged.
  """
  values = {}
  for name, field in reader.fields.items():
    try:
      values[name] = field.contents()
    except (ValueError, IndexError) as error:
      raise ValueError(
        f"{path}: metadata {name} is damaged ({error}); download it again"
      ) from error
  return values


def read(reader: gguf.GGUFReader, info: Mapping[str, Any], path: Path) -> Checkpoint:
  """Describes an open file as a `Checkpoint`.

  Args:
    reader: from `open_gguf`.
    info: from `metadata`.
    path: the file, for messages.

  Raises:
    ValueError: another architecture, a missing key, or a feature that is not supported yet.
  """
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  config = _config(info, tensors, path)
  to_file = _file_names(config)
  from_file = {file_name: name for name, file_name in to_file.items()}
  heads = {layer_name(index, "q"): config.num_heads for index in range(config.num_layers)}
  heads |= {layer_name(index, "k"): config.num_kv_heads for index in range(config.num_layers)}

  def read_tensor(name: str) -> np.ndarray:
    tensor = tensors[to_file[name]]
    try:
      matrix = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(
        f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which the gguf package "
        "cannot dequantize; use a file with another quantization"
      ) from error
    return unpermute(matrix, heads[name]) if name in heads else matrix

  shapes = {
    from_file.get(name, name): tuple(int(size) for size in reversed(tensor.shape))
    for name, tensor in tensors.items()
  }
  return Checkpoint(str(path), config, shapes, read_tensor, lambda name: to_file.get(name, name))


def unpermute(matrix: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a q or k matrix [heads*D, E] from interleaved rotary pairs to the half-split layout.

  Files of this architecture store component i of a head's first half at row 2i and component i of
  its second half at row 2i + 1.
  """
  pairs = matrix.reshape(heads, -1, 2, matrix.shape[-1])
  return pairs.swapaxes(1, 2).reshape(matrix.shape)


def _file_names(config: ModelConfig) -> dict[str, str]:
  names = dict(_TOP_NAMES)
  for index in range(config.num_layers):
    for key, file_key in _LAYER_NAMES.items():
      names[layer_name(index, key)] = f"blk.{index}.{file_key}.weight"
  return names


def _config(info: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> ModelConfig:
  architecture = info.get("general.architecture")
  if architecture != "llama":
    raise ValueError(f"{path}: unknown architecture {architecture!r}, expected 'llama'")
  model = {key.removeprefix("llama."): value for key, value in info.items()}
  required = (
    "block_count",
    "attention.head_count",
    "embedding_length",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
  )
  absent = [f"llama.{key}" for key in required if key not in model]
  if absent:
    raise ValueError(f"{path}: metadata lacks {', '.join(absent)}; convert the model again")
  if isinstance(model.get("attention.head_count_kv"), list):
    raise ValueError(f"{path}: KV heads that differ by layer are not supported, expected one")
  heads = model["attention.head_count"]
  config = model_config(
    str(path),
    head_dim=model.get("attention.key_length"),
    num_layers=model["block_count"],
    num_heads=heads,
    num_kv_heads=model.get("attention.head_count_kv", heads),
    embed_dim=model["embedding_length"],
    ffn_dim=model["feed_forward_length"],
    vocab_size=_vocab_size(model, tensors, path),
    max_tokens=model["context_length"],
    rope_theta=model.get("rope.freq_base", 10_000.0),
    norm_eps=model["attention.layer_norm_rms_epsilon"],
    tied_embeddings=_TOP_NAMES[HEAD] not in tensors,
  )
  _refuse_unsupported(model, tensors, config.head_dim, path)
  return config


def _vocab_size(model: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> int:
  if "vocab_size" in model:
    return model["vocab_size"]
  if "tokenizer.ggml.tokens" in model:
    return len(model["tokenizer.ggml.tokens"])
  embedding = tensors.get(_TOP_NAMES[EMBED])
  if embedding is None:
    raise ValueError(f"{path}: no vocabulary size in the metadata and no {_TOP_NAMES[EMBED]}")
  return int(embedding.shape[-1])


def _refuse_unsupported(
  model: Mapping[str, Any], tensors: Mapping[str, Any], head_dim: int, path: Path
) -> None:
  """Everything that would run and be wrong if it were ignored."""
  scaling = model.get("rope.scaling.type", "none")
  if scaling != "none" or "rope_freqs.weight" in tensors:
    kind = scaling if scaling != "none" else "llama3 (rope_freqs.weight)"
    raise ValueError(f"{path}: rope scaling {kind} is not supported yet, expected none")
  rotated = model.get("rope.dimension_count", head_dim)
  if rotated != head_dim:
    raise ValueError(f"{path}: {rotated} of {head_dim} dimensions are rotated, expected all")
  if model.get("attention.value_length", head_dim) != head_dim:
    raise ValueError(
      f"{path}: values of {model['attention.value_length']} dimensions and keys of {head_dim} are "
      "not supported, expected the same"
    )
  if model.get("expert_count", 0):
    raise ValueError(f"{path}: mixtures of experts are not supported, expected a dense model")
