"""Small random checkpoints of every family, as the hub lays them out, from a seed and numpy alone.

`scripts.make_goldens` writes them for transformers to read, and the tests write them again for
kvjax to read: the weights need not be committed, nor torch be there. Both must get the same bits,
on Python 3.11 too and whatever the versions of the packages; hence whole random numbers, scaled
exactly, and files written by hand.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NEW_TOKENS = 64
PROMPT_LENGTHS = (80, 33, 65)
VOCAB_SIZE = 160


class Case(NamedTuple):
  """One checkpoint.

  Attributes:
    config: its config.json.
    num_shards: files that hold its tensors.
    bf16: tensors are bf16, else f32.
  """

  config: dict[str, Any]
  num_shards: int = 1
  bf16: bool = False


def _decoder(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
  return {
    "architectures": [architecture],
    "model_type": model_type,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
  } | changes


def _llama(**changes: Any) -> dict[str, Any]:
  return _decoder("llama", "LlamaForCausalLM", **changes)


def _mistral(**changes: Any) -> dict[str, Any]:
  return _decoder("mistral", "MistralForCausalLM", **changes)


def _qwen2(**changes: Any) -> dict[str, Any]:
  return _decoder("qwen2", "Qwen2ForCausalLM", use_sliding_window=False, **changes)


def _opt(**changes: Any) -> dict[str, Any]:
  return {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "word_embed_proj_dim": 64,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": None,
    "eos_token_id": None,
  } | changes


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}
_ORIGINAL = {"original_max_position_embeddings": 64}
CASES = {
  "llama": Case(_llama()),
  "llama-linear": Case(_llama(rope_scaling={"type": "linear", "factor": 4.0})),
  "llama-dynamic": Case(
    # Prompts end before position 96 and answers beyond.
    _llama(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=96)
  ),
  "llama-llama3": Case(_llama(rope_scaling=_LLAMA3 | _ORIGINAL)),
  "llama-yarn": Case(_llama(rope_parameters=_YARN | _ORIGINAL, rope_theta=None)),
  "mistral": Case(_mistral(sliding_window=None, head_dim=32), num_shards=3),
  "mistral-window": Case(_mistral(sliding_window=24)),
  "yi": Case(_llama(num_key_value_heads=1, rope_theta=5_000_000.0), bf16=True),
  "qwen2": Case(_qwen2()),
  "qwen2-tied": Case(_qwen2(tie_word_embeddings=True), num_shards=2),
  "opt": Case(_opt()),
  "opt-350m": Case(_opt(do_layer_norm_before=False, word_embed_proj_dim=32)),
}


def prompts() -> list[list[int]]:
  """Token ids of the rows, the same for all."""
  rng = np.random.default_rng(0)
  return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]


def write(folder: Path, case: Case, seed: int) -> str:
  """Writes one checkpoint into a new folder.

  Returns:
    The sha256 of the files of weights.
  """
  folder.mkdir(parents=True)
  _write_json(folder / "config.json", case.config)
  tensors = _tensors(case, seed)
  digest = hashlib.sha256()
  weight_map = {}
  for shard in range(case.num_shards):
    name = "model.safetensors"
    if case.num_shards > 1:
      name = f"model-{shard + 1:05d}-of-{case.num_shards:05d}.safetensors"
    part = {key: tensors[key] for key in list(tensors)[shard :: case.num_shards]}
    raw = _safetensors(part, "BF16" if case.bf16 else "F32")
    (folder / name).write_bytes(raw)
    digest.update(raw)
    weight_map |= dict.fromkeys(part, name)
  if case.num_shards > 1:
    size = sum(len(data) for _, data in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
  return digest.hexdigest()


def _tensors(case: Case, seed: int) -> dict[str, tuple[tuple[int, ...], bytes]]:
  """Shape and little-endian bytes of each tensor."""
  shapes = (_opt_shapes if case.config["model_type"] == "opt" else _decoder_shapes)(case.config)
  tensors = {}
  for name, shape in shapes.items():
    bits = _numbers(name, shape, seed).astype("<f4").view("<u4")
    tensors[name] = shape, ((bits >> 16).astype("<u2") if case.bf16 else bits).tobytes()
  return tensors


def _safetensors(tensors: dict[str, tuple[tuple[int, ...], bytes]], dtype: str) -> bytes:
  """A file: length of the header, the header in JSON, then all bytes in its order."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, (shape, data) in tensors.items():
    start, end = end, end + len(data)
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values())


def _numbers(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
  """Uniform; norms around one, and matrices that double the size of what they are given."""
  rng = np.random.default_rng([seed, *name.encode()])
  noise = rng.integers(-(1 << 15), 1 << 15, shape).astype(np.float32) / np.float32(1 << 15)
  if name.endswith("norm.weight"):
    return 1 + noise / 4
  if len(shape) == 1:
    return noise / 4
  if "embed" in name or name.startswith("lm_head"):
    return noise / 2
  return noise * np.float32(math.sqrt(12 / shape[1]))


def _decoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  embed, ffn = config["hidden_size"], config["intermediate_size"]
  heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
  head_dim = config.get("head_dim") or embed // heads
  outputs = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
  shapes: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB_SIZE, embed),
    "model.norm.weight": (embed,),
  }
  if not config["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (VOCAB_SIZE, embed)
  for index in range(config["num_hidden_layers"]):
    layer = f"model.layers.{index}"
    for name, size in outputs.items():
      shapes[f"{layer}.self_attn.{name}_proj.weight"] = (size, embed)
      if config["model_type"] == "qwen2":
        shapes[f"{layer}.self_attn.{name}_proj.bias"] = (size,)
    shapes |= {
      f"{layer}.self_attn.o_proj.weight": (embed, heads * head_dim),
      f"{layer}.input_layernorm.weight": (embed,),
      f"{layer}.post_attention_layernorm.weight": (embed,),
      f"{layer}.mlp.gate_proj.weight": (ffn, embed),
      f"{layer}.mlp.up_proj.weight": (ffn, embed),
      f"{layer}.mlp.down_proj.weight": (embed, ffn),
    }
  return shapes


def _opt_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  embed, ffn, width = config["hidden_size"], config["ffn_dim"], config["word_embed_proj_dim"]
  top = "model.decoder"
  shapes: dict[str, tuple[int, ...]] = {
    f"{top}.embed_tokens.weight": (VOCAB_SIZE, width),
    f"{top}.embed_positions.weight": (config["max_position_embeddings"] + 2, embed),
  }
  if width != embed:
    shapes[f"{top}.project_in.weight"] = (embed, width)
    shapes[f"{top}.project_out.weight"] = (width, embed)
  if config["do_layer_norm_before"]:
    shapes |= _with_bias(f"{top}.final_layer_norm", (embed,))
  for index in range(config["num_hidden_layers"]):
    layer = f"{top}.layers.{index}"
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
      shapes |= _with_bias(f"{layer}.self_attn.{name}", (embed, embed))
    shapes |= _with_bias(f"{layer}.fc1", (ffn, embed)) | _with_bias(f"{layer}.fc2", (embed, ffn))
    for name in ("self_attn_layer_norm", "final_layer_norm"):
      shapes |= _with_bias(f"{layer}.{name}", (embed,))
  return shapes


def _with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _write_json(path: Path, value: Any) -> None:
  path.write_text(json.dumps(value), encoding="utf-8")
