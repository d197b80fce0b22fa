"""The pictures of `scripts.reproduce` can be read: each axis has numbers, whatever is on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.reproduce_opkv import drawing


@pytest.mark.parametrize(
  "ys", [[1.0, 1.018], [0.79, 0.84], [11.0, 13.0], [3.0, 14.0], [2.0, 19.0], [0.5, 900.0]]
)
def test_a_logarithmic_axis_has_numbers(monkeypatch, ys):
  drawn = []
  monkeypatch.setattr(drawing, "save", lambda figure, path: drawn.append(figure))
  panel = drawing.Panel("x", "y", {"a": ([20, 30], ys)}, log="y")
  drawing.draw([panel], "title", Path("unused.png"))
  (figure,) = drawn
  figure.draw_without_rendering()
  (axes,) = figure.axes
  low, high = axes.get_ylim()
  numbers = [
    tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high
  ]
  assert 2 <= len({*numbers} - {""}) == len(numbers) <= 12
