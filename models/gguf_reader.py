"""GGUF files of Llama (also Mistral and Yi) and Qwen2, read with the PyPI package gguf and
dequantized by numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvjax.config import ModelConfig
from models import gguf_rope
from models.checkpoint import Checkpoint, model_config
from models.hub_config import stretched_tokens

NAMES = {
  "embed": "token_embd",
  "norm": "output_norm",
  "head": "output",
  "attn_norm": "blk.{}.attn_norm",
  "q": "blk.{}.attn_q",
  "k": "blk.{}.attn_k",
  "v": "blk.{}.attn_v",
  "o": "blk.{}.attn_output",
  "mlp_norm": "blk.{}.ffn_norm",
  "gate": "blk.{}.ffn_gate",
  "up": "blk.{}.ffn_up",
  "down": "blk.{}.ffn_down",
}
"""What a file calls each parameter; see `models.checkpoint.Checkpoint.names`."""

ROPE_DIVISORS = "rope_freqs.weight"
_EMBED, _HEAD = (f"{NAMES[key]}.weight" for key in ("embed", "head"))
_FAMILIES = ("llama", "qwen2")  # general.architecture; files of Mistral and Yi say llama
_PERMUTED = ("llama",)  # whose rows of q and k are in another order


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
    ValueError: another architecture, a missing key, or a feature that is not supported.
  """
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  config = _config(info, tensors, path)
  permuted = {}
  if config.family in _PERMUTED:
    permuted = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

  def read_tensor(name: str) -> np.ndarray:
    matrix = _dequantize(tensors[name], path)
    heads = permuted.get(name.split(".")[-2])
    return matrix if heads is None else unpermute(matrix, heads)

  shapes = {
    name: tuple(int(size) for size in reversed(tensor.shape))
    for name, tensor in tensors.items()
    if name != ROPE_DIVISORS
  }
  return Checkpoint(str(path), config, NAMES, shapes, read_tensor)


def _dequantize(tensor: gguf.ReaderTensor, path: Path) -> np.ndarray:
  try:
    return gguf.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ValueError(
      f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which the gguf package "
      "cannot dequantize; use a file with another quantization"
    ) from error


def unpermute(matrix: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a q or k matrix [heads*D, E] from interleaved rotary pairs to the half-split layout.

  Files of Llama store component i of a head's first half at row 2i and component i of
  its second half at row 2i + 1.
  """
  pairs = matrix.reshape(heads, -1, 2, matrix.shape[-1])
  return pairs.swapaxes(1, 2).reshape(matrix.shape)


def _config(info: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> ModelConfig:
  family = info.get("general.architecture")
  if family not in _FAMILIES:
    expected = " or ".join(map(repr, _FAMILIES))
    raise ValueError(f"{path}: unknown architecture {family!r}, expected {expected}")
  model = {key.removeprefix(f"{family}."): value for key, value in info.items()}
  required = (
    "block_count",
    "attention.head_count",
    "embedding_length",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
  )
  absent = [f"{family}.{key}" for key in required if key not in model]
  if absent:
    raise ValueError(f"{path}: metadata lacks {', '.join(absent)}; convert the model again")
  if isinstance(model.get("attention.head_count_kv"), list):
    raise ValueError(f"{path}: KV heads that differ by layer are not supported, expected one")
  heads = model["attention.head_count"]
  config = model_config(
    str(path),
    family=family,
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
    tied_embeddings=_HEAD not in tensors,
  )
  _refuse_unsupported(model, config.head_dim, path)
  scaling = gguf_rope.read_scaling(model, tensors.get(ROPE_DIVISORS), config, path)
  return dataclasses.replace(
    config,
    rope_scaling=scaling,
    max_tokens=stretched_tokens(config.max_tokens, scaling),
    window_tokens=model.get("attention.sliding_window") or None,
  )


def _vocab_size(model: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> int:
  if "vocab_size" in model:
    return model["vocab_size"]
  if "tokenizer.ggml.tokens" in model:
    return len(model["tokenizer.ggml.tokens"])
  if _EMBED not in tensors:
    raise ValueError(f"{path}: no vocabulary size in the metadata and no {_EMBED}")
  return int(tensors[_EMBED].shape[-1])


def _refuse_unsupported(model: Mapping[str, Any], head_dim: int, path: Path) -> None:
  """Everything that would run and be wrong if it were ignored."""
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
