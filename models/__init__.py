"""Models: what is computed. They know neither policy nor store, and attend through one function."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from models.families import FAMILIES, PRESETS, build, param_shapes

if TYPE_CHECKING:
  from models.loading import Loaded, abstract, load
  from models.tokenizer import Tokenizer

__all__ = [
  "FAMILIES",
  "PRESETS",
  "Loaded",
  "Tokenizer",
  "abstract",
  "build",
  "load",
  "param_shapes",
]

# Readers of files need packages that shapes and random weights do not, as on a machine that is only
# there to time kernels.
_LATER = {"Tokenizer": "models.tokenizer"} | dict.fromkeys(
  ("Loaded", "abstract", "load"), "models.loading"
)


def __getattr__(name: str) -> Any:
  if name not in _LATER:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(_LATER[name]), name)
