"""The two small models of `scripts.train_small`: shapes, starting weights, folders.

Both read bytes: an id below 256 is the byte of that value, and id 256 starts every text. So UTF-8
text becomes ids without a vocabulary, and a tokenizer.json that says just this goes with them.

**Look-back heads.** To recall `QK=7301` when it reads `QK=` a second time, a model needs two steps:
an early layer that tells every byte what stands before it, and a later one that looks for a place
with the same bytes before it. Neither is of use without the other, which is why small models see no
gain for a long time when they are trained from random weights. Here the first step is given: query
head h of layer 1 starts out looking h + 1 bytes back. Everything else is random, and everything is
trained. Recall then settles in the layers above, where policies that leave the first layers dense
(Quest leaves two) can still lose it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as vocabularies

from kvjax.config import ModelConfig
from kvjax.types import Params
from models import families
from models.checkpoint import tensor_name
from models.safetensors_reader import NAMES, SINGLE

BOS_ID = 256
_NEWLINE = 10  # ends an answer
_LOOK_BACK_LAYER = 1
_GAIN = 4.5  # of a look-back head's queries and keys: about half of its attention is then right
_QUIET = 0.25  # what is left of the random part of its queries and keys
_CONSTANT = 4.0  # in channel 0 of every byte of a Llama

SHAPES = {
  "small-llama": ModelConfig(
    family="llama",
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    embed_dim=128,
    ffn_dim=512,
    vocab_size=BOS_ID + 1,
    max_tokens=4096,
    rope_theta=1_000_000.0,
  ),
  "small-opt": ModelConfig(
    family="opt",
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    embed_dim=128,
    ffn_dim=512,
    vocab_size=BOS_ID + 1,
    max_tokens=4096,
  ),
}


def start(config: ModelConfig, key: jax.Array) -> Params:
  """Weights to start training from: random but for the look-back heads, f32.

  Bytes have entries of unit size and the halves of a layer add less the more layers there are, so
  that what a byte is stays visible to all of them.
  """
  params = families.build(config).init(key)
  quieter = np.float32((2 * config.num_layers) ** -0.5)
  layers = [layer | {n: layer[n] * quieter for n in ("o", "down")} for layer in params["layers"]]
  embed = params["embed"] * np.float32(config.embed_dim**0.5)
  if config.family == "opt":
    # The first D channels hold the position and nothing else; a head reads it from there.
    d = config.head_dim
    rows = np.arange(params["positions"].shape[0])
    places = np.float32(2**0.5) * _waves(config, rows)  # of unit size, as the bytes
    params["positions"] = jnp.zeros_like(params["positions"]).at[:, :d].set(places)
    embed, seen = embed.at[:, :d].set(0), np.eye(d) / 2**0.5
    # Only look-back heads read it at first: what is recalled does not depend on where it stands.
    layers = [
      layer | {name: layer[name].at[:d].set(0) for name in ("q", "k", "v", "up")}
      for layer in layers
    ]
  else:
    # A constant, which the rotary embedding turns into the position.
    embed, seen = embed.at[:, 0].set(_CONSTANT), _waves(config, np.zeros(1)) / _CONSTANT
  layers[_LOOK_BACK_LAYER] |= _look_back(config, layers[_LOOK_BACK_LAYER], seen)
  return params | {"embed": embed, "layers": tuple(layers)}


def _look_back(config: ModelConfig, layer: Params, seen: np.ndarray) -> Params:
  """Queries and keys that meet where the key stands h + 1 places before the query of head h.

  Args:
    config: the static shape.
    layer: the random weights of the layer.
    seen: f[n, D], turns the first n channels into the waves of a position.
  """
  gain = np.repeat([[_GAIN, _GAIN / 2] * 2], config.head_dim // 4, axis=1)  # near places count most
  turns = [_turn(config, head + 1) for head in range(config.num_heads)]
  heads = {"q": turns, "k": [_turn(config, 0)] * config.num_kv_heads}
  return {
    name: (layer[name] * np.float32(_QUIET))
    .at[: len(seen)]
    .set(np.concatenate([seen @ turn * gain for turn in turns], axis=1).astype(np.float32))
    for name, turns in heads.items()
  }


def _waves(config: ModelConfig, positions: np.ndarray) -> np.ndarray:
  """f32[n, D]: cosines and sines of positions, at the frequencies of a rotary embedding."""
  angles = positions[:, None] * _frequencies(config)
  return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _turn(config: ModelConfig, back: int) -> np.ndarray:
  """f[D, D]: `_waves(p) @ _turn(back)` are the waves of p - back."""
  cos, sin = (np.diag(wave(back * _frequencies(config))) for wave in (np.cos, np.sin))
  return np.block([[cos, -sin], [sin, cos]])


def _frequencies(config: ModelConfig) -> np.ndarray:
  half = config.head_dim // 2
  return config.rope_theta ** (-np.arange(half) / half)


def write_folder(folder: Path, config: ModelConfig, params: Params) -> None:
  """Writes a model in bf16 as the hub lays it out; the folder is made if it is not there."""
  folder.mkdir(parents=True, exist_ok=True)
  tensors = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    tensor = np.asarray(leaf).astype(ml_dtypes.bfloat16)
    if path.startswith("layers/"):
      tensor = tensor.T  # the hub has matrices [out, in]
    tensors[tensor_name(NAMES[config.family], path)] = np.ascontiguousarray(tensor)
  (folder / SINGLE).write_bytes(save(tensors, metadata={"format": "pt"}))
  _byte_tokenizer().save(str(folder / "tokenizer.json"))
  _write_json(folder / "config.json", _describe(config))
  _write_json(folder / "generation_config.json", {"eos_token_id": _NEWLINE})
  _write_json(folder / "tokenizer_config.json", {"add_bos_token": True, "bos_token": "<s>"})


def _describe(config: ModelConfig) -> dict[str, Any]:
  """A config.json."""
  shared = {
    "model_type": config.family,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "hidden_size": config.embed_dim,
    "vocab_size": config.vocab_size,
    "max_position_embeddings": config.max_tokens,
    "tie_word_embeddings": config.tied_embeddings,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS_ID,
    "eos_token_id": _NEWLINE,
  }
  if config.family == "opt":
    return shared | {
      "architectures": ["OPTForCausalLM"],
      "activation_function": "relu",
      "do_layer_norm_before": True,
      "ffn_dim": config.ffn_dim,
      "word_embed_proj_dim": config.embed_dim,
    }
  return shared | {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "head_dim": config.head_dim,
    "intermediate_size": config.ffn_dim,
    "num_key_value_heads": config.num_kv_heads,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
  }


def _byte_tokenizer() -> tokenizers.Tokenizer:
  """One id a byte, and no merges. Byte-level BPE has a visible letter for every byte: the byte's
  own where it has one, else the next one from U+0100 on."""
  visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
  letters, hidden = {}, 256
  for byte in range(256):
    letters[chr(byte if byte in visible else hidden)] = byte
    hidden += byte not in visible
  backend = tokenizers.Tokenizer(vocabularies.BPE(vocab=letters, merges=[]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([tokenizers.AddedToken("<s>", special=True, normalized=False)])
  return backend


def _write_json(path: Path, value: dict[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
