"""Yi: Llama's shape, published as Llama, with sizes of its own."""

from __future__ import annotations

from functools import partial

from kvjax.config import ModelConfig
from kvjax.types import Model
from models import decoder

_shape = partial(ModelConfig, family="yi", head_dim=128, vocab_size=64_000)
_6b = partial(_shape, num_layers=32, num_heads=32, num_kv_heads=4, embed_dim=4096, ffn_dim=11_008)
_9b = partial(
  _shape,
  num_layers=48,
  num_heads=32,
  num_kv_heads=4,
  embed_dim=4096,
  ffn_dim=11_008,
  norm_eps=1e-6,
)
_34b = partial(_shape, num_layers=60, num_heads=56, num_kv_heads=8, embed_dim=7168, ffn_dim=20_480)

PRESETS: dict[str, ModelConfig] = {
  "yi-6b": _6b(max_tokens=4096, rope_theta=5_000_000.0),
  "yi-6b-200k": _6b(max_tokens=200_000, rope_theta=10_000_000.0),
  "yi-9b": _9b(max_tokens=4096),
  "yi-9b-200k": _9b(max_tokens=262_144, rope_theta=10_000_000.0),
  "yi-34b": _34b(max_tokens=4096, rope_theta=5_000_000.0),
}


def build(config: ModelConfig) -> Model:
  """The Yi of this shape; its parameters are those of `models.decoder`."""
  return decoder.build(config)
