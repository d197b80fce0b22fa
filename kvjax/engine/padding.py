"""From padded batches, as tokenizers of other libraries make them, to the ragged rows of kvjax."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike


def unpad(tokens: ArrayLike, mask: ArrayLike) -> list[list[int]]:
  """Rows without their padding, for `generate`, which counts positions from each row's own start.

  Args:
    tokens: i32[B, S], padded on the left, on the right, or on both sides.
    mask: bool or i32[B, S], nonzero where a token counts.

  Returns:
    B rows of ids.

  Raises:
    ValueError: shapes differ, a row is all padding, or a row has padding between its tokens.
  """
  ids, valid = np.asarray(tokens), np.asarray(mask).astype(bool)
  if ids.ndim != 2 or ids.shape != valid.shape:
    raise ValueError(f"tokens {ids.shape} and mask {valid.shape}: expected the same [B, S]")
  for row, kept in enumerate(valid):
    places = np.flatnonzero(kept)
    if not len(places):
      raise ValueError(f"row {row} is all padding; give at least one token")
    if places[-1] - places[0] + 1 != len(places):
      raise ValueError(f"row {row} has padding between its tokens; put all of it at the ends")
  return [row[kept].tolist() for row, kept in zip(ids, valid, strict=True)]
