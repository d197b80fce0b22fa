"""Mistral: Llama's layers; the first 7B sees only a sliding window, later ones see everything."""

from __future__ import annotations

from functools import partial

from kvjax.config import ModelConfig
from kvjax.types import Model
from models import decoder

_shape = partial(
  ModelConfig, family="mistral", num_heads=32, num_kv_heads=8, head_dim=128, max_tokens=32_768
)
_7b = partial(_shape, num_layers=32, embed_dim=4096, ffn_dim=14_336)

PRESETS: dict[str, ModelConfig] = {
  "mistral-7b-v0.1": _7b(vocab_size=32_000, window_tokens=4096),
  "mistral-7b-v0.2": _7b(vocab_size=32_000, rope_theta=1_000_000.0),
  "mistral-7b-v0.3": _7b(vocab_size=32_768, rope_theta=1_000_000.0),
  "mistral-small-24b": _shape(
    num_layers=40,
    embed_dim=5120,
    ffn_dim=32_768,
    vocab_size=131_072,
    rope_theta=100_000_000.0,
  ),
}


def build(config: ModelConfig) -> Model:
  """The Mistral of this shape; its parameters are those of `models.decoder`."""
  return decoder.build(config)
