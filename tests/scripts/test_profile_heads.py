"""scripts.profile_heads: traces against policies and plain attention, texts, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine.generate import prefill
from kvjax.profiling import head_stability, load_heads
from models import load
from scripts import page_texts, page_traces, profile_heads
from scripts.page_texts import Passage
from scripts.reproducing import SMALL_MODEL
from tests import commands
from tests.kvjax import matrix, spied

ROOT = Path(__file__).resolve().parents[2]
ALICE = ROOT / "tests" / "data" / "alice_opening.txt"
PAGE, STEPS, PROMPT = 16, 5, 250
BUDGETS = (4, 8)


@pytest.fixture(scope="module")
def loaded():
  return load(str(SMALL_MODEL))


@pytest.fixture(scope="module")
def passage(loaded):
  [one] = page_texts.passages(loaded, str(ALICE), PROMPT + STEPS, 1)
  return one


@pytest.fixture(scope="module")
def trace(loaded, passage):
  runner = page_traces.watcher(loaded, BUDGETS, PAGE, PROMPT + STEPS)
  return page_traces.trace(runner, loaded, BUDGETS, passage, STEPS)


def test_the_pages_are_those_that_flexicache_takes(loaded, passage, trace):
  """In its first step, which follows a dense prompt; later ones attend to other things."""
  for pages in BUDGETS:
    policy = make_policy("flexicache", budget_tokens=pages * PAGE, page_size=PAGE, period=1)
    runner = prepare(loaded.model, policy, "resident", CacheConfig(1, PROMPT + STEPS, PAGE))
    cache = prefill(runner, loaded.params, [passage.tokens[:PROMPT]])[1]
    token = np.array(passage.tokens[PROMPT : PROMPT + 1], np.int32)
    _, seen, _ = matrix.spied_step(runner, loaded.params, cache, token)
    chosen = trace.chosen[pages]
    assert (chosen.sum(axis=-1) == pages).all()
    for layer, (positions, _) in seen.items():
      for head, tokens in enumerate(np.asarray(positions)[0]):
        assert {*np.flatnonzero(chosen[0, layer, head])} == {*(tokens // PAGE).ravel().tolist()}
    steps, newest = np.arange(STEPS), (PROMPT + np.arange(STEPS)) // PAGE
    assert chosen[steps, :, :, newest].all()
  assert (trace.chosen[4] <= trace.chosen[8]).all()  # one ranking for all budgets


def test_the_attention_by_hand(loaded, passage, trace):
  seen = spied.queries_and_keys(loaded.model, loaded.params, passage.tokens)
  config = loaded.model.config
  for step in range(STEPS):
    at = PROMPT + step
    for layer, (q, k) in enumerate(seen):
      for head in range(config.num_kv_heads):
        group = range(head * config.group_size, (head + 1) * config.group_size)
        scores = np.array([k[: at + 1, head] @ q[at, one] for one in group], np.float64)
        weights = np.exp(scores / config.head_dim**0.5)
        weights = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0)
        padded = np.pad(weights, (0, -len(weights) % PAGE)).reshape(-1, PAGE).sum(axis=-1)
        found = trace.mass[step, layer, head]
        np.testing.assert_allclose(found[: len(padded)], padded, atol=2e-3)
        assert not found[len(padded) :].any()
  assert trace.pages.tolist() == [-(-(PROMPT + 1 + step) // PAGE) for step in range(STEPS)]


def test_what_bounds_promise_by_hand(loaded, passage, trace):
  seen = spied.queries_and_keys(loaded.model, loaded.params, passage.tokens)
  config, at = loaded.model.config, PROMPT + STEPS - 1
  for layer, (q, k) in enumerate(seen):
    for head in range(config.num_kv_heads):
      starts = range(0, at + 1, PAGE)
      parts = [k[start : min(start + PAGE, at + 1), head] for start in starts]
      group = q[at, head * config.group_size : (head + 1) * config.group_size, None]
      low, high = (np.stack([f(part, axis=0) for part in parts]) for f in (np.min, np.max))
      bounds = np.maximum(group * low, group * high).sum(axis=-1) / config.head_dim**0.5
      weights = np.exp(bounds - bounds.max(axis=-1, keepdims=True))
      weights = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0)
      found = trace.promised[-1, layer, head]
      np.testing.assert_allclose(found[: len(weights)], weights, atol=2e-3)
      assert not found[len(weights) :].any()


def test_a_trace_comes_back_as_it_was(loaded, passage, trace, tmp_path):
  path = tmp_path / "new" / "one.npz"
  page_traces.save(path, trace)
  found = page_traces.load(path)
  assert found.about == trace.about
  np.testing.assert_array_equal(found.mass, trace.mass)
  np.testing.assert_array_equal(found.promised, trace.promised)
  page_traces.save(tmp_path / "older.npz", trace._replace(promised=None))
  assert page_traces.load(tmp_path / "older.npz").promised is None
  assert found.chosen.keys() == trace.chosen.keys()
  for pages, sets in trace.chosen.items():
    np.testing.assert_array_equal(found.chosen[pages], sets)
  kept = tmp_path / "kept" / f"alice_opening-{PROMPT}-0.npz"
  page_traces.save(kept, trace)
  again = page_traces.traces_of(loaded, [passage], BUDGETS[:1], STEPS, PAGE, kept.parent)
  assert again[0].about == trace.about
  with pytest.raises(ValueError, match=r"250-0.npz is a trace of something else; delete it or"):
    page_traces.traces_of(loaded, [passage], (6,), STEPS, PAGE, kept.parent)
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match=r"one.npz is no trace of pages; delete it and run again"):
    page_traces.load(path)


RECORDS = {
  "longbench": {"context": "A b. " * 80, "input": "What?", "answers": ["That one."]},
  "leval": {"input": "A b. " * 80, "instructions": ["What?"], "outputs": ["That one."]},
  "kv": {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"]] * 20, "key": "k1", "value": "v1"},
  "talk": {"turns": [["USER", "Hello."], ["SYSTEM", "Good day."]] * 20},
}
ENDS = {
  "longbench": "\n\nQuestion: What?\nAnswer: That one.",
  "leval": "\n\nQuestion: What?\nAnswer: That one.",
  "kv": 'The value of "k1" is "v1".',
  "talk": "USER: Hello.\nSYSTEM: Good day.",
}


@pytest.mark.parametrize("form", RECORDS)
def test_a_passage_of_records_ends_as_one_of_them(loaded, form, tmp_path):
  path = tmp_path / f"{form}.jsonl"
  path.write_text("\n".join([json.dumps(RECORDS[form])] * 6), encoding="utf-8")
  found = page_texts.passages(loaded, str(path), 300, 2)
  assert [(one.name, one.sample, len(one.tokens)) for one in found] == [
    (form, 0, 300),
    (form, 1, 300),
  ]
  assert all(loaded.tokenizer.decode(one.tokens).endswith(ENDS[form]) for one in found)
  with pytest.raises(ValueError, match=r"gives \d+ tokens up to record 5 and 4000 are needed"):
    page_texts.passages(loaded, str(path), 4000, 1)


def test_texts_that_cannot_be_read(loaded, tmp_path):
  for content in ("text", '{"turns": [["USER"]]}', '{"other": 1}'):
    path = tmp_path / "other.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(
      ValueError, match=r"other.jsonl has no records of a known form; expected one"
    ):
      page_texts.passages(loaded, str(path), 50, 1)
  with pytest.raises(ValueError, match=r"none.md is not a file"):
    page_texts.passages(loaded, "none.md", 50, 1)


def test_records_are_made_alike(loaded):
  first, again = (page_texts.passages(loaded, "records", 300, 1) for _ in range(2))
  assert first == again and isinstance(first[0], Passage)
  assert "The value of" in loaded.tokenizer.decode(first[0].tokens)


COMMAND = ["scripts.profile_heads", f"--model={SMALL_MODEL}", "--budget_tokens=64,128"]
COMMAND += ["--prompt_tokens=200", "--steps=10", "--period=5"]
COMMAND += [f"--text_files={ALICE},records", "--out_dir=out"]


def _run(folder):
  return subprocess.run(
    [sys.executable, "-m", *COMMAND],
    capture_output=True,
    text=True,
    check=False,
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )


def test_the_command(loaded, tmp_path):
  done = _run(tmp_path)
  assert done.returncode == 0, done.stderr
  assert "2 passages, 200 tokens and 10 steps each" in done.stdout
  assert "K = 4 pages: 2 of 8 heads are unstable, in" in done.stdout
  assert "held out recall: " in done.stdout
  out = tmp_path / "out"
  names = {path.name for path in out.iterdir()}
  stems = [f"small-llama-heads-{pages}" for pages in BUDGETS]
  assert names == {"traces", *(f"{s}{e}" for s in stems for e in (".json", *PICTURES))}
  profile = load_heads(out / f"{stems[0]}.json", 4, 16)
  assert profile.content_hash == loaded.content_hash
  assert [one["name"] for one in profile.settings["data"]] == ["alice_opening", "records"]
  traces = [page_traces.load(path) for path in sorted((out / "traces").iterdir())]
  scores = [head_stability.instability(one.chosen[4], one.pages, 5) for one in traces]
  heads = head_stability.unstable_heads(np.concatenate(scores).reshape(-1, 8), 2)
  assert profile.arrays["unstable_heads"].tolist() == [
    [*divmod(head, 2)] for head in heads.tolist()
  ]
  np.testing.assert_allclose(
    profile.arrays["instability"], np.concatenate(scores).mean(axis=0), atol=1e-4
  )
  policy = make_policy(f"flexicache:profile={out / stems[1]}.json", budget_tokens=128)
  assert prepare(loaded.model, policy, "resident", CacheConfig(1, 300)).policy.joins_heads
  again = commands.run(*COMMAND, folder=tmp_path)
  assert again.returncode == 2 and "heads-4.json exists; choose another --out_dir" in again.stderr
  content = (out / f"{stems[0]}.json").read_bytes()
  (out / f"{stems[0]}.json").unlink()
  (out / f"{stems[1]}.json").unlink()
  stamps = [path.stat().st_mtime_ns for path in sorted((out / "traces").iterdir())]
  assert commands.run(*COMMAND, folder=tmp_path).returncode == 0  # which reads nothing again
  assert (out / f"{stems[0]}.json").read_bytes() == content
  assert stamps == [path.stat().st_mtime_ns for path in sorted((out / "traces").iterdir())]


PICTURES = ("-map.png", "-overlap.png")


def test_bad_input_is_one_line_and_writes_nothing(tmp_path):
  done = commands.run(*COMMAND, "--budget_tokens=256", folder=tmp_path)
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert done.returncode == 2 and "--prompt_tokens 200 fits a budget of 16 pages of 16" in line
  assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_what_is_refused(loaded):
  with pytest.raises(ValueError, match="--budget_tokens 8 is under one page of 16 tokens"):
    profile_heads.budgets_in_pages(["64", "8"], 16)
  with pytest.raises(ValueError, match="4 steps are less than one --period of 5; decode more"):
    profile_heads.check_lengths([4], 16, [200], 4, 5)
  with pytest.raises(ValueError, match="--text_files is empty"):
    page_texts.read_passages(loaded, [], [200], 10, 1)
  with pytest.raises(ValueError, match="90010 tokens exceed the context of 4096"):
    page_texts.read_passages(loaded, ["records"], [90000], 10, 1)
