"""The model families: which module defines which, and all presets by name."""

from __future__ import annotations

from types import MappingProxyType

import jax

from kvjax.config import ModelConfig
from kvjax.types import Model, Params
from models import llama, mistral, opt, qwen2, yi

_FAMILIES = {"llama": llama, "mistral": mistral, "yi": yi, "qwen2": qwen2, "opt": opt}
FAMILIES = tuple(_FAMILIES)
PRESETS = MappingProxyType(
  {name: config for family in _FAMILIES.values() for name, config in family.PRESETS.items()}
)


def build(config: ModelConfig) -> Model:
  """The model of this shape.

  Raises:
    ValueError: an unknown family.
  """
  if config.family not in _FAMILIES:
    raise ValueError(
      f"unknown model family {config.family!r}, expected one of {', '.join(FAMILIES)}"
    )
  return _FAMILIES[config.family].build(config)


def param_shapes(config: ModelConfig, dtype: str = "float32") -> Params:
  """The parameter tree of this shape as `jax.ShapeDtypeStruct`s; allocates nothing."""
  return jax.eval_shape(lambda: build(config).init(jax.random.key(0), dtype))
