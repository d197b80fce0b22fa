"""The picture is a PNG file; what it looks like is for people to judge."""

from __future__ import annotations

import pytest

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
  assert plots._label_places(rows, [20.0, 30.0, 29.0]) == [14, 14, -14]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_labels_stay_inside_the_axes(tmp_path, monkeypatch, count):
  drawn = []
  monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
  rows = [
    {"policy": "quest", "budget_tokens": 16 * n, "decode_tokens_per_s": 20.0, "score": score}
    for n in range(count)
    for score in ([1.0] if count == 7 else [1.0, 0.0])
  ]
  plots.accuracy_against_speed(rows, "title\ndevice", tmp_path / "a.png")
  (figure,) = drawn
  figure.draw_without_rendering()
  (axes,) = figure.axes
  assert len(axes.texts) == len(rows)
  for text in axes.texts:
    box, frame = text.get_window_extent(), axes.get_window_extent()
    assert frame.y0 < box.y0 and box.y1 < frame.y1, text.get_text()


@pytest.mark.parametrize("count", [7, 8, 40])
def test_any_number_of_points_at_one_place(tmp_path, count):
  rows = [
    {"policy": "quest", "budget_tokens": 16 * n, "device_kv_bytes": 3e8, "metadata_bytes": 0}
    for n in range(count)
  ]
  path = tmp_path / "a.png"
  plots.accuracy_against_bytes([row | {"score": 0.5} for row in rows], "title", path)
  assert path.read_bytes().startswith(b"\x89PNG")


def test_deltas(tmp_path):
  rows = [
    {"policy": policy, "budget_tokens": 64, "store": "resident", "task": task}
    | {"score": 0.5, "dense_score": 1.0}
    for policy in ("dense", "quest", "h2o")
    for task in ("niah_single", "pointer_chain")
  ]
  path = tmp_path / "a.png"
  plots.deltas(rows[:-1], "title", path)  # one was never measured
  assert path.read_bytes().startswith(b"\x89PNG")


def test_latencies_with_and_without_samples(tmp_path):
  spreads = [
    plots.Spread("dense", [0.01, 0.02, 3.0], [0.02, 2.4, 2.9]),
    plots.Spread("$quest@64", [], [0.01, None, None]),
  ]
  plots.latencies({"TTFT": spreads, "TPOT": spreads}, "title", tmp_path / "a.png")
  plots.latencies({"TPOT": spreads[1:]}, "title", tmp_path / "b.png")
  for path in tmp_path.iterdir():
    assert path.read_bytes().startswith(b"\x89PNG")


def test_head_maps(tmp_path):
  maps = {f"p@{n}": [[None, 0.5], [0.1 * n, 1.0]] for n in range(4)}
  plots.head_maps("$kept_ratio", maps, (0.0, 1.0), "title", tmp_path / "a.png")
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_characters_that_the_font_lacks_are_no_warning(tmp_path, recwarn):
  row = {"policy": "策略", "budget_tokens": 64, "task": "漢字", "score": 0.5, "dense_score": 1.0}
  plots.deltas([row], "模型", tmp_path / "a.png")
  assert not recwarn.list and (tmp_path / "a.png").exists()


def test_long_labels_are_wrapped_and_files_keep_their_name():
  label = "omnikv:profile=some/where/model-filter_layers.npz:first=2@2048"
  lines = plots.wrapped(label).splitlines()
  assert "".join(lines) == "omnikv:profile=model-filter_layers.npz:first=2@2048"
  assert max(map(len, lines)) <= 30 and len(lines) == 2
  assert plots.wrapped("my/dir/mine.py") == "mine.py"
  assert plots.wrapped("quest, mean/int8*4@64") == "quest, mean/int8*4@64"
  assert plots.wrapped("x" * 40).split("\n") == ["x" * 29, "x" * 11]
  assert plots.wrapped("$a") == r"\$a"
