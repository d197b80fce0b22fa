"""What the simulator is told of a run, and what it makes of it: by hand, nothing is computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eval.predicting import at_even_pace, measured_setup, predicted_row
from eval.run_serving import SMALL
from eval.serving import Case, Served, Span, Start
from eval.serving_rows import MEANS
from kvjax import CacheConfig, make_policy, prepare
from kvjax.bidaw.tensor_cache import keeping
from kvjax.engine.requests import Request
from kvjax.sim.engine_costs import EngineCosts
from models import load

OPT = str(SMALL.with_name("small-opt"))


def three_rounds() -> list[Request]:
  """Of four users, in turn, two at a time, long after those before: real seconds do not matter."""
  rng = np.random.default_rng(1)
  turns = []
  for id in range(12):
    user = id % 4
    prompt = tuple(rng.integers(0, 512, 10 + 5 * user).tolist())
    turns.append(Request(id, prompt, 4 + user, user=user, arrival_s=100.0 * (id // 2)))
  return turns


COSTS = EngineCosts(
  chunk_tokens=64,
  segments=(1024, 1024),
  start_s=3e-3,
  chunk_s=8e-3,
  restore_s=5e-4,
  attend_s=3e-4,
  step_s=14e-3,
  row_s=1e-3,
  token_s=2e-6,
  cold_s=6e-3,
  store_s=2e-3,
  lost_beside_read=0.6,
  wake_s=1e-3,
)
READ_S, BYTES_PER_S, LOOP_S = 2e-3, 5e8, 1e-3


@pytest.fixture(scope="module")
def long_case():
  """With rows of two segments; nothing is computed."""
  loaded = load(str(SMALL))
  runner = prepare(
    loaded.model, make_policy("dense"), "resident", CacheConfig(2, 2048), chunk_tokens=64
  )
  return Case(loaded, runner, three_rounds(), "lru", host_bytes=1 << 30)


def of_costs(costs: EngineCosts) -> Served:
  """A run whose operations, one after another, take what is said; beside every fourth is a read."""
  steps, starts, reads = [], {}, []
  now = 7.0

  def take(seconds: float, amount: int = 0) -> Span:
    nonlocal now
    begin, beside = now, (len(steps) + len(starts)) % 4 == 3
    now += seconds / (1 - costs.lost_beside_read) if beside else seconds
    if beside:
      num_bytes = round((now - begin - READ_S) * BYTES_PER_S)
      reads.append(Span(begin, begin + READ_S + num_bytes / BYTES_PER_S, num_bytes))
    return Span(begin, now, amount)

  for id, past in enumerate((0, 0, 70, 131, 200, 90, 640, 1000, 300, 64)):
    prompt = 5 + 30 * id
    span = take(costs.starting_s(past, prompt))
    starts[id] = Start(span, past, max(0, past - 1), prompt, from_disk=False)
  amounts = [(1 + n % 3, 61 * n, n % 5) for n in range(30)]
  for amount in amounts:
    steps.append(take(costs.stepping_s(*amount) - LOOP_S, amount[0]))
  return Served(
    began_s=7.0,
    finished=(),
    starts=starts,
    steps=steps,
    longest=[longest for _, longest, _ in amounts],
    since=[since for _, _, since in amounts],
    stored_s=costs.store_s * len(starts),
    loop_s=LOOP_S * len(amounts),
    reads=reads,
    written_bytes=0,
    late_s=[costs.wake_s - 5e-4, costs.wake_s + 5e-4],
    sleeps=(),
    disk_call_s=0.0,
    hits=0,
    misses=0,
    faults=(),
  )


def test_costs_of_a_run_are_found(long_case):
  """From times of operations that hang on what they did as the engine's do."""
  setup = measured_setup(long_case, of_costs(COSTS))
  assert setup.engine is not None and setup.engine.segments == COSTS.segments
  for name in set(COSTS._fields) - {"segments", "pace"}:
    assert getattr(setup.engine, name) == pytest.approx(getattr(COSTS, name), rel=1e-5), name
  assert setup.engine.pace == pytest.approx(np.ones(len(setup.engine.pace)), rel=1e-5)
  assert setup.machine.transfer_s == pytest.approx(READ_S, rel=1e-5)
  assert setup.machine.disk_bytes_per_s == pytest.approx(BYTES_PER_S, rel=1e-5)
  assert (setup.slots, setup.host_bytes) == (2, long_case.host_bytes)
  even = at_even_pace(setup)
  assert even.engine is not None and even == setup._replace(engine=even.engine)
  assert even.engine.pace == () and even.engine._replace(pace=setup.engine.pace) == setup.engine


def test_a_run_without_reads_or_sleeps(long_case):
  served = of_costs(COSTS._replace(lost_beside_read=0.0))._replace(reads=(), late_s=())
  setup = measured_setup(long_case, served)
  assert setup.machine.transfer_s == 0 and setup.machine.disk_bytes_per_s > 1e17
  assert setup.engine is not None and setup.engine.lost_beside_read == setup.engine.wake_s == 0
  assert setup.engine.cold_s == pytest.approx(COSTS.cold_s)


def test_not_all_is_lost_beside_a_read(long_case):
  """Or nothing would ever go on."""
  setup = measured_setup(long_case, of_costs(COSTS._replace(lost_beside_read=0.95)))
  assert setup.engine is not None and setup.engine.lost_beside_read == 0.9


