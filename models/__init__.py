"""Models: what is computed. They know neither policy nor store, and attend through one function."""

from __future__ import annotations

from models.families import FAMILIES, PRESETS, build, param_shapes
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
