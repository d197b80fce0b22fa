"""kvjax: KV-cache management for long-context inference in JAX."""

from kvjax.cache import CacheBytes, KVCache, cache_bytes
from kvjax.config import CacheConfig, ModelConfig
from kvjax.engine import (
  STORES,
  Generation,
  Runner,
  Sampling,
  decode_step,
  generate,
  make_mesh,
  param_shardings,
  prepare,
  selected_pages,
  unpad,
)
from kvjax.policies import POLICIES, make_policy

__version__ = "0.1.0"

__all__ = [
  "POLICIES",
  "STORES",
  "CacheBytes",
  "CacheConfig",
  "Generation",
  "KVCache",
  "ModelConfig",
  "Runner",
  "Sampling",
  "cache_bytes",
  "decode_step",
  "generate",
  "make_mesh",
  "make_policy",
  "param_shardings",
  "prepare",
  "selected_pages",
  "unpad",
]
