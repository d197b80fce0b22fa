"""The serving loop over a backend that computes nothing, in virtual time."""

from __future__ import annotations

import ast
import itertools
import random
import sys
from pathlib import Path

import pytest

import kvjax.engine
from kvjax.engine.clock import VirtualClock, WallClock
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.engine.serving import Fcfs, Made, Server, serve

CAPACITY, STOP = 40, 7


def answer(prompt, count: int) -> list[int]:
  """What the fake model makes of a prompt; every token hangs on all that was fed before."""
  fed = list(prompt)
  for _ in range(count):
    fed.append(hash(tuple(fed)) % 90 + 10)
  return fed[len(prompt) :]


class Fake:
  """Prefills in a second for 10 tokens, decodes in a tenth; checks how it is used."""

  def __init__(self, slots=2, stops=(), reloading=lambda backend, slot: False, lost=()):
    self.slots = slots
    self.fed: dict[int, list[int]] = {}
    self.steps: list[dict[int, int]] = []
    self.stops, self.lost, self._reloading = stops, lost, reloading

  def why_not(self, request):
    total = len(request.prompt) + request.max_new_tokens
    return None if total <= CAPACITY else f"{total} tokens, and a slot has {CAPACITY}"

  def fits(self, request):
    return True

  def start(self, slot, request):
    assert slot not in self.fed and 0 <= slot < self.slots
    self.fed[slot] = list(request.prompt)
    return Made({slot: self._next(slot)}, len(request.prompt) / 10)

  def step(self, tokens):
    assert tokens and tokens.keys() <= self.fed.keys()
    self.steps.append(dict(tokens))
    for slot, token in tokens.items():
      assert token == self._next(slot)  # a request goes on where it was
      self.fed[slot].append(token)
    lost = {slot: "lost" for slot in tokens if len(self.fed[slot]) in self.lost}
    return Made({slot: self._next(slot) for slot in tokens}, 0.1, lost)

  def stop(self, slot):
    del self.fed[slot]

  def reloading(self, slot):
    return self._reloading(self, slot)

  def _next(self, slot):
    return STOP if len(self.fed[slot]) in self.stops else answer(self.fed[slot], 1)[0]


def request(i, length=10, new=3, **fields) -> Request:
  return Request(i, tuple(range(100 * i, 100 * i + length)), new, **fields)


def served(requests, backend=None, **options) -> dict[int, Finished]:
  ended = list(serve(requests, backend or Fake(), VirtualClock(), **options))
  assert len({finished.request.id for finished in ended}) == len(ended)
  return {finished.request.id: finished for finished in ended}


def test_times_by_hand():
  """Two slots. 0 arrives at 0, 1 at 0.5, 2 at 0.6; a prompt takes a second, a step 0.1."""
  ended = served([request(0, arrival_s=0), request(1, arrival_s=0.5), request(2, arrival_s=0.6)])
  # 0 is read until 1 and decodes until 1.1, 1 is read until 2.1, and both decode until 2.2, where 0
  # ends; 2 is read until 3.2, both decode until 3.3, where 1 ends, and 2 alone until 3.4.
  expected = {0: (0, 1, 2.2), 1: (1.1, 2.1, 3.3), 2: (2.2, 3.2, 3.4)}
  for i, (started, first, end) in expected.items():
    finished = ended[i]
    assert finished.outcome is Outcome.DONE
    assert list(finished.tokens) == answer(finished.request.prompt, 3)
    assert (finished.started_s, finished.first_token_s, finished.ended_s) == pytest.approx(
      (started, first, end)
    )
  assert ended[2].queueing_s == pytest.approx(1.6)
  assert ended[2].ttft_s == pytest.approx(2.6)
  assert ended[2].tpot_s == pytest.approx(0.1)
  assert served([request(0, new=1)])[0].tpot_s is None


