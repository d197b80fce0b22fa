"""Qwen2 and Qwen2.5: Llama's layers with biases on queries, keys and values.

The presets are the Instruct models; base models of 7B and more state a longer context (131,072) and
two of them another epsilon.
"""

from __future__ import annotations

from functools import partial

from kvjax.config import ModelConfig
from kvjax.types import Model
from models import decoder

_shape = partial(
  ModelConfig, family="qwen2", max_tokens=32_768, rope_theta=1_000_000.0, norm_eps=1e-6
)
_small = partial(_shape, num_kv_heads=2, vocab_size=151_936, tied_embeddings=True)
_large = partial(_shape, head_dim=128, vocab_size=152_064)

PRESETS: dict[str, ModelConfig] = {
  "qwen2.5-0.5b": _small(num_layers=24, num_heads=14, head_dim=64, embed_dim=896, ffn_dim=4864),
  "qwen2.5-1.5b": _small(num_layers=28, num_heads=12, head_dim=128, embed_dim=1536, ffn_dim=8960),
  "qwen2.5-3b": _small(num_layers=36, num_heads=16, head_dim=128, embed_dim=2048, ffn_dim=11_008),
  "qwen2.5-7b": _large(num_layers=28, num_heads=28, num_kv_heads=4, embed_dim=3584, ffn_dim=18_944),
  "qwen2.5-14b": _large(
    num_layers=48, num_heads=40, num_kv_heads=8, embed_dim=5120, ffn_dim=13_824
  ),
  "qwen2.5-32b": _large(
    num_layers=64, num_heads=40, num_kv_heads=8, embed_dim=5120, ffn_dim=27_648
  ),
}


def build(config: ModelConfig) -> Model:
  """The Qwen2 of this shape; its parameters are those of `models.decoder`, with biases."""
  return decoder.build(config, qkv_bias=True)
