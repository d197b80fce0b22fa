"""FlexiCache on a simulated machine, by hand and under the serving loop; retention of scores."""

from __future__ import annotations

import dataclasses

import pytest

from eval.results import make_row
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Outcome, Request
from kvjax.engine.serving import serve
from kvjax.sim import costs, machine
from kvjax.sim.backend import NO_TOKEN, SimBackend
from models import abstract
from scripts.reproduce_flexicache import accuracy, online, served, serving_flags, throughput
from scripts.reproduce_flexicache.case import Case, Serving
from scripts.reproduce_flexicache.simulated import TieredBackend, Tiers
from tests.kvjax.test_sim import CONFIG, PLAIN

BUDGET, PAGE, PERIOD, SHARE = 32, 16, 4, 0.25
TIERS = Tiers(BUDGET, PAGE, fraction=0.5, period=PERIOD, promoted_ratio=SHARE)
TOKEN_BYTES, WEIGHTS = 256, 2 * 3072 + 1600
RELOAD_S = 0.5 + SHARE * 0.5 * BUDGET * TOKEN_BYTES / 1e5  # over the link of PLAIN


def _request(prompt=100, new=9, number=0, arrival_s=0.0):
  return Request(number, (0,) * prompt, new, arrival_s=arrival_s)


def _step_s(length, share):
  """A row that reads its budget, and of the bounds of its pages this share."""
  bounds = share * -(-length // PAGE) * TOKEN_BYTES
  return costs.decode_step_s(CONFIG, PLAIN, [min(length, BUDGET)], ranked_bytes=bounds)


def test_steps_of_a_row_by_hand():
  """All heads are ranked at steps 1, 4 and 8, half of them at others; steps 5 and 9 wait."""
  backend = TieredBackend(CONFIG, PLAIN, 2, TIERS)
  assert backend.start(0, _request()).seconds == costs.prefill_s(CONFIG, PLAIN, 100)
  for step in range(1, 10):
    expected = _step_s(100 + step, 1 if step in (1, 4, 8) else 0.5)
    assert backend.reloading(0) == (step in (5, 9))
    expected += RELOAD_S if step in (5, 9) else 0
    made = backend.step({0: NO_TOKEN})
    assert made.tokens == {0: NO_TOKEN} and made.seconds == pytest.approx(expected)
    assert backend.token_s[-1] == pytest.approx(expected)
  assert backend.reload_s == pytest.approx([RELOAD_S] * 2)
  assert backend.reloaded_s == pytest.approx([backend.token_s[4], backend.token_s[8]])


def test_within_the_budget_nothing_is_ranked_and_nothing_moves():
  backend = TieredBackend(CONFIG, PLAIN, 1, TIERS)
  backend.start(0, _request(prompt=BUDGET - 5))
  for length in range(BUDGET - 4, BUDGET + 1):
    seconds = backend.step({0: NO_TOKEN}).seconds
    assert seconds == pytest.approx(costs.decode_step_s(CONFIG, PLAIN, [length]))
  assert not backend.reload_s


def test_without_tiers_it_is_the_dense_backend():
  asked = [_request(prompt=50, new=6)]
  ends = []
  for backend in (TieredBackend(CONFIG, PLAIN, 2), SimBackend(CONFIG, PLAIN, 2)):
    [done] = serve(asked, backend, VirtualClock())
    ends.append((done.ttft_s, done.ended_s))
  assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize("sits_out", [True, False])
def test_a_row_that_waits_and_one_that_goes_on(sits_out):
  """The second one starts a step later, so that they are ranked at different steps; a reload is
  over before the step of the other one is."""
  quick = PLAIN._replace(transfer_s=0.01)
  backend = TieredBackend(CONFIG, quick, 2, TIERS._replace(sits_out=sits_out))
  clock, late = VirtualClock(), costs.prefill_s(CONFIG, PLAIN, 100) + 0.001
  asked = [_request(new=30), _request(number=1, new=30, arrival_s=late)]
  done = list(serve(asked, backend, clock))
  assert all(one.outcome is Outcome.DONE and len(one.tokens) == 30 for one in done)
  out = sum(one.sat_out for one in done)
  assert out >= 7 if sits_out else out == 0
  assert len(backend.reload_s) == 2 * (29 // PERIOD) and backend.rows == 2 * 29
  assert min(backend.reloaded_s) > RELOAD_S - 0.49 + 0.04
  assert clock.now() == pytest.approx(backend._now_s)


def test_one_link_serves_one_row_after_another():
  backend = TieredBackend(CONFIG, PLAIN, 3, TIERS)
  for slot in range(3):
    backend.start(slot, _request(number=slot))
  for _ in range(PERIOD):
    backend.step(dict.fromkeys(range(3), NO_TOKEN))
  assert backend.reload_s == pytest.approx([RELOAD_S, 2 * RELOAD_S, 3 * RELOAD_S])
  backend.stop(0)  # what it does not need any more is on the link all the same
  assert backend.reloading(1) and backend.reloading(2)


def test_room_on_both_tiers():
  """Of 200 tokens half the heads have all, the others 48; 13 bounds. The prompt comes whole."""
  row = (100 + 24 + 13) * TOKEN_BYTES

  def backend(room, host=1e9):
    device = (WEIGHTS * 4 + room) / 0.9 + 1
    return TieredBackend(CONFIG, PLAIN._replace(device_bytes=device, host_bytes=host), 4, TIERS)

  request = _request(prompt=190, new=10)
  assert backend(190 * TOKEN_BYTES).why_not(request) is None
  assert "200 tokens of prompt and answer, which plain has no r" in backend(
    189 * TOKEN_BYTES
  ).why_not(request)
  for room, fits in ((row + 190 * TOKEN_BYTES, True), (row + 189 * TOKEN_BYTES, False)):
    one = backend(room)
    one.start(0, request)
    assert one.device_bytes == row and not one.fits(request)  # a step comes first
    one.step({0: NO_TOKEN})
    assert one.fits(request) == fits
  half = 100 * TOKEN_BYTES  # of the host's, a row
  for host, fits in ((2 * half, True), (2 * half - 1, False)):
    one = backend(1e6, host)
    one.start(0, request)
    one.step({0: NO_TOKEN})
    assert one.fits(request) == fits
  with pytest.raises(ValueError, match=r"^0\.0 GB of weights leave no room on plain with 0\.0"):
    TieredBackend(CONFIG, PLAIN._replace(device_bytes=1e4), 1)


def _case(**serving):
  options = {"requests": 30, "prompt_tokens": (900, 2000), "output_tokens": (5, 60)} | serving
  config = dataclasses.replace(CONFIG, max_tokens=4096)
  link = PLAIN._replace(transfer_s=1e-3, link_bytes_per_s=1e6, device_bytes=2e6)
  requests = Serving(
    machine=link,
    slots=8,
    output_lengths=(10, 60),
    rates=(0.05, 5.0),
    promoted_ratio=0.3,
    seed=0,
    **options,
  )
  return Case("plain", config, (), (2, 4), PAGE, 0.25, PERIOD, "", (), requests)


def test_throughput_gains_with_the_answers():
  rows = throughput.run(_case())
  assert [row["output_tokens"] for row in rows] == [10] * 3 + [60] * 3
  gains = {(row["output_tokens"], row["budget_tokens"]): row["speedup_vs_dense"] for row in rows}
  assert gains[10, None] == 1 < gains[10, 32] < gains[60, 32] and gains[60, 64] < gains[60, 32]
  assert all(row["simulated"] and row["device"] == "plain" for row in rows)
  tokens = {row["output_tokens"]: 0 for row in rows}
  for one in served.together(_case().serving, 10):
    tokens[10] += len(one.prompt) + 10
  assert rows[0]["tokens_per_s"] / rows[0]["decode_tokens_per_s"] == pytest.approx(tokens[10] / 300)


def test_online_is_slower_the_more_come():
  rows = online.run(_case())
  by = {(row["rate"], row["budget_tokens"], row["waiting"]): row for row in rows}
  assert len(by) == len(rows) == 2 * 5
  for budget, waiting in ((None, None), (32, online.ROWS), (64, online.STEP)):
    slow, fast = by[5.0, budget, waiting], by[0.05, budget, waiting]
    assert slow["ttft_s_mean"] > fast["ttft_s_mean"] and slow["rows_per_step"] > 2
  for row in rows:
    assert (row["sat_out_ratio"] > 0) == (row["waiting"] == online.ROWS)
  crowded = {waiting: by[5.0, 32, waiting] for waiting in (online.ROWS, online.STEP)}
  assert crowded[online.ROWS]["sat_out_ratio"] > 0.02
  assert crowded[online.ROWS]["token_s_p50"] < crowded[online.STEP]["token_s_p50"]


def test_requests_are_the_same_at_every_rate():
  serving = _case().serving
  slow, fast = ([*served.one_by_one(serving, rate)] for rate in (0.5, 2.0))
  for a, b in zip(slow, fast, strict=True):
    assert a.prompt == b.prompt and a.max_new_tokens == b.max_new_tokens
    assert a.arrival_s == pytest.approx(4 * b.arrival_s)
  lengths = [len(one.prompt) for one in slow]
  assert 900 <= min(lengths) < 1200 and 1700 < max(lengths) <= 2000


def test_what_cannot_be_served_is_refused():
  with pytest.raises(
    ValueError, match=r"request \d+ of \d+ tokens of prompt and answer, which pla"
  ):
    throughput.run(_case(prompt_tokens=(3000, 4090)))
  for text in ("0", "x", "inf", "-1"):
    with pytest.raises(ValueError, match=f"--rates=1,{text}; expected positive numbers separated"):
      serving_flags._rates(["1", text])


def test_the_gain_at_the_papers_size():
  """Llama-3.1-8B on an H100 NVL: few requests, between no gain and that of the artifact."""
  config, one = abstract("random:llama-3.1-8b")[0].config, machine("h100-nvl")
  serving = Serving(one, 64, 64, (10_000, 30_000), (200,), (20, 200), (0.4,), 0.29, 0)
  case = Case("llama", config, (), (64, 128), 16, 0.25, 16, "", (), serving)
  dense, small, large = throughput.run(case)
  assert 1.1 < large["speedup_vs_dense"] < small["speedup_vs_dense"] < 1.5
  assert small["rows_per_step"] > 1.5 * dense["rows_per_step"]


def _answer(task, policy, budget, score, dense, **more):
  fields = {"metric": "f1", "num_examples": 2, "dense_score": dense} | more
  kept = score / dense if dense else None
  return make_row(
    task=task, policy=policy, budget_tokens=budget, score=score, retention=kept, **fields
  )


def test_retention_of_several_runs():
  """A run for each budget: dense is in both, and a task that it fails says nothing."""
  profile = "flexicache:profile=heads.json"
  rows = [
    row
    for budget, kept in ((1024, 0.5), (2048, 1.0))
    for row in (
      _answer("a", "dense", None, 0.8, 0.8),
      _answer("b", "dense", None, 0.0, 0.0),
      _answer("a", profile, budget, 0.8 * kept, 0.8, recall_bytes_per_step=2e6),
      _answer("b", profile, budget, 0.1, 0.0, recall_bytes_per_step=4e6),
      _answer("a", "quest", budget, 0.4, 0.8),
      _answer("a", "streaming", budget, 0.1, 0.8),
    )
  ]
  found = accuracy.retained(rows)
  assert len(found) == 2 + 2 * 3 and {*map(accuracy.kind, found)} == {
    "dense",
    "quest",
    "flexicache",
  }
  scores, moved = accuracy.compare(found)
  assert scores.ours == (
    "flexicache 0.50 and 0.50, quest 0.50 and 0.50 at 1,024 tokens; "
    "flexicache 1.00 and 1.00, quest 0.50 and 0.50 at 2,048 tokens"
  )
  assert "and 4 questions in all" in scores.reason
  assert moved.ours == "flexicache 3.00 at 1,024; flexicache 3.00 at 2,048"
  [alone] = accuracy.compare([row for row in found if accuracy.kind(row) != "flexicache"])
  assert alone.ours == "quest 0.50 and 0.50 at 1,024 tokens; quest 0.50 and 0.50 at 2,048 tokens"
  uneven = [_answer("a", "quest", 64, 0.1, 0.5), _answer("b", "quest", 64, 0.3, 0.1)]
  assert accuracy.compare(uneven)[0].ours == "quest 1.60 and 0.67 at 64 tokens"
  with pytest.raises(ValueError, match="no task has a score of dense attention and another"):
    accuracy.retained(rows[:2])
