"""Reader of llama2.c's "version 0" .bin and of its tokenizer, for the stories260K test model."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvjax.config import ModelConfig
from kvjax.types import Model, Params
from models import build
from models.checkpoint import Checkpoint, read_params, tensor_name
from models.safetensors_reader import NAMES

BOS = 1
DATA = Path(__file__).resolve().parents[1] / "data" / "stories260k"


def load_stories() -> tuple[Model, Params]:
  checkpoint = read(DATA / "stories260K.bin")
  return build(checkpoint.config), read_params(checkpoint, "float32")


def read(path: Path) -> Checkpoint:
  """7 i32 (E, F, L, H, K, V, longest context; V negative when untied), then f32 tensors."""
  raw = path.read_bytes()
  embed, ffn, layers, heads, kv_heads, vocab, max_tokens = struct.unpack("<7i", raw[:28])
  config = ModelConfig(
    family="llama",
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=embed // heads,
    embed_dim=embed,
    ffn_dim=ffn,
    vocab_size=abs(vocab),
    max_tokens=max_tokens,
    tied_embeddings=vocab > 0,
  )
  query, keyvalue = heads * config.head_dim, kv_heads * config.head_dim
  order: list[tuple[str, tuple[int, ...]]] = [
    ("embed", (config.vocab_size, embed)),
    ("attn_norm", (layers, embed)),
    ("q", (layers, query, embed)),
    ("k", (layers, keyvalue, embed)),
    ("v", (layers, keyvalue, embed)),
    ("o", (layers, embed, query)),
    ("mlp_norm", (layers, embed)),
    ("gate", (layers, ffn, embed)),
    ("down", (layers, embed, ffn)),
    ("up", (layers, ffn, embed)),
    ("norm", (embed,)),
    ("cos and sin, unused", (max_tokens, config.head_dim)),
  ]
  if not config.tied_embeddings:
    order.append(("head", (config.vocab_size, embed)))
  names, tensors = NAMES[config.family], {}
  offset = 28
  for name, shape in order:
    stacked = np.frombuffer(raw, "<f4", int(np.prod(shape)), offset).reshape(shape)
    offset += stacked.nbytes
    if name in ("embed", "norm", "head"):
      tensors[tensor_name(names, name)] = stacked
    elif shape[0] == layers:
      for i, one in enumerate(stacked):
        tensors[tensor_name(names, f"layers/{i}/{name}")] = _half_split(name, one, config)
  assert offset == len(raw), (offset, len(raw))
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  return Checkpoint(str(path), config, names, shapes, tensors.__getitem__)


def _half_split(name: str, matrix: np.ndarray, config: ModelConfig) -> np.ndarray:
  """Rows of q and k: the file rotates components 2i and 2i + 1, kvjax i and i + D/2."""
  if name not in ("q", "k"):
    return matrix
  heads = matrix.reshape(-1, config.head_dim, config.embed_dim)
  return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(matrix.shape)


class Words(NamedTuple):
  """SentencePiece BPE: pieces of bytes, and the score that a merge into each of them has."""

  pieces: list[bytes]
  scores: list[float]

  def encode(self, text: str) -> list[int]:
    """BOS, then a leading blank and the text, the best-scored merge first."""
    index = {piece: i for i, piece in enumerate(self.pieces)}
    ids: list[int] = []
    for character in f" {text}":
      raw = character.encode()
      ids += [index[raw]] if raw in index else [byte + 3 for byte in raw]
    while True:
      merges = [
        (self.scores[merged], -at, merged)
        for at, (left, right) in enumerate(itertools.pairwise(ids))
        if (merged := index.get(self.pieces[left] + self.pieces[right])) is not None
      ]
      if not merges:
        return [BOS, *ids]
      _, at, merged = max(merges)
      ids[-at : -at + 2] = [merged]

  def decode(self, ids: list[int]) -> str:
    parts = []
    for one in ids:
      piece = self.pieces[one]
      parts.append(bytes([one - 3]) if piece.startswith(b"<0x") else piece)
    return b"".join(part for part, one in zip(parts, ids, strict=True) if one != BOS).decode()


def read_words(path: Path, vocab_size: int) -> Words:
  """i32 longest piece, then for every id f32 score, i32 length, bytes."""
  raw = path.read_bytes()
  words = Words([], [])
  offset = 4
  for _ in range(vocab_size):
    score, length = struct.unpack_from("<fi", raw, offset)
    words.scores.append(score)
    words.pieces.append(raw[offset + 8 : offset + 8 + length])
    offset += 8 + length
  assert offset == len(raw), (offset, len(raw))
  return words
