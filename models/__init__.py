"""Models: what is computed. They know neither policy nor store, and attend through one function."""

from __future__ import annotations

from models.llama import PRESETS
from models.loading import Loaded, load
from models.tokenizer import Tokenizer

__all__ = ["PRESETS", "Loaded", "Tokenizer", "load"]
