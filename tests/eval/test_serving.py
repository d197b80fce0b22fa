"""The serving command: what it counts, by hand; that answers do not depend on tiers; refusals."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest

from eval.predicting import measured_setup, predicted_row
from eval.results import ROW_FIELDS
from eval.serving import EVICTIONS, Case, Span, Start, WatchedClock, make_turns, serve
from eval.serving_rows import (
  MEANS,
  TIERS,
  computed,
  measured_row,
  overlap_ratio,
  overlap_s,
  turn_line,
)
from kvjax import CacheConfig, make_policy, prepare
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Outcome
from kvjax.sim.workloads import Turn, from_turns
from models import load
from tests import commands
from tests.eval.test_predicting import COSTS, of_costs, three_rounds
from tests.eval.test_throughput import _run

MODEL = "random:stories260k"
TOKEN_BYTES = 5 * 2 * 4 * 8 * 4  # of its keys and values


class Late(VirtualClock):
  """Sleeps a second too long."""

  def wait_until(self, then: float) -> None:
    super().wait_until(then + 1.0)


class Patient(VirtualClock):
  """Leaves the processor to the threads that read while it waits for them."""

  def wait_until(self, then: float) -> None:
    time.sleep(1e-3)
    super().wait_until(then)


@pytest.fixture(scope="module")
def case():
  loaded = load(MODEL)
  config = CacheConfig(2, 256)
  runner = prepare(loaded.model, make_policy("dense"), "resident", config, chunk_tokens=64)
  return Case(loaded, runner, three_rounds(), "previous_answer", host_bytes=1 << 30)


@pytest.fixture(scope="module")
def runs(case, tmp_path_factory):
  """With all histories in host memory; with room for the largest, under both evictions."""
  tight = [case._replace(eviction=one, host_bytes=120 * TOKEN_BYTES) for one in EVICTIONS]
  folder = tmp_path_factory.mktemp
  return [(one, serve(one, folder("kv"), clock=Patient)) for one in (case, *tight)]


def test_answers_do_not_depend_on_where_histories_were(case, runs):
  answers = [{one.request.id: one.tokens for one in served.finished} for _, served in runs]
  assert answers[0] == answers[1] == answers[2]
  assert [len(answers[0][turn.id]) for turn in case.turns] == [t.max_new_tokens for t in case.turns]
  (_, ample), *tight = runs
  assert ample.misses == 0 and not ample.reads
  assert all(served.misses > 0 and served.reads for _, served in tight)


def test_a_measured_row(runs):
  for case, served in runs:
    row = measured_row(case, served)
    assert set(ROW_FIELDS) <= set(row) and row["simulated"] is False
    assert row["turns"] == len(case.turns) == sum(row[f"{tier}_turns"] for tier in TIERS)
    assert row["new_turns"] == len({turn.user for turn in case.turns})
    assert row["failed_turns"] == row["disk_faults"] == row["recomputed_turns"] == 0
    assert row["disk_turns"] == len(served.reads)
    assert row["ready_wait_s"] == 0.0 and row["eviction"] == case.eviction
    # Every token but the last of each conversation's answers is written once.
    tokens = sum(len(turn.prompt) + turn.max_new_tokens for turn in case.turns)
    users = len({turn.user for turn in case.turns})
    assert row["disk_written_bytes"] > (tokens - users) * TOKEN_BYTES
    json.dumps(row, allow_nan=False)


def test_what_computes_does_not_overlap(runs):
  for case, served in runs:
    spans = computed(served)
    assert len(spans) == len(case.turns) + len(served.steps)
    assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(spans))
    # A start makes the first token of an answer, and a row of a step each of the others.
    made = len(case.turns) + sum(step.amount for step in served.steps)
    assert made == sum(turn.max_new_tokens for turn in case.turns)


def test_what_is_noted_of_steps(runs):
  for case, served in runs:
    assert len(served.longest) == len(served.since) == len(served.steps)
    # Users 1 and 3 have the longer row of two: a question, and a token more with every step.
    assert list(served.longest) == [
      earlier * (14 + 6 * user) + 10 + 5 * user + step
      for earlier in range(3)
      for user in (1, 3)
      for step in range(1, 4 + user)
    ]
    begun = sorted(start.span.begin_s for start in served.starts.values())
    after, last = [], None  # steps since the latest start
    for step in served.steps:
      start = np.searchsorted(begun, step.begin_s)
      after.append(after[-1] + 1 if start == last else 0)
      last = start
    assert all(since <= most for since, most in zip(served.since, after, strict=True))
    # Of two turns at once, of 4 and 5 or 6 and 7 tokens, the longer one goes on alone for one step.
    ends = sum(since < most for since, most in zip(served.since, after, strict=True))
    assert ends == len(case.turns) // 2


def test_a_line_of_a_turn(runs):
  case, served = runs[1]
  lines = [turn_line(one, served) for one in served.finished]
  assert {line["tier"] for line in lines} == {"new", "host", "disk"}
  for line in lines:
    turn = case.turns[line["id"]]
    assert line["prompt_tokens"] == len(turn.prompt) and line["user"] == turn.user
    assert line["arrival_s"] <= line["started_s"] <= line["first_token_s"] <= line["ended_s"]


def test_the_simulated_run_reads_as_the_real_one(runs):
  """Tiers are those of the placement that ran: with room for all nothing is read."""
  setups = [measured_setup(case, of_costs(COSTS)) for case, _ in runs]
  measured = dict.fromkeys(MEANS, 1.0)
  rows = [
    predicted_row(case, setup, measured) for (case, _), setup in zip(runs, setups, strict=True)
  ]
  assert rows[0]["miss_ratio"] == rows[0]["disk_read_bytes"] == 0
  assert all(row["miss_ratio"] > 0 and row["disk_read_bytes"] > 0 for row in rows[1:])
  assert all(row["turns"] == len(runs[0][0].turns) for row in rows)


def test_overlap_by_hand():
  busy = [Span(0.0, 1.0), Span(2.0, 3.0), Span(5.0, 6.0)]
  assert overlap_ratio([Span(0.5, 2.5)], busy) == 0.5
  assert overlap_ratio([Span(2.25, 2.75), Span(3.0, 4.5)], busy) == 0.25
  assert overlap_ratio([Span(-1.0, 7.0)], busy) == 3 / 8
  assert overlap_ratio([], busy) is None
  spans = [Span(0.5, 2.5), Span(3.0, 4.0), Span(-1.0, 9.0)]
  assert overlap_s(spans, busy).tolist() == [1.0, 0.0, 3.0]
  assert overlap_s(spans, []).tolist() == [0.0] * 3


@pytest.mark.parametrize(
  ("past", "kept", "from_disk", "tier"),
  [
    (0, 0, False, "new"),
    (10, 9, False, "host"),
    (10, 9, True, "disk"),
    (10, 8, True, "recomputed"),
    (10, 0, False, "recomputed"),
  ],
)
def test_where_a_history_was(past, kept, from_disk, tier):
  assert Start(Span(0.0, 1.0), past, kept, 5, from_disk).tier == tier


def test_sleeps_are_noted_while_a_turn_is_ready():
  ready = iter([False, True])
  clock = WatchedClock(VirtualClock(), lambda: next(ready))
  for _ in range(2):
    clock.wait_until(1.0)
  assert len(clock.sleeps) == 1 and clock.now() == 1.0
  assert clock.late_s == [0.0]  # the second one did not sleep
  assert clock.slept_s > clock.sleeps[0].seconds > 0


def test_sleeps_that_are_too_long_are_noted():
  clock = WatchedClock(Late(), lambda: False)
  clock.wait_until(4.0)
  clock.wait_until(5.0)  # which it is
  clock.wait_until(7.0)
  assert clock.late_s == [1.0, 1.0] and not clock.sleeps


def test_turns_of_a_workload():
  asked = [Turn(3, 4.0, 5, 6, 0), Turn(3, 8.0, 7, 0, 11), Turn(4, 9.0, 40, 9, 0)]
  workload = from_turns("by hand", asked)
  turns = make_turns(workload, speed=2, most_tokens=19, vocab_size=9, seed=0)
  assert [(t.id, t.user, t.arrival_s) for t in turns] == [(0, 3, 2.0), (1, 3, 4.0)]
  assert [(len(t.prompt), t.max_new_tokens) for t in turns] == [(5, 6), (7, 1)]
  assert all(0 <= token < 9 for turn in turns for token in turn.prompt)
  with pytest.raises(ValueError, match="no turn of 3 fits into 8 tokens"):
    make_turns(workload, speed=2, most_tokens=8, vocab_size=9, seed=0)


def test_histories_of_others_are_left_alone(case, tmp_path):
  few = case._replace(turns=[turn for turn in case.turns if turn.user == case.turns[0].user][:1])
  first = serve(few, tmp_path, clock=Patient)
  assert first.finished[0].outcome is Outcome.DONE
  before = {path: path.read_bytes() for path in tmp_path.rglob("*-*")}
  with pytest.raises(ValueError, match="has histories of 1 users already"):
    serve(few, tmp_path)
  assert before == {path: path.read_bytes() for path in tmp_path.rglob("*-*")}


def test_the_command(tmp_path):
  arguments = [f"--model={MODEL}", "--users=2", "--speed=400", "--slot_tokens=256"]
  arguments += ["--slots=2", "--host_mb=0.3", "--out_dir=out"]
  done = _run("eval.run_serving", *arguments, folder=tmp_path)
  assert done.returncode == 0, done.stderr
  rows, turns = (
    [json.loads(line) for line in (tmp_path / "out" / name).read_text("utf-8").splitlines()]
    for name in ("results.jsonl", "turns.jsonl")
  )
  assert [(row["simulated"], row.get("even_pace")) for row in rows] == [
    (False, None),
    (True, False),
    (True, True),
  ]
  assert [row["turns"] for row in rows] == [len(turns)] * 3
  plan, times = done.stdout.index("turns of 2 users"), done.stdout.index("mean queueing s")
  assert plan < times < done.stdout.index("simulated over measured means: ttft ")
  assert done.stdout.count("\ntold no pace: ttft ") == 1
  again = commands.run("eval.run_serving", "--out_dir=out", folder=tmp_path)
  assert again.returncode == 2
  assert "out already holds results.jsonl; choose another --out_dir" in again.stderr


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["--eviction=best"], "--eviction=best"),
    (["--speed=0"], "--speed=0.0: expected a positive number"),
    (["--chunk_tokens=100"], "chunk_tokens 100 is not one of"),
    (["--slot_tokens=2"], "fits into 2 tokens"),
    (["--tensors=activations"], "so keeping activations does not pay; keep keys and values"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, expected):
  flags = (f"--model={MODEL}", "--out_dir=out", *arguments)
  done = commands.run("eval.run_serving", *flags, folder=tmp_path)
  assert done.returncode == 2
  [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert expected in line
  assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
