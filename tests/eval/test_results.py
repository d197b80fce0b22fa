"""Rows, run folders and tables."""

from __future__ import annotations

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

from eval import results, resume, tables


def test_rows_have_all_fields_in_order_and_plain_numbers():
  row = results.make_row(score=np.float32(0.5), num_examples=jnp.int32(4), policy="dense")
  assert tuple(row) == results.ROW_FIELDS
  assert row["score"] == 0.5 and type(row["score"]) is float
  assert row["num_examples"] == 4 and type(row["num_examples"]) is int
  assert row["store"] is None


def test_bad_rows():
  with pytest.raises(ValueError, match="unknown fields speed"):
    results.make_row(speed=1.0)
  with pytest.raises(ValueError, match="score is nan"):
    results.make_row(score=float("nan"))


def test_percentiles():
  found = results.percentiles("tpot_s", list(range(101)))
  assert found == {"tpot_s_p50": 50.0, "tpot_s_p90": 90.0, "tpot_s_p99": 99.0}
  assert set(found) < set(results.ROW_FIELDS)


def test_byte_fields():
  size = types.SimpleNamespace
  runner = size(
    decode_bytes=size(keys_values=10, tables=2, metadata=3, host=60),
    prefill_bytes=size(keys_values=70, tables=4, metadata=5, host=60),
  )
  assert results.byte_fields(runner) == {
    "device_kv_bytes": 10,
    "peak_kv_bytes": 70,
    "host_kv_bytes": 60,
    "metadata_bytes": 5,
  }


def test_a_run_folder(tmp_path):
  out_dir = tmp_path / "a" / "b"
  results.start_run(out_dir, {"flags": {"seed": 1}})
  assert sorted(path.name for path in out_dir.iterdir()) == ["manifest.json"]
  assert json.loads((out_dir / "manifest.json").read_text()) == {"flags": {"seed": 1}}
  for policy in ("dense", "quest"):
    results.append_row(out_dir, results.make_row(policy=policy))
  lines = (out_dir / "results.jsonl").read_text().splitlines()
  assert [json.loads(line)["policy"] for line in lines] == ["dense", "quest"]


def test_a_row_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
  results.append_row(tmp_path, {"a": 1})

  def full(descriptor):
    raise OSError("disk full")

  with monkeypatch.context() as patch:
    patch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
      results.append_row(tmp_path, {"a": 2})
  results.append_row(tmp_path, {"a": 3})
  assert (tmp_path / "results.jsonl").read_text() == '{"a": 1}\n{"a": 3}\n'


RUN_FILES = ["results.jsonl", "manifest.json", "predictions.jsonl", "predictions-1.jsonl"]
RUN_FILES += ["measured.jsonl"]


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_is_never_overwritten(tmp_path, name):
  (tmp_path / name).write_text("old")
  with pytest.raises(ValueError, match=f"already holds {name}; choose another --out_dir"):
    results.start_run(tmp_path, {})
  assert [path.name for path in tmp_path.iterdir()] == [name]
  assert (tmp_path / name).read_text() == "old"


def test_a_file_is_no_run_folder(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match="is a file; choose another --out_dir"):
    results.start_run(tmp_path / "file", {})


def test_a_folder_that_cannot_be_made_is_refused_early(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match=r"sub cannot be made: .*file is not a folder; choose"):
    results.check_new_run(tmp_path / "file" / "sub")


def test_a_run_without_a_row_leaves_nothing(tmp_path):
  out_dir = tmp_path / "a" / "b"
  with pytest.raises(KeyboardInterrupt), results.run_folder(out_dir, {}):
    raise KeyboardInterrupt
  assert list(tmp_path.iterdir()) == []
  with pytest.raises(KeyboardInterrupt), results.run_folder(out_dir, {}):
    results.append_row(out_dir, {"a": 1})
    raise KeyboardInterrupt
  assert sorted(path.name for path in out_dir.iterdir()) == ["manifest.json", "results.jsonl"]


