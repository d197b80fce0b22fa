"""The picture is a PNG file; what it looks like is for people to judge."""

from __future__ import annotations

from eval import plots


def test_accuracy_against_speed(tmp_path):
  rows = [
    {"policy": "dense", "budget_tokens": None, "decode_tokens_per_s": 20.0, "score": 1.0},
    {"policy": "quest", "budget_tokens": 1024, "decode_tokens_per_s": 30.0, "score": 0.0},
    {"policy": "quest", "budget_tokens": 2048, "decode_tokens_per_s": 29.0, "score": 0.0},
  ]
  path = tmp_path / "a.png"
  plots.accuracy_against_speed(rows, "title", path)
  assert path.read_bytes().startswith(b"\x89PNG")
  assert [one.name for one in tmp_path.iterdir()] == ["a.png"]
  assert [plots.label(row) for row in rows] == ["dense", "quest@1024", "quest@2048"]
  assert plots._label_places(rows) == [14, 14, -14]
