"""The model families: which module defines which, and all presets by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

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


def by_path(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their places in it."""
  return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def path_of(keys: tuple[Any, ...]) -> str:
  """The keys of a leaf as one string, such as "layers/3/q"."""
  return jax.tree_util.keystr(keys, simple=True, separator="/")