def test_a_stop_token_ends_and_is_not_given():
  ended = served([request(0, new=9, stop_ids=(STOP,)), request(1, new=9)], Fake(stops=(10, 13)))
  assert (ended[0].tokens, ended[0].outcome, ended[0].tpot_s) == ((), Outcome.DONE, None)
  assert len(ended[1].tokens) == 9 and ended[1].tokens[3] == STOP  # not one of its own


def test_the_loop_sleeps_until_the_next_arrival():
  ended = served([request(0), request(1, arrival_s=100)])
  assert ended[1].queueing_s == 0 and ended[1].ended_s == pytest.approx(101.2)


def test_an_arrival_that_is_late_in_its_order_is_served():
  ended = served([request(0, arrival_s=5), request(1, arrival_s=4)])
  assert ended[1].outcome is Outcome.DONE and ended[1].queueing_s > 1


def test_refusals_are_typed_and_harm_nobody():
  requests = [request(i) for i in range(6)]
  requests.insert(1, request(9, length=38))
  ended = served(requests, queue_limit=2)
  outcomes = {i: finished.outcome for i, finished in ended.items()}
  done, full = Outcome.DONE, Outcome.QUEUE_FULL  # two have slots, two may wait
  assert outcomes == {0: done, 1: done, 2: done, 3: done, 4: full, 5: full, 9: Outcome.UNFIT}
  assert ended[9].reason == "41 tokens, and a slot has 40"
  assert (ended[9].tokens, ended[9].queueing_s, ended[9].ttft_s) == ((), None, None)
  assert all(list(ended[i].tokens) == answer(requests[0 if i == 0 else i + 1].prompt, 3)
             for i in range(4))  # fmt: skip


def test_a_row_that_is_lost_keeps_what_was_good():
  ended = served([request(0, new=9), request(1, length=2, new=5)], Fake(lost=(13,)))
  assert ended[0].outcome is Outcome.FAILED and ended[0].reason == "lost"
  assert list(ended[0].tokens) == answer(ended[0].request.prompt, 3)
  assert ended[1].outcome is Outcome.DONE and len(ended[1].tokens) == 5


def test_two_of_one_id_at_a_time():
  with pytest.raises(ValueError, match="request 3 has not ended; give another one an id"):
    served([request(3), request(3)])
  assert len(list(serve([request(3), request(3, arrival_s=50)], Fake(), VirtualClock()))) == 2


def test_a_scheduler_that_starts_nobody_is_told():
  class Stubborn(Fcfs):
    def next(self, now, fits):
      return None

  with pytest.raises(RuntimeError, match="all slots are free, and the scheduler starts none"):
    served([request(0)], scheduler=Stubborn())


def test_a_scheduler_that_waits_for_something_is_woken():
  class Reads(Fcfs):
    """Each request can start five seconds after it came."""

    def next(self, now, fits):
      head = next(iter(self._waiting.values()), None)
      return super().next(now, fits) if head and now >= head.arrival_s + 5 else None

    def wakes_at(self, now):
      return min((r.arrival_s + 5 for r in self._waiting.values()), default=None)

  ended = served([request(0), request(1, arrival_s=3)], scheduler=Reads())
  assert ended[0].queueing_s == 5
  assert ended[1].started_s == 8


def test_preemption_feeds_again_what_was_made():
  backend = Fake(slots=1)
  server = Server(backend, VirtualClock())
  server.submit(request(0, new=6))
  server.submit(request(1, new=2))
  for _ in range(3):
    server.step()
  assert server.preempt(0) and not server.preempt(0) and not server.preempt(1)
  while server.busy:
    server.step()
  first, second = server.take_ended()
  assert (first.request.id, second.request.id) == (1, 0)
  assert list(second.tokens) == answer(second.request.prompt, 6) and second.preemptions == 1
  # Three steps before it lost its slot, which are made up for: no token came twice or not at all.
  assert len(backend.steps) == 3 + 1 + 5
  assert second.ttft_s == 1 and server.usage[0].new_tokens == 8
  assert server.usage[0].prompt_tokens == 10 + 10 + 10