def test_costs_below_nothing_are_none_and_the_sum_stays(long_case):
  """Steps that take less the more rows they have: no cost of a row, and the mean of a step."""
  served = of_costs(COSTS)
  steps = [
    Span(50.0 + n, 50.02 + n - 0.004 * step.amount, step.amount)
    for n, step in enumerate(served.steps)
  ]
  engine = measured_setup(long_case, served._replace(steps=steps, loop_s=0.0)).engine
  assert engine is not None and engine.row_s == 0
  amounts = zip([step.amount for step in steps], served.longest, served.since, strict=True)
  told = [engine.stepping_s(*amount) for amount in amounts]
  assert sum(told) == pytest.approx(sum(step.seconds for step in steps))


def test_the_pace_of_a_run_is_found(long_case):
  """Half a second of equal steps, a second of some twice as long, and one that stalls."""
  times = np.concatenate([10 + np.arange(50) * 0.01, 10.5 + np.arange(51) * 0.02, [12.0, 13.0]])
  steps = [Span(begin, end, 1) for begin, end in itertools.pairwise(times + 7.0)]
  del steps[-2]  # between the last two
  like = {"longest": [9] * len(steps), "since": [9] * len(steps), "reads": ()}
  pace = measured_setup(long_case, of_costs(COSTS)._replace(steps=steps, **like)).engine.pace
  fast, slow, stalled = pace[40:42], pace[42:46], pace[48:52]
  mean_s = (50 * 0.01 + 50 * 0.02 + 1) / 101
  assert fast == pytest.approx([0.01 / mean_s] * 2)
  assert slow == pytest.approx([0.02 / mean_s] * 4)
  assert stalled == pytest.approx([1 / mean_s] * 4)
  assert set(pace[20:40]) == {1.0}  # nothing was computed


def test_periods_in_which_nothing_was_computed_are_even(long_case):
  """Whatever is left of sums of many seconds there."""
  lasting = np.random.default_rng(0).uniform(0.001, 0.003, (200, 20))
  ends = np.cumsum(lasting, axis=1) + np.arange(20.0, 220.0)[:, None]
  steps = [Span(end - s, end, 1) for end, s in zip(ends.flat, lasting.flat, strict=True)]
  like = {"longest": [9] * len(steps), "since": [9] * len(steps), "reads": ()}
  setup = measured_setup(long_case, of_costs(COSTS)._replace(steps=steps, **like))
  pace = np.array(setup.engine.pace[4 * 13 :])
  computing = np.arange(len(pace)) % 4 == 0  # 20 steps at the beginning of each second
  assert 0.5 < pace[computing].min() < pace[computing].max() < 2
  assert (pace[~computing] == 1.0).all()


def test_the_simulated_run_takes_what_it_was_told(long_case):
  """Turns that are alone wait for nobody: a start, and a step for each token after the first."""
  setup = measured_setup(long_case, of_costs(COSTS))
  case = long_case._replace(turns=[turn_at(turn, 10.0 * turn.id) for turn in long_case.turns])
  row = predicted_row(case, setup, dict.fromkeys(MEANS, 2.0))
  assert row["simulated"] is True and row["even_pace"] is False
  late_s = COSTS.wake_s * 11 / 12  # for the first one the loop does not sleep
  assert row["mean_queueing_s"] == pytest.approx(late_s)
  starts = [COSTS.starting_s(0, len(turn.prompt)) for turn in case.turns]
  assert row["mean_ttft_s"] == pytest.approx(np.mean(starts) + late_s, rel=1e-5)
  assert row["ttft_ratio"] == row["mean_ttft_s"] / 2.0
  step_s = COSTS.step_s + COSTS.row_s + 1024 * COSTS.token_s
  tpots = []
  for turn in case.turns:
    steps = turn.max_new_tokens - 1
    tpots.append(step_s + COSTS.cold_s * sum(0.5**since for since in range(steps)) / steps)
  assert row["mean_tpot_s"] == pytest.approx(np.mean(tpots), rel=1e-5)
  assert row["costs"]["chunk_s"] == pytest.approx(COSTS.chunk_s)
  even = predicted_row(case, at_even_pace(setup), dict.fromkeys(MEANS, 2.0))
  assert even["even_pace"] is True
  served_s = sum(starts) + sum(
    (turn.max_new_tokens - 1) * tpot for turn, tpot in zip(case.turns, tpots, strict=True)
  )
  assert row["slot_busy_ratio"] == pytest.approx(served_s / (2 * row["seconds"]), rel=0.01)


def turn_at(turn: Request, arrival_s: float) -> Request:
  return Request(turn.id, turn.prompt, turn.max_new_tokens, user=turn.id, arrival_s=arrival_s)


def test_activations_are_half_of_what_is_written():
  """Of an OPT; nothing runs but the simulator."""
  loaded, config, rows = load(OPT), CacheConfig(2, 256), []
  for policy in (make_policy("dense"), keeping(make_policy("dense"))):
    runner = prepare(loaded.model, policy, "resident", config, chunk_tokens=64)
    case = Case(loaded, runner, three_rounds(), "lru", host_bytes=1 << 30)
    setup = measured_setup(case, of_costs(COSTS))
    rows.append(predicted_row(case, setup, dict.fromkeys(MEANS, 1.0)))
  assert rows[1]["disk_written_bytes"] * 2 == rows[0]["disk_written_bytes"]
  assert [row["tensors"] for row in rows] == ["keys and values", "activations"]
