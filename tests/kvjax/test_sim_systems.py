"""Whole systems in virtual time: by hand, steps at one go, memory without end, conservation."""

from __future__ import annotations

import dataclasses

import pytest

from kvjax.bidaw import DualQueue, TimedDisk, Where, lru
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.sim import costs, machine
from kvjax.sim.engine_costs import EngineCosts
from kvjax.sim.generator import INTERACTIVE, generate
from kvjax.sim.hardware import Machine
from kvjax.sim.systems import (
  SYSTEMS,
  Design,
  EngineClock,
  Setup,
  System,
  kept_bytes,
  read_share,
)
from kvjax.sim.workloads import requests
from tests.kvjax.test_sim import CONFIG

OPT = dataclasses.replace(CONFIG, family="opt", num_kv_heads=CONFIG.num_heads, max_tokens=2048)
A800: Machine = machine("a800")._replace(disk_bytes_per_s=2e6, product_flops_per_s=2e9)


def setup(host_tokens: int) -> Setup:
  return Setup(OPT, A800, host_tokens * costs.kv_bytes(OPT, 1, A800.item_bytes))


def served(name: str, host_tokens: int, *, users=60, rate=40, one_by_one=False):
  """A system that has served a workload, and what has ended by id."""
  system = System(SYSTEMS[name], setup(host_tokens))
  if one_by_one:
    system.backend = OneByOne(system.backend)
  ended = list(system.serve(requests(generate(INTERACTIVE, users, rate, 3), OPT.max_tokens)))
  return system, {one.request.id: one for one in ended}


class OneByOne:
  """A backend without `skip`."""

  def __init__(self, backend):
    for name in ("slots", "why_not", "fits", "start", "step", "stop", "reloading"):
      setattr(self, name, getattr(backend, name))
    self.context_tokens = backend.context_tokens


@pytest.mark.parametrize("name", SYSTEMS)
def test_steps_at_one_go_are_steps_one_by_one(name):
  fast, slow = served(name, 8000)[1], served(name, 8000, one_by_one=True)[1]
  assert fast.keys() == slow.keys() and len(fast) > 1000
  for id, one in fast.items():
    other = slow[id]
    assert one.tokens == other.tokens and one.outcome is Outcome.DONE
    times = (one.started_s, one.first_token_s, one.ended_s)
    assert times == pytest.approx((other.started_s, other.first_token_s, other.ended_s), rel=1e-9)


def test_with_memory_without_end_bidaw_is_ideal():
  wide = System(SYSTEMS["without_tensor"], setup(10**9))
  ideal = System(SYSTEMS["ideal"], setup(1))
  workload = generate(INTERACTIVE, 60, 40, 3)
  pairs = [list(one.serve(requests(workload, OPT.max_tokens))) for one in (wide, ideal)]
  assert pairs[0] == pairs[1]
  assert wide.placement.misses == 0 and wide.disk.read_bytes == 0


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("host_tokens", [1500, 8000])
def test_everybody_is_served_in_order_and_nothing_stays_pinned(name, host_tokens):
  """Host memory for less than a conversation, and for a dozen; the disk is far too slow."""
  system, ended = served(name, host_tokens)
  asked = list(requests(generate(INTERACTIVE, 60, 40, 3), OPT.max_tokens))
  assert sorted(ended) == [one.id for one in asked]
  before: dict[int, float] = {}
  for id in sorted(ended):
    one = ended[id]
    assert one.started_s is not None and one.started_s >= before.get(one.request.user, 0)
    before[one.request.user] = one.ended_s
  placement = system.placement
  assert len(system.queue) == 0 and not any(map(placement.pinned, before))
  held = sum(placement.size_bytes(user) for user in placement.resident)
  assert placement.used_bytes == held <= placement.host_bytes
  assert placement.hits + placement.misses == len(asked) - len(before) or name == "ideal"
  new = sum(len(one.prompt) + one.max_new_tokens for one in asked)
  assert system.written_bytes == new * system.token_bytes <= system.rewritten_bytes


def turn(id: int, user: int, arrival_s: float, prompt=100, new=2) -> Request:
  return Request(id, (0,) * prompt, new, user, arrival_s)


def by_hand(name: str) -> dict[int, float]:
  """When turns start. Host memory of 300 tokens; the disk reads a history of 102 in a second.

  Users 0, 1 and 2 have a turn each, after which one of the histories is on disk only, that of user
  0. It is asked for at 100 s, and that of user 2, in host memory, at 100.1 s.
  """
  token_bytes = costs.kv_bytes(OPT, 1, 2)
  disk = A800._replace(
    disk_bytes_per_s=102 * token_bytes, transfer_s=0.0, product_flops_per_s=312e12
  )
  asked = [turn(user, user, 10.0 * user) for user in range(3)]
  asked += [turn(3, 0, 100.0, 5), turn(4, 2, 100.1, 5)]
  system = System(SYSTEMS[name], Setup(OPT, disk, 300 * token_bytes))
  return {one.request.id: one.started_s or 0.0 for one in system.serve(asked)}


def test_who_waits_for_the_disk_by_hand():
  """In order the second waits for the first's read of a second; Bidaw serves it at once."""
  assert [by_hand("ideal")[id] for id in (3, 4)] == pytest.approx([100, 100.1])
  assert [by_hand("recompute")[id] for id in (3, 4)] == pytest.approx([100, 100.1])
  waits = by_hand("cached_attention")
  assert waits[3] == pytest.approx(101) and waits[4] >= waits[3]
  dual = by_hand("dual_queue")
  assert [dual[id] for id in (3, 4)] == pytest.approx([101, 100.1])
  flashgen = by_hand("flashgen")  # a fast device computes nearly all anew
  assert flashgen[3] == pytest.approx(100, abs=1e-3) and flashgen[4] >= flashgen[3]