def test_rows_whose_reload_is_on_its_way_sit_out_and_others_go_on():
  def every_third_step_of_slot_0(backend, slot):
    return slot == 0 and len(backend.steps) % 3 == 1

  backend = Fake(reloading=every_third_step_of_slot_0)
  ended = served([request(0, new=7), request(1, new=7)], backend)
  assert [sorted(step) for step in backend.steps[:3]] == [[0, 1], [1], [0, 1]]
  assert ended[0].sat_out == 2 and ended[1].sat_out == 0
  assert all(list(f.tokens) == answer(f.request.prompt, 7) for f in ended.values())
  # Where all would sit out, the step waits for them.
  ended = served([request(0)], Fake(reloading=lambda backend, slot: True))
  assert ended[0].outcome is Outcome.DONE and ended[0].sat_out == 0


def test_anything_at_any_time():
  """Whatever arrives, is cancelled, preempted or lost: each ends once, with its own tokens."""
  rng = random.Random(5)
  backend = Fake(slots=3, reloading=lambda backend, slot: rng.random() < 0.2, lost=(37,))
  server, clock = Server(backend, VirtualClock(), queue_limit=4), itertools.count()
  ended: list[Finished] = []
  for _ in range(20_000):
    kind = rng.random()
    if kind < 0.2:
      i = next(clock)
      server.submit(request(i, rng.randint(1, 25), rng.randint(1, 18), user=i % 5))
    elif kind < 0.23 and server.busy:
      assert server.cancel(rng.choice(list(server._live)))
    elif kind < 0.3 and server.running:
      assert server.preempt(rng.choice(list(server.running)))
    server.step()
    assert set(backend.fed) == set(server._running)
    assert sorted([*server._free, *server._running]) == [0, 1, 2]
    assert len(server._scheduler) + len(server._running) == len(server._live)
    ended += server.take_ended()
  while server.busy:
    server.step()
  ended += server.take_ended()
  assert not backend.fed and not server.cancel(0) and not server.preempt(0)
  assert sorted(finished.request.id for finished in ended) == list(range(next(clock)))
  for finished in ended:
    tokens, asked = list(finished.tokens), finished.request
    assert tokens == answer(asked.prompt, len(tokens))
    assert (len(tokens) == asked.max_new_tokens) == (finished.outcome is Outcome.DONE)
    times = [asked.arrival_s, finished.started_s, finished.first_token_s, finished.ended_s]
    known = [time for time in times if time is not None]
    assert known == sorted(known)
  counts = {outcome: sum(f.outcome is outcome for f in ended) for outcome in Outcome}
  assert min(counts.values()) > 20 and max(f.preemptions for f in ended) > 1, counts
  for user, usage in server.usage.items():
    own = [finished for finished in ended if finished.request.user == user]
    assert usage.arrived == usage.ended == len(own)
    assert usage.new_tokens == sum(len(finished.tokens) for finished in own)
    assert usage.queueing_s == pytest.approx(sum(f.queueing_s or 0 for f in own))


def test_nothing_is_kept_of_what_has_ended():
  """A trace may be endless: requests are taken as they arrive, and given as they end."""
  taken = itertools.count()
  trace = (request(i, 1, 2, arrival_s=i, user=i % 3) for i in taken)
  ended = serve(trace, Fake(), VirtualClock())
  for i, finished in zip(range(2000), ended, strict=False):
    assert finished.request.id == i
  assert next(taken) <= 2000 + 3


def test_wall_time_passes_by_itself():
  clock = WallClock()
  before = clock.now()
  clock.spend(1000)
  clock.wait_until(before - 1)
  assert before <= clock.now() < before + 1000


@pytest.mark.parametrize("name", ["clock", "requests", "serving"])
def test_the_loop_knows_of_no_arrays(name):
  source = Path(kvjax.engine.__file__).with_name(f"{name}.py").read_text("utf-8")
  for node in ast.walk(ast.parse(source)):
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module] if isinstance(node, ast.ImportFrom) else []
    for module in names:
      assert module.split(".")[0] in sys.stdlib_module_names or module in (
        "kvjax.engine.clock",
        "kvjax.engine.requests",
      )
