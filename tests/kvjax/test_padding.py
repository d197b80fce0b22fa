"""Padding on either side leaves the rows as they are."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax import generate, unpad
from tests.kvjax import matrix

ROWS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def _padded(sides):
  tokens, mask = np.full((3, 6), 99), np.zeros((3, 6), int)
  for i, (row, left) in enumerate(zip(ROWS, sides, strict=True)):
    tokens[i, left : left + len(row)] = row
    mask[i, left : left + len(row)] = 1
  return tokens, mask


@pytest.mark.parametrize("sides", [(0, 0, 0), (3, 5, 2), (1, 0, 2), (2, 2, 1)])
def test_padding_on_either_side(sides):
  assert unpad(*_padded(sides)) == ROWS


def test_generation_does_not_see_padding():
  entry = next(e for e in matrix.entries() if e.policy == "dense")
  runner = matrix.runner_of(entry, matrix.SHAPES[0], batch=3)
  params = matrix.model_of(entry, matrix.SHAPES[0])[1]
  said = [
    generate(runner, params, unpad(*_padded(sides)), max_new_tokens=4).tokens
    for sides in ((0, 0, 0), (3, 5, 2))
  ]
  assert said[0] == said[1]


@pytest.mark.parametrize(
  ("tokens", "mask", "words"),
  [
    ([[1, 2]], [[0, 0]], "row 0 is all padding"),
    ([[1, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 0, 1]], "row 1 has padding between"),
    ([[1, 2]], [[1]], r"tokens \(1, 2\) and mask \(1, 1\)"),
    ([1, 2], [1, 1], r"expected the same \[B, S\]"),
  ],
)
def test_bad_padding(tokens, mask, words):
  with pytest.raises(ValueError, match=words):
    unpad(tokens, mask)
