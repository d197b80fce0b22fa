"""Llama 2, 3.1 and 3.2, and what has their shape: SmolLM2, stories260K."""

from __future__ import annotations

from functools import partial

from kvjax.config import ModelConfig, RopeScaling
from kvjax.types import Model
from models import decoder

_shape = partial(ModelConfig, family="llama")
_llama2 = partial(_shape, head_dim=128, vocab_size=32_000, max_tokens=4096)
_llama3 = partial(
  _shape,
  num_kv_heads=8,
  vocab_size=128_256,
  max_tokens=131_072,
  rope_theta=500_000.0,
)


def _stretched(factor: float) -> RopeScaling:
  return RopeScaling("llama3", factor, original_tokens=8192)


PRESETS: dict[str, ModelConfig] = {
  "llama-2-7b": _llama2(
    num_layers=32, num_heads=32, num_kv_heads=32, embed_dim=4096, ffn_dim=11_008
  ),
  "llama-2-13b": _llama2(
    num_layers=40, num_heads=40, num_kv_heads=40, embed_dim=5120, ffn_dim=13_824
  ),
  "llama-2-70b": _llama2(
    num_layers=80, num_heads=64, num_kv_heads=8, embed_dim=8192, ffn_dim=28_672
  ),
  "llama-3.1-8b": _llama3(
    num_layers=32,
    num_heads=32,
    head_dim=128,
    embed_dim=4096,
    ffn_dim=14_336,
    rope_scaling=_stretched(8.0),
  ),
  "llama-3.1-70b": _llama3(
    num_layers=80,
    num_heads=64,
    head_dim=128,
    embed_dim=8192,
    ffn_dim=28_672,
    rope_scaling=_stretched(8.0),
  ),
  "llama-3.2-1b": _llama3(
    num_layers=16,
    num_heads=32,
    head_dim=64,
    embed_dim=2048,
    ffn_dim=8192,
    rope_scaling=_stretched(32.0),
    tied_embeddings=True,
  ),
  "llama-3.2-3b": _llama3(
    num_layers=28,
    num_heads=24,
    head_dim=128,
    embed_dim=3072,
    ffn_dim=8192,
    rope_scaling=_stretched(32.0),
    tied_embeddings=True,
  ),
  "smollm2-135m": _shape(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    embed_dim=576,
    ffn_dim=1536,
    vocab_size=49_152,
    max_tokens=8192,
    rope_theta=100_000.0,
    tied_embeddings=True,
  ),
  "stories260k": _shape(
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    embed_dim=64,
    ffn_dim=172,
    vocab_size=512,
    max_tokens=512,
    tied_embeddings=True,
  ),
}


def build(config: ModelConfig) -> Model:
  """The Llama of this shape; its parameters are those of `models.decoder`."""
  return decoder.build(config)
