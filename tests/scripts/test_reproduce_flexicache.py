"""FlexiCache's counted figures: by hand on made-up traces, and the command on the small model."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eval.results import append_row, make_row, read_rows
from eval.tables import table
from kvjax.config import ModelConfig
from kvjax.profiling import load_heads
from kvjax.sim import machine
from models import load
from scripts import page_traces
from scripts.page_traces import Trace
from scripts.reproduce_flexicache import importance, memory, promoted, replay, rerank
from scripts.reproduce_flexicache.case import Case, Serving
from scripts.reproduce_flexicache.starting import ITEMS, SHAPE_ONLY, kept_traces
from scripts.reproducing import SMALL_MODEL
from tests import commands

ROOT = Path(__file__).resolve().parents[2]
ALICE = ROOT / "tests" / "data" / "alice_opening.txt"
LAYERS, K, PAGES, STEPS, PROMPT = 4, 2, 6, 20, 640
CONFIG = ModelConfig("llama", LAYERS, 4, K, 16, 64, 64, 100, 8192)


def _trace(name, seed):
  """Head (l, h) keeps its pages the longer the higher l * K + h is; the last page is forced."""
  rng = np.random.default_rng(seed)
  lengths = PROMPT + 1 + np.arange(STEPS)
  there, total = -(-lengths // 16), -(-lengths[-1] // 16)
  mass = np.zeros((STEPS, LAYERS, K, total), np.float16)
  chosen = np.zeros((STEPS, LAYERS, K, total), bool)
  likes = rng.random((LAYERS, K, total))
  for step in range(STEPS):
    change = np.linspace(1, 0.02, LAYERS * K).reshape(LAYERS, K, 1)
    likes = (1 - change) * likes + change * rng.random(likes.shape)
    seen = np.where(np.arange(total) < there[step], likes**4, 0)
    mass[step] = seen / seen.sum(axis=-1, keepdims=True)
    ranked = seen.copy()
    ranked[..., there[step] - 1] = np.inf
    np.put_along_axis(chosen[step], np.argsort(-ranked, axis=-1)[..., :PAGES], True, axis=-1)
  said = {"name": name, "sha256": "", "sample": 0, "prompt_tokens": PROMPT, "page_size": 16}
  promised = np.sqrt(mass) / np.sqrt(mass).sum(axis=-1, keepdims=True)
  return Trace(said | {"steps": STEPS, "content_hash": ""}, {PAGES: chosen}, mass, promised)


@pytest.fixture(scope="module")
def case():
  traces = _trace("book", 0), _trace("talk", 1), _trace("book", 2)
  serving = Serving(machine("l40"), 4, 6, (300, 900), (3, 20), (3, 20), (2.0, 9.0), 0.3, 0)
  shared = {"task": "a", "metric": "f1", "num_examples": 1, "dense_score": 0.5}
  answered = (
    make_row(policy="dense", score=0.5, retention=1.0, **shared),
    make_row(
      **{"policy": "quest", "budget_tokens": 96, "store": "resident"},
      **{"score": 0.4, "retention": 0.8, "recall_bytes_per_step": 1e6},
      **shared,
    ),
  )
  sizes = (PAGES,), 16, 0.25, 5, "whole_page", (200, 1000)
  return Case("made-up", CONFIG, traces, *sizes, serving, answered)


@pytest.mark.parametrize("name", ITEMS)
def test_an_item(name, case, tmp_path):
  item = ITEMS[name]
  for row in item.run(case):
    append_row(tmp_path, row)
  rows = read_rows(tmp_path)
  assert table(rows, item.columns).count("\n") == len(rows) + 1
  assert all(any(row[column] is not None for row in rows) for column in item.columns)
  item.plot(rows, "a $title", tmp_path / "plot.png")
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
  assert all(one.paper and one.ours and one.reason for one in item.compare(rows))


def test_what_is_promoted_by_hand(case):
  trace = case.traces[0]
  found = promoted.promoted(trace, PAGES, 5)
  ranked = [0, 4, 9, 14, 19]  # steps 1, 5, 10, 15, 20 from 1
  assert found.shape == (len(ranked) - 1, LAYERS, K)
  for place, (old, new) in enumerate(itertools.pairwise(ranked)):
    for layer in range(LAYERS):
      for head in range(K):
        before = set(np.flatnonzero(trace.chosen[PAGES][old, layer, head]))
        after = set(np.flatnonzero(trace.chosen[PAGES][new, layer, head]))
        away = {page for page in after - before if page < trace.pages[old]}
        assert found[place, layer, head] == pytest.approx(len(away) / PAGES)
  assert found[:, 0].mean() > found[:, -1].mean() + 0.2
  assert len(promoted.promoted(trace, PAGES, 1)) == STEPS - 1
  rows = {(row["text"], row["heads"]): row for row in promoted.run(case)}
  assert rows["book", "stable"]["reranks"] == 2 * 4 and rows["talk", "stable"]["reranks"] == 4
  share = rows["talk", "stable"]["promoted_ratio"]
  assert rows["talk", "stable"]["promoted_bytes"] == pytest.approx(
    share * PAGES * 6 * 2 * 16 * 16 * 4
  )


def test_what_a_stale_list_loses_by_hand(case):
  trace = case.traces[0]
  found = importance.losses(trace, PAGES, (3,))[0]
  for layer, head in ((0, 0), (2, 1)):
    lost = []
    for step in range(3, STEPS):
      born = set(range(trace.pages[step - 3], trace.chosen[PAGES].shape[-1]))
      lists = [set(np.flatnonzero(trace.chosen[PAGES][at, layer, head])) for at in (step, step - 3)]
      fresh, stale = (
        sum(float(trace.mass[step, layer, head, page]) for page in one | born) for one in lists
      )
      lost.append(fresh - stale)
    assert found[layer, head] == pytest.approx(np.mean(lost), abs=1e-9)
  left_out = importance.unimportant(trace, PAGES)
  first = set(np.flatnonzero(trace.chosen[PAGES][0, 1, 0]))
  others = [page for page in range(trace.pages[0]) if page not in first]
  assert left_out[7, 1, 0] == pytest.approx(trace.mass[7, 1, 0, others].astype(float).sum())


def _by_hand(trace, layer, head, period=None, bound=None):
  """Pages attended to at each step, and the steps of rankings, of one head."""
  choice = [set(np.flatnonzero(one)) for one in trace.chosen[PAGES][:, layer, head]]
  listed, known, length, used, ranked = set(), 0, 0, [], []
  serves = 0
  for step, there in enumerate(trace.pages):
    older = listed | set(range(known, there))
    tokens = PROMPT + step + 1
    if bound is None:
      due, used_now = step == 0 or (step + 1) % period == 0, older if step else choice[0]
    else:
      due = not serves or tokens % serves == 0
      used_now = choice[step] if due else older
      shares = trace.promised[step, layer, head].astype(float)
      gain = sum(shares[[*choice[step]]]) - sum(shares[[*older]])
      if due and not serves:
        serves = 1
      elif due and gain > bound:
        serves = max(serves // 2, 1)
      elif due and tokens - length >= serves:
        serves = min(2 * serves, 64)
    used.append(used_now)
    if due:
      listed, known, length = choice[step], there, tokens
      ranked.append(step)
  return used, ranked


@pytest.mark.parametrize("options", [{"period": 5}, {"bound": 0.02}], ids=["fixed", "adaptive"])
def test_a_rule_is_played_by_hand(case, options):
  trace, rankings = case.traces[0], []
  if "period" in options:
    found = replay.fixed(trace, PAGES, **options)
  else:
    found = replay.adaptive(trace, PAGES, replay.of_shares(trace.promised), **options)
  counts = replay.count(trace, PAGES, found)
  for layer, head in np.ndindex(LAYERS, K):
    used, ranked = _by_hand(trace, layer, head, **options)
    assert [set(np.flatnonzero(one)) for one in found.used[:, layer, head]] == used
    assert np.flatnonzero(found.ranked[:, layer, head]).tolist() == ranked
    mass = trace.mass[:, layer, head].astype(float)
    on = [sum(mass[step, [*pages]]) for step, pages in enumerate(used)]
    assert counts.missed[layer, head] == pytest.approx(1 - np.mean(on), abs=1e-9)
    chosen = trace.chosen[PAGES][:, layer, head]
    same = [len(pages & {*np.flatnonzero(one)}) for pages, one in zip(used, chosen, strict=True)]
    assert counts.agreement[layer, head] == pytest.approx(np.mean(same) / PAGES)
    pairs = enumerate(itertools.pairwise(used))
    moved = [
      len({page for page in new - old if page < trace.pages[at]}) for at, (old, new) in pairs
    ]
    assert counts.promoted[layer, head] == pytest.approx(sum(moved) / PAGES / STEPS)
    rankings.append(len(ranked))
  if "bound" in options:  # heads that are more stable are ranked less
    assert np.mean(rankings[:3]) > np.mean(rankings[-3:]) + 3


def test_the_ends_of_the_sweep(case):
  """All unstable, or all ranked always: nothing is lost; and closed forms in between."""
  rows = rerank.run(case)
  sweep = {(row["fraction"], row["period"]): row for row in rows if row["rule"] == "fixed"}
  assert len(sweep) == 6 * 8 and len(rows) == 48 + 4 + 11
  there, total = 42, LAYERS * K
  for (fraction, period), row in sweep.items():
    unstable = round(fraction * total) / total
    if fraction == 1 or period == 1:
      assert row["stale_loss_ratio"] == pytest.approx(0, abs=1e-9)
      assert row["rankings_per_step"] == row["layers_ranked_ratio"] == 1
      assert row["agreement_ratio"] == 1
    if fraction == 1:
      assert row["promoted_ratio"] == 0 and row["device_pages_ratio"] == 1
    ranked = len({1, *range(period, STEPS + 1, period)}) / STEPS
    assert row["rankings_per_step"] == pytest.approx(unstable + (1 - unstable) * ranked)
    device = unstable + (1 - unstable) * (PAGES + 1) / there
    assert row["device_pages_ratio"] == pytest.approx(device)
  agree = [sweep[0.0, period]["agreement_ratio"] for period in (16, 4, 1)]
  assert agree == sorted(agree) and agree[0] < 0.8
  lost = [sweep[0.0, period]["stale_loss_ratio"] for period in (1, 4, 16)]
  assert lost == sorted(lost) and lost[-1] > lost[0] + 0.02
  by = {row["by"]: row["stale_loss_ratio"] for row in rows if row["rule"] == "profile"}
  assert list(by) == [rerank.OWN, rerank.OTHER_TEXT, rerank.OTHER_SHAPE, rerank.RANDOM]
  assert by[rerank.OWN] == sweep[0.25, 5]["stale_loss_ratio"] < by[rerank.RANDOM]
  adaptive = [row for row in rows if row["by"] == "promised"]
  rankings = [row["rankings_per_step"] for row in adaptive]
  assert rankings == sorted(rankings, reverse=True) and rankings[0] > rankings[-1]


def test_the_profile_of_another_model_is_stretched(case):
  mask = rerank.of_another_model(case)  # SmolLM2's, as small-llama has this very shape
  profile = load_heads(rerank.PROFILES / "smollm2-135m-heads-64.json", 64, 16)
  scores = profile.arrays["instability"][[0, 7, 15, 22]][:, [0, 1]]
  assert mask.sum() == case.num_unstable == 2
  assert scores[mask].min() > scores[~mask].max()


def test_traces_that_do_not_say_what_scores_promise_are_refused(case):
  traces = [case.traces[0], case.traces[1]._replace(promised=None)]
  with pytest.raises(ValueError, match="a trace does not say what page scores promise, as it is"):
    rerank.run(case._replace(traces=traces))


def test_memory_is_that_of_the_closed_form():
  """A quarter of the heads whole and 65 pages of 1,250 of the others: 0.75 (1 - 65/1,250)."""
  config = ModelConfig("llama", 8, 8, 4, 128, 64, 64, 100, 131072)
  case = Case("shape", config, (), (64,), 16, 0.25, 16, "head_tiered", (20_000,))
  assert memory.closed_form(case, 64, 20_000) == pytest.approx(0.75 * (1 - 65 / 1250))
  assert memory.closed_form(case, 64, 1000) == 0
  heads = memory.evenly(0.25, 32, 4)
  assert len({*heads}) == 8 and all(layer < 8 and head < 4 for layer, head in heads)
  assert memory.evenly(0, 32, 4) == []


def test_what_has_no_answer_is_refused(case):
  with pytest.raises(ValueError, match="1 texts with 2 of 8 heads unstable have no overlap"):
    ITEMS["overlap"].run(case._replace(traces=case.traces[:1]))
  with pytest.raises(ValueError, match="a period of 40 steps ranks nothing twice"):
    ITEMS["promoted"].run(case._replace(period=40))


COMMAND = ("scripts.reproduce", "--paper=flexicache", "--out_dir=out", "--small")


def _run(folder, *arguments):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(
    [sys.executable, "-m", *COMMAND, *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=environment,
  )


def test_the_command(tmp_path):
  files = f"--text_files={ALICE},records"
  done = _run(
    tmp_path, "--item=overlap", files, "--prompt_tokens=200", "--output_tokens=16", "--period=8"
  )
  assert done.returncode == 0, done.stderr
  assert "texts   alice_opening, 216 tokens; records, 216 tokens" in done.stdout
  assert "\nTable 1: " in done.stdout and done.stdout.endswith("written to out\n")
  names = {path.name for path in (tmp_path / "out").iterdir()}
  assert names == {"results.jsonl", "manifest.json", "comparison.json", "overlap.png"}
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
  assert manifest["flags"]["fraction"] == 0.25 and {*manifest["data"]} == {
    "alice_opening",
    "records",
  }


def test_bad_input_is_one_line_and_writes_nothing(tmp_path):
  done = commands.run(*COMMAND, "--item=fig9", folder=tmp_path)
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert "--paper=flexicache has no --item=fig9; expected one of rco, overlap, " in line
  assert done.returncode == 2 and not (tmp_path / "out").exists()


def test_traces_of_something_else_are_refused(tmp_path):
  loaded = load(str(SMALL_MODEL))
  with pytest.raises(ValueError, match="has no trace of small-llama; make some with"):
    kept_traces(tmp_path, loaded, [PAGES])
  one = _trace("book", 0)
  page_traces.save(tmp_path / "other.npz", one)
  page_traces.save(
    tmp_path / "one.npz", one._replace(about=one.about | {"content_hash": loaded.content_hash})
  )
  assert len(kept_traces(tmp_path, loaded, [PAGES])) == 1
  with pytest.raises(ValueError, match="are of budgets of 6 pages, expected 6, 7; give --budget_t"):
    kept_traces(tmp_path, loaded, [PAGES, 7])


def test_shapes_need_no_text():
  assert {*SHAPE_ONLY} < {*ITEMS}