ENGINE = EngineCosts(
  chunk_tokens=64,
  segments=(4096,),
  start_s=1.0,
  chunk_s=0.0,
  restore_s=0.0,
  attend_s=0.0,
  step_s=4.0,
  row_s=0.0,
  token_s=0.0,
  cold_s=0.0,
  store_s=8.0,
  lost_beside_read=0.0,
  wake_s=0.0,
)


def on_an_engine(engine: EngineCosts) -> dict[int, Finished]:
  token_bytes = costs.kv_bytes(OPT, 1, 2)
  disk = A800._replace(disk_bytes_per_s=68 * token_bytes, transfer_s=0.0)
  asked = [turn(user, user, arrival_s) for user, arrival_s in enumerate((0.0, 10.0, 40.0, 60.0))]
  asked += [turn(4, 3, 100.0, 5, new=9), turn(5, 0, 102.0, 5, new=3), turn(6, 1, 102.5, 5)]
  system = System(SYSTEMS["dual_queue"], Setup(OPT, disk, 310 * token_bytes, 4, engine))
  return {one.request.id: one for one in system.serve(asked)}


def test_a_measured_engine_by_hand():
  """A start takes 1 s, a step 4 s, a turn that ended 8 s; the disk reads a history in 1.5 s.

  Histories of users 0 and 1 are on disk only, and both ask during a step for user 3.
  """
  ended = on_an_engine(ENGINE)
  # The second turn arrives at 10 s and waits until the first is stored.
  times = [(ended[id].first_token_s, ended[id].ended_s) for id in (0, 1)]
  assert times == [(1, 5), (14, 18)]
  # The reads are asked for at 105 s, after the step. The first has ended at 106.5 s, which is seen
  # at 109 s, and the other begins only then; a start and a step later it is there.
  assert ended[4].first_token_s == 101
  assert [ended[id].started_s for id in (5, 6)] == [109, 114]


def test_a_measured_engine_is_slower_beside_a_read():
  """Half as fast, so that a read of 1.5 s costs 0.75 s of what is beside it.

  The step of 4 s does; and so does the start of 1 s, at whose end the other read has ended.
  """
  ended = on_an_engine(ENGINE._replace(lost_beside_read=0.5))
  assert [ended[id].started_s for id in (5, 6)] == [109.75, 109.75 + 1.75]


def test_a_measured_engine_wakes_late():
  """Not where it was busy when a turn arrived."""
  ended = on_an_engine(ENGINE._replace(wake_s=0.25))
  assert [ended[id].started_s for id in (0, 1, 2, 4)] == [0, 13, 40.25, 100.25]
  clock = EngineClock(ENGINE._replace(wake_s=0.25), TimedDisk(100.0))
  for then in (4.0, 4.25, 4.1):  # of which the last two have come by then
    clock.wait_until(then)
    assert clock.now() == 4.25


def test_the_pace_of_a_measured_engine():
  """Two periods of 0.25 s, the second half as fast; half as fast again beside a read."""
  disk = TimedDisk(100.0)
  clock = EngineClock(ENGINE._replace(lost_beside_read=0.5, pace=(1.0, 2.0)), disk)
  disk.begin(0, 10, 0.0)  # until 0.1 s
  ends = []
  for seconds in (0.1, 0.2, 0.1, 1.0):
    clock.spend(seconds)
    ends.append(clock.now())
  assert ends == pytest.approx([0.15, 0.45, 0.575, 1.575])
  disk.begin(0, 10, 0.3)  # which is over
  clock.spend(1.0)
  assert clock.now() == pytest.approx(2.575)


def test_a_period_may_end_beside_a_read():
  """0.125 of 0.2 s are done in the first period, 0.0125 in what is left of the read."""
  disk = TimedDisk(100.0)
  clock = EngineClock(ENGINE._replace(lost_beside_read=0.5, pace=(1.0, 2.0)), disk)
  disk.begin(0, 30, 0.0)  # until 0.3 s
  clock.spend(0.2)
  assert clock.now() == pytest.approx(0.25 + 0.05 + 0.125)


def test_flashgen_reads_and_computes_equally_long():
  one = setup(1)
  token_bytes = costs.kv_bytes(OPT, 1, A800.item_bytes)
  share = read_share(one, token_bytes)
  compute_s = 2 * OPT.num_layers * costs.layer_numbers(OPT) / A800.product_flops_per_s
  assert share * token_bytes / A800.disk_bytes_per_s == pytest.approx((1 - share) * compute_s)


def test_activations_are_kept_only_where_they_are_smaller():
  assert kept_bytes(SYSTEMS["bidaw"], setup(1)) == (costs.activation_bytes(OPT, 1, 2), True)
  grouped = Setup(dataclasses.replace(OPT, num_kv_heads=1), A800, 1)
  assert kept_bytes(SYSTEMS["bidaw"], grouped) == (costs.kv_bytes(grouped.config, 1, 2), False)
  assert kept_bytes(SYSTEMS["recompute"], setup(1)) == (0, False)


def test_a_conversation_that_is_idle_for_an_hour_is_forgotten():
  design = Design(DualQueue[Request], lambda host_bytes: lru())
  system = System(design, setup(1000))
  asked = [turn(0, 0, 0.0), turn(1, 1, 1000.0), turn(2, 2, 3700.0), turn(3, 0, 3800.0)]
  list(system.serve(asked))
  assert system.placement.where(1) is Where.HOST and system.placement.hits == 0
