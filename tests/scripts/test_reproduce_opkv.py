"""Every figure of OPKV on the small model; its counts against plain numpy and a run of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from eval import replay
from eval.results import append_row, read_rows
from eval.tables import table
from kvjax import CacheConfig
from models import load
from scripts.profile_policy import passage
from scripts.reproduce_opkv import (
  demotion,
  eviction,
  io_amplification,
  reuse,
  sensitivity,
  spread,
)
from scripts.reproduce_opkv.case import Case
from scripts.reproduce_opkv.driving import drive
from scripts.reproduce_opkv.following import follow
from scripts.reproduce_opkv.starting import ITEMS, STORES
from scripts.reproduce_opkv.timing import WARM_UP
from scripts.reproducing import SMALL_MODEL
from tests import commands

ROOT = Path(__file__).resolve().parents[2]
ALICE = ROOT / "tests" / "data" / "alice_opening.txt"
PROMPT, STEPS, PAGE = 200, 6, 16
COUNTED = [name for name, item in ITEMS.items() if not item.timed]


@pytest.fixture(scope="module")
def case():
  loaded = load(str(SMALL_MODEL))
  tokens = passage(loaded, ALICE.read_text(encoding="utf-8"), PROMPT + STEPS, seed=0)
  recorder = replay.recorder(loaded.model, CacheConfig(1, PROMPT + STEPS, PAGE))
  recording = replay.record(recorder, loaded.params, [tokens[:PROMPT]])
  return Case(loaded, recording, tuple(tokens[PROMPT:]), ("infinigen",), STORES, 25, PAGE, (1, 2))


@pytest.fixture(scope="module")
def followed(case):
  return follow(case, "infinigen")


@pytest.fixture(scope="module")
def driven(followed):
  """`drive`, which runs each store once."""
  stores = cache(lambda store, page_size: drive(followed, store, page_size))
  return lambda _, store, page_size: stores(store, page_size)


@pytest.mark.parametrize("name", COUNTED)
def test_an_item_that_counts(name, case, followed, driven, monkeypatch, tmp_path):
  module = sys.modules[f"scripts.reproduce_opkv.{name}"]
  monkeypatch.setattr(module, "follow", lambda *args: followed)
  monkeypatch.setattr(module, "drive", driven, raising=False)
  monkeypatch.setattr(sensitivity, "RHOS", (0.4,))
  monkeypatch.setattr(sensitivity, "BLOCK_SIZES", (8, 16))
  monkeypatch.setattr(sensitivity, "BUDGETS", (25,))
  monkeypatch.setattr(eviction, "SLACKS", (1.0,))
  monkeypatch.setattr(demotion, "PARTITIONS", (None,))
  item = ITEMS[name]
  rows = list(item.run(case))
  for row in rows:
    append_row(tmp_path, row)
  rows = read_rows(tmp_path)
  assert all(
    row[column] is not None for row in rows for column in item.columns if "8" not in column
  )
  assert table(rows, item.columns).count("\n") == len(rows) + 1
  item.plot(rows, "a $title", tmp_path / "plot.png")
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
  assert item.compare(rows)


def test_what_whole_pages_move(followed, driven):
  selected = followed.selected
  steps, rows, heads, _ = selected.shape
  pages = selected.reshape(steps, rows, heads, -1, PAGE).any(axis=-1)
  counts = driven(followed, "whole_page", PAGE)
  np.testing.assert_array_equal(counts["selected"], selected.sum(axis=(2, 3)))
  np.testing.assert_array_equal(counts["moved"], pages.sum(axis=(2, 3)) * PAGE)
  there = -(-(PROMPT + 1 + np.arange(steps)) // PAGE) * PAGE * heads
  moved = driven(followed, "prefetch_all", PAGE)["moved"]
  np.testing.assert_array_equal(moved, np.repeat(there[:, None], rows, axis=1))


def test_what_op_blocks_move(followed, driven):
  selected = followed.selected
  position, newest = np.arange(selected.shape[-1]), (PROMPT + np.arange(STEPS)) // PAGE * PAGE
  older = selected & (position < newest[:, None])[:, None, None]
  counts = driven(followed, "op_block:reuse=False", PAGE)
  np.testing.assert_array_equal(counts["moved"], older.sum(axis=(2, 3)))
  refilled = driven(followed, "op_block:filling=refill", PAGE)
  new = older[1:] & ~older[:-1]  # the pool has room for more than one step's
  assert (refilled["moved"][1:] <= new.sum(axis=(2, 3))).all()
  assert refilled["moved"].sum() < driven(followed, "op_block", PAGE)["moved"].sum()


def test_throughput_moves_in_every_row_what_a_driven_store_moves(case, followed, driven, tmp_path):
  item, blocks = ITEMS["throughput"], "op_block:strict=True"
  rows = list(item.run(case._replace(stores=("whole_page", blocks), batch_sizes=(2,))))
  pairs = [(row["policy"], row["store"]) for row in rows]
  stores = ("resident", "whole_page", blocks)
  assert pairs == [("dense", "resident"), *(("infinigen", store) for store in stores)]
  token = 2 * case.loaded.model.config.head_dim * 4
  for row in rows:
    expected = None
    if row["store"] != "resident":
      moved = driven(followed, row["store"], PAGE)["moved"][WARM_UP:].sum()
      expected = row["batch_size"] * moved * token / (STEPS - WARM_UP)
    assert row["recall_bytes_per_step"] == expected
    assert (row["recall_stall_s_p50"] is None) == (expected is None)
    assert row["output_tokens"] == STEPS - WARM_UP and row["decode_tokens_per_s"] > 0
  assert {row["agreement_ratio"] for row in rows if row["policy"] == "dense"} == {1.0}
  rows = [row | {"store": row["store"].partition(":")[0]} for row in rows]
  item.plot(rows, "title", tmp_path / "plot.png")
  assert "at 2" in item.compare(rows)[0].ours


def test_reuse_by_hand():
  selected = np.zeros((4, 1, 8), bool)
  for step, tokens in enumerate(([0, 1], [1, 2], [0, 3], [2, 3])):
    selected[step, 0, tokens] = True
  np.testing.assert_array_equal(reuse.reused(selected, 1), [[2, 1], [2, 0], [2, 1]])
  np.testing.assert_array_equal(reuse.reused(selected, 2), [[2, 1], [2, 2]])
  assert reuse.reused(selected, 8).shape == (0, 2)


def test_demotion_by_hand():
  """Pages of 4, so that a block comes back where 3 of its tokens are missing."""
  first = np.array([[0, 1, 2, 3, 4], [1, 1, 2, 3, 4], [0, 3, 4, 5, 6]])  # list, then tokens
  missing = np.array([[0, 1, 2, 3, 5], [0, 6, 7, -1, -1]])
  # The first block has 1, 2, 3; the third 3, 5, 6, of which 3 is taken. The second is another list.
  taken, covered = demotion.came_back(first, missing, 3)
  assert taken.tolist() == [True, False, False] and covered == 3
  none = np.zeros((0, 5), int)
  found = [demotion.Change(0, none, first[[0, 2, 1]], 4), demotion.Change(0, missing, none, 4)]
  row = demotion.count(found, 4, None)
  assert row["demoted_per_step"] == 1.5 and row["back_per_step"] == 0.5
  assert row["copies_ratio"] == (6 - 3 + 1) / 6
  assert row["recalled_ratio"] == (6 - 3 + 4) / 6
  assert row["moved_ratio"] == (6 - 3 + 4 + 3 * 4) / 6
  assert demotion.count(found, 4, 0.25)["back_per_step"] == 0  # the newest only
  other = found[1]._replace(row=1)
  assert demotion.count([found[0], other], 4, None)["back_per_step"] == 0  # of another layer


def test_what_is_strewn_at_random():
  assert io_amplification.by_whole_pages(0.25, 16) == pytest.approx(3.9599, abs=1e-4)
  np.testing.assert_allclose(spread.strewn(0.5, 2), [2 / 3, 1 / 3])
  tokens = np.arange(1, 17)
  per_page = spread.strewn(0.25, 16) @ tokens
  assert per_page == pytest.approx(16 / io_amplification.by_whole_pages(0.25, 16))


def test_pages_are_counted_by_their_tokens(followed):
  selected = np.zeros_like(followed.selected[:1, :1, :1])
  selected[..., [0, 1, 20, PROMPT]] = True  # the last one is on a page that is not whole
  counts = spread.pages_by_count(followed._replace(selected=selected), PAGE)
  assert counts.tolist() == [PROMPT // PAGE - 2, 1, 1] + [0] * 14


def test_what_is_refused(case, followed):
  with pytest.raises(ValueError, match="'resident' has no host tier; take whole_page"):
    drive(followed, "resident", PAGE)
  lists = followed.policy._replace(stores=("resident", "whole_page"))  # of query heads
  apart = followed._replace(runner=followed.runner._replace(policy=lists))
  with pytest.raises(ValueError, match="cannot run on store 'op_block'; it runs on resident"):
    drive(apart, "op_block", PAGE)
  with pytest.raises(ValueError, match="'dense' selects in no layer of small-llama"):
    follow(case, "dense")


COMMAND = ("scripts.reproduce", "--paper=opkv", "--out_dir=out", f"--text_file={ALICE}", "--small")


def _run(*arguments, folder):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-m", *COMMAND, *arguments]
  return subprocess.run(
    command, capture_output=True, text=True, check=False, cwd=folder, env=environment
  )


def test_the_command(tmp_path):
  arguments = "--item=spread", "--policies=infinigen", f"--prompt_tokens={PROMPT}"
  done = _run(*arguments, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  assert f"{PROMPT} tokens are read, then 10 more one by one" in done.stdout
  assert "layers  infinigen: 2 of 4 layers select" in done.stdout
  assert "\nFig. 4a: " in done.stdout and done.stdout.endswith("written to out\n")
  files = {path.name for path in (tmp_path / "out").iterdir()}
  assert files == {"results.jsonl", "manifest.json", "comparison.json", "spread.png"}
  [compared] = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
  assert compared["figure"] == "Fig. 4a"
  again = commands.run(*COMMAND, *arguments, folder=tmp_path)
  assert again.returncode == 2 and "already holds results.jsonl" in again.stderr


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["--item=fig9"], "--paper=opkv has no --item=fig9; expected one of io_amplification, reuse"),
    (["--item=reuse", "--policies=best"], "unknown policy 'best'"),
    (["--item=throughput", "--stores=op_block,resident"], "'resident' has no host tier"),
    (["--item=ablation", "--prompt_tokens=900000"], "exceed the context of 4096"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, expected):
  done = commands.run(*COMMAND, *arguments, folder=tmp_path)
  assert done.returncode == 2
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert expected in line
  assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