def test_a_run_with_a_prediction_stays(tmp_path):
  out_dir = tmp_path / "a"
  with pytest.raises(KeyboardInterrupt), results.run_folder(out_dir, {}):
    results.append_lines(out_dir / "predictions-1.jsonl", [{"a": 1}])
    raise KeyboardInterrupt
  assert sorted(path.name for path in out_dir.iterdir()) == ["manifest.json", "predictions-1.jsonl"]


def test_rows_are_replaced_whole_and_read(tmp_path):
  assert results.read_rows(tmp_path) == []
  rows = [results.make_row(policy=policy) | {"more": 1} for policy in ("dense", "quest")]
  results.write_rows(tmp_path, rows[:1])
  results.write_rows(tmp_path, rows)
  assert results.read_rows(tmp_path) == rows
  for line in ("{", "[]", "[" * 100_000, '{"policy": "dense"}'):
    (tmp_path / "results.jsonl").write_text(json.dumps(rows[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2: expected a row"):
      results.read_rows(tmp_path)


DAMAGED = ["", "{", "[1]", "[]", "null", '""', "0", "[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_manifest_is_no_earlier_run(tmp_path, content):
  (tmp_path / "manifest.json").write_text(content)
  with pytest.raises(ValueError, match=r"manifest\.json is no manifest .*choose another --out_dir"):
    resume.earlier_run(tmp_path, {})


def test_an_empty_manifest_is_another_run(tmp_path):
  (tmp_path / "manifest.json").write_text("{}")
  with pytest.raises(ValueError, match=r"another run: --flags was None there and is \{\} now"):
    resume.earlier_run(tmp_path, {})


def test_writing_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / "x"
  path.write_text("old")

  def full(*names):
    raise OSError("disk full")

  monkeypatch.setattr("os.replace", full)
  with pytest.raises(OSError, match="disk full") as caught:
    results.write_atomically(path, "new")
  assert caught.value.filename == str(path)
  assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("x", "old")]


def test_manifest():
  loaded = types.SimpleNamespace(name="tiny", content_hash="cd")
  manifest = results.make_manifest({"seed": 3}, loaded, {"book": "ab"})
  assert manifest["model"] == {"name": "tiny", "sha256": "cd"}
  assert manifest["flags"] == {"seed": 3} and manifest["data"] == {"book": "ab"}
  assert {"python", "jax", "jaxlib", "numpy"} == set(manifest["versions"])
  assert manifest["cores"] >= 1 and manifest["cpu"] and manifest["backend"] == "cpu"
  json.dumps(manifest)


def test_a_table_is_aligned_and_has_units():
  rows = [
    {"policy": "dense", "ttft_s_p50": 27.12, "tpot_s_p50": 0.0512, "device_kv_bytes": 165_888_000},
    {"policy": "quest", "budget_tokens": 1024, "decode_tokens_per_s": 29.44},
  ]
  columns = ("policy", "budget_tokens", "ttft_s_p50", "tpot_s_p50", "device_kv_bytes")
  lines = tables.table(rows, (*columns, "decode_tokens_per_s")).splitlines()
  assert lines == [
    "policy  budget    TTFT  TPOT p50  KV on device      decode",
    "------  ------  ------  --------  ------------  ----------",
    "dense        -  27.1 s   51.2 ms      165.9 MB           -",
    "quest    1,024       -         -             -  29.4 tok/s",
  ]


@pytest.mark.parametrize(
  ("name", "value", "text"),
  [
    ("metadata_bytes", 1500, "1.5 kB"),
    ("host_kv_bytes", 0, "0 B"),
    ("device_kv_bytes", 18_250_000_000, "18.2 GB"),
    ("recall_bytes_per_step", 2_000_000, "2.0 MB"),
    ("speedup_vs_dense", 1.4, "1.40x"),
    ("page_hit_ratio", 0.955, "0.95"),
    ("prefill_tokens_per_s", 1234.5, "1,234.5 tok/s"),
    ("compile_s", 0.5, "500.0 ms"),
    ("score", 0.25, "0.25"),
    ("simulated", False, "False"),
    ("prompt_tokens", 6900, "6,900"),
  ],
)
def test_human_units(name, value, text):
  assert tables.human(name, value) == text
