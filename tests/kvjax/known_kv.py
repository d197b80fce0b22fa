"""Keys and values that can be told from their tokens; no jax, as killed processes use this too."""

from __future__ import annotations

import numpy as np

from kvjax.bidaw.objects import Stamp

STAMP = Stamp("model", "tokenizer", "rotary", "bfloat16", (2, 2, 8))


def tokens_of(user: int, length: int) -> np.ndarray:
  """i32[length]; those of a user begin alike whatever their length."""
  return (np.arange(length, dtype=np.int32) * 7 + user * 101) % 251


def kv_of(tokens: np.ndarray, start: int = 0, stamp: Stamp = STAMP) -> np.ndarray:
  """f[n - start, L, 2, K, D]: each number hangs on token, position and place; exact in bfloat16."""
  position = np.arange(len(tokens))
  each = (tokens * 3 + position * 5)[start:, None] + np.arange(np.prod(stamp.token_shape))
  kv = each.reshape(-1, *stamp.token_shape) % 256
  return kv.astype(stamp.numpy_dtype)
