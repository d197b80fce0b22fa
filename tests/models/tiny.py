"""Tiny random models, written to disk as the hub and llama.cpp lay them out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from kvjax.config import ModelConfig

CONFIG = ModelConfig(
  family="llama",
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  embed_dim=64,
  ffn_dim=96,
  vocab_size=300,
  max_tokens=128,
  rope_theta=500.0,
  norm_eps=1e-6,
)
FAMILIES = {  # one of every family and of every way in which they differ
  "llama": CONFIG,
  "mistral": dataclasses.replace(CONFIG, family="mistral", window_tokens=5),
  "yi": dataclasses.replace(CONFIG, family="yi", num_kv_heads=1),
  "qwen2": dataclasses.replace(CONFIG, family="qwen2"),
  "qwen2-tied": dataclasses.replace(CONFIG, family="qwen2", tied_embeddings=True),
  "opt": dataclasses.replace(CONFIG, family="opt", num_kv_heads=4, tied_embeddings=True),
  "opt-350m": dataclasses.replace(
    CONFIG, family="opt", num_kv_heads=4, tied_embeddings=True, norm_last=True, token_dim=32
  ),
}
GGUF_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def tied(config: ModelConfig = CONFIG) -> ModelConfig:
  return dataclasses.replace(config, tied_embeddings=True)


def tensors(config: ModelConfig = CONFIG, dtype: Any = "float32") -> dict[str, np.ndarray]:
  """Seeded random tensors in the naming and layout of the hub, of all families but OPT."""
  rng = np.random.default_rng(0)
  embed, ffn, vocab = config.embed_dim, config.ffn_dim, config.vocab_size
  query, keyvalue = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  shapes: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (vocab, embed),
    "model.norm.weight": (embed,),
  }
  if not config.tied_embeddings:
    shapes["lm_head.weight"] = (vocab, embed)
  for index in range(config.num_layers):
    layer = f"model.layers.{index}."
    shapes |= {
      layer + "input_layernorm.weight": (embed,),
      layer + "self_attn.q_proj.weight": (query, embed),
      layer + "self_attn.k_proj.weight": (keyvalue, embed),
      layer + "self_attn.v_proj.weight": (keyvalue, embed),
      layer + "self_attn.o_proj.weight": (embed, query),
      layer + "post_attention_layernorm.weight": (embed,),
      layer + "mlp.gate_proj.weight": (ffn, embed),
      layer + "mlp.up_proj.weight": (ffn, embed),
      layer + "mlp.down_proj.weight": (embed, ffn),
    }
    if config.family == "qwen2":
      for name, size in (("q", query), ("k", keyvalue), ("v", keyvalue)):
        shapes[f"{layer}self_attn.{name}_proj.bias"] = (size,)
  # By way of f32, so that another dtype holds the rounded f32 numbers.
  return {
    name: (rng.standard_normal(shape) / 8).astype(np.float32).astype(np.dtype(dtype))
    for name, shape in shapes.items()
  }


def write_folder(
  folder: Path,
  config: ModelConfig,
  weights: dict[str, np.ndarray],
  shards: int = 1,
  **changes: Any,
) -> Path:
  """A Hugging Face folder; `changes` are laid over config.json."""
  folder.mkdir()
  described = {
    "architectures": [f"{config.family.capitalize()}ForCausalLM"],
    "model_type": config.family,
    "hidden_act": "silu",
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_size": config.embed_dim,
    "intermediate_size": config.ffn_dim,
    "vocab_size": config.vocab_size,
    "max_position_embeddings": config.max_tokens,
    "rope_theta": config.rope_theta,
    "rope_scaling": None,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied_embeddings,
    "sliding_window": config.window_tokens,
  }
  write_json(folder / "config.json", described | changes)
  if shards == 1:
    save_file(weights, folder / "model.safetensors")
    return folder
  weight_map = {}
  for shard in range(shards):
    name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
    part = {key: weights[key] for key in list(weights)[shard::shards]}
    save_file(part, folder / name)
    weight_map |= dict.fromkeys(part, name)
  write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
  return folder


def write_json(path: Path, value: Any) -> None:
  path.write_text(json.dumps(value), encoding="utf-8")


def write_gguf(
  path: Path,
  config: ModelConfig,
  weights: dict[str, np.ndarray],
  kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
  architecture: str | None = None,
  extra: dict[str, Any] | None = None,
  quantize: Callable[..., np.ndarray] = gguf.quantize,
) -> Path:
  """A GGUF file with matrices of type `kind`; `extra` are more key-value pairs."""
  architecture = architecture or config.family
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_tokens)
  writer.add_embedding_length(config.embed_dim)
  writer.add_feed_forward_length(config.ffn_dim)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_rope_dimension_count(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  for key, value in (extra or {}).items():
    _add(writer, key, value)
  for name, tensor in weights.items():
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
      tensor = interleaved(tensor, config.head_dim)
    if tensor.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
      writer.add_tensor(gguf_name(name), quantize(tensor, kind), raw_dtype=kind)
    else:
      writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def interleaved(matrix: np.ndarray, head_dim: int) -> np.ndarray:
  """Rows of q or k as llama.cpp stores them: i and i + D/2 of a head side by side."""
  out = np.empty_like(matrix)
  for start in range(0, len(matrix), head_dim):
    head, half = matrix[start : start + head_dim], head_dim // 2
    out[start : start + head_dim : 2] = head[:half]
    out[start + 1 : start + head_dim : 2] = head[half:]
  return out


def gguf_name(name: str) -> str:
  for hub, short in GGUF_NAMES.items():
    name = name.replace(hub, short)
  return name.replace("model.layers.", "blk.")


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
  if isinstance(value, list):
    writer.add_array(key, value)
  elif isinstance(value, bool):
    writer.add_bool(key, value)
  elif isinstance(value, int):
    writer.add_uint32(key, value)
  elif isinstance(value, float):
    writer.add_float32(key, value)
  else:
    writer.add_string(key, value)
