"""The dual queue: disk-HRRN by its definition, order of arrival, pins, and every way to end."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvjax.bidaw import DualQueue, InOrder, Placement, PreviousAnswer, Read, TimedDisk, Where, lru
from kvjax.bidaw.preparing import Preparing
from kvjax.bidaw.ready import MOST_PASSED
from kvjax.bidaw.scheduler import ENDED_AT_ONCE
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Outcome, Request
from kvjax.engine.serving import Made, serve

HOST = 1000


def request(id: int, user: int, arrival_s: float = 0.0) -> Request:
  return Request(id, (1,), 1, user, arrival_s)


def yes(request) -> bool:
  return True


def on_disk(*sizes: int, disk=None, make=DualQueue, **options) -> DualQueue:
  """A queue over a disk of 100 bytes/s, with histories of users 0, 1, ... that are only there."""
  placement = Placement(HOST, lru())
  for user, size in enumerate(sizes):
    placement.arrive(user, 0)
    placement.end_turn(user, 0, 1, size)
    placement.unpin(user)
  for user in range(100, 110):  # which leave no room
    placement.arrive(user, 0)
    placement.end_turn(user, 0, 1, 95)
  for user in range(100, 110):
    placement.unpin(user)
    placement.lose(user)
  assert not placement.resident
  return make(placement, disk or TimedDisk(100), **options)


@settings(max_examples=60, deadline=None)
@given(
  entries=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=40),
  seconds=st.booleans(),
)
def test_hrrn_by_its_definition(entries, seconds):
  """The largest R = 1 + wait / cost of those that are small enough, then who came first."""
  cost = TimedDisk(2, seek_s=3).read_s if seconds else float
  preparing, waiting = Preparing(cost), {}
  for user, (arrival, size) in enumerate(entries):
    preparing.add(user, arrival, size)
    waiting[user] = arrival, size
  now, most = 9, 7
  while True:
    able = [user for user, (_, size) in waiting.items() if size <= most]
    chosen = preparing.choose(now, most)
    if not able:
      assert chosen is None
      break
    ratio = {user: 1 + (now - waiting[user][0]) / cost(waiting[user][1]) for user in able}
    best = [user for user in able if ratio[user] == pytest.approx(max(ratio.values()), rel=1e-9)]
    assert chosen == min(best, key=lambda user: (waiting[user][0], user))
    preparing.remove(chosen)
    del waiting[chosen]
    assert len(preparing) == len(waiting) and chosen not in preparing
    now += 2


def test_seconds_and_bytes_differ_by_the_seek():
  def first(**options):
    queue = on_disk(10, 100, 500, disk=TimedDisk(100, seek_s=5), **options)
    queue.arrive(request(0, 2, 0), 0)  # is read at once, to 10 s
    queue.arrive(request(1, 1, 0), 0)
    queue.arrive(request(2, 0, 8), 8)
    queue.next(10, lambda r: False)
    return {u for u in range(2) if queue._placement.where(u) is Where.READING}

  assert first() == {0}  # 2 / 10 bytes against 10 / 100
  assert first(cost=TimedDisk(100, seek_s=5).read_s) == {1}  # 2 / 5.1 s against 10 / 6


def test_reads_overlap_and_the_promoted_take_their_place_by_arrival():
  queue = on_disk(200, 100)
  queue.arrive(request(0, 0, 0.0), 0.0)  # read until 2
  queue.arrive(request(1, 50, 0.5), 0.5)  # has no history
  queue.arrive(request(2, 1, 0.6), 0.6)
  queue.arrive(request(3, 51, 0.7), 0.7)
  assert len(queue) == 4 and queue.num_ready == 2
  assert queue.next(1.0, yes).id == 1  # the ready do not wait for the disk
  assert queue.num_ready == 1
  queue.ended(request(1, 50), 1.5, 1, 10)
  assert queue.next(1.5, lambda r: r.id != 3) is None
  assert queue.wakes_at(1.5) == 2.0
  assert queue.wakes_at(2.0) == 2.0 and queue.num_ready == 2
  assert queue.next(2.0, yes).id == 0  # before 3, as it arrived before
  assert queue._placement.where(1) is Where.READING
  assert queue.next(3.0, yes).id == 2
  assert queue.next(3.0, yes).id == 3
  assert queue.next(3.0, yes) is None
  assert len(queue) == 0
  for id, user in ((0, 0), (2, 1), (3, 51)):
    queue.gave_up(request(id, user), 3.0)
  assert queue.wakes_at(3.0) is None


def test_a_read_begins_when_the_one_before_has_ended_however_late_that_is_seen():
  queue = on_disk(100, 100, 100)
  for user in range(3):
    queue.arrive(request(user, user), 0.0)
  queue.poll(2.5)
  assert queue._placement.resident == {0, 1}
  assert queue.wakes_at(2.5) == 3.0


def test_a_call_sees_to_so_many_reads_and_wakes_who_asks_for_the_others():
  queue = on_disk(*[1] * 20)
  for user in range(20):
    queue.arrive(request(user, user), 0.0)
  queue.poll(9.0)
  assert len(queue._placement.resident) == ENDED_AT_ONCE
  assert queue.wakes_at(9.0) == 9.0
  assert [queue.next(9.0, yes).id for _ in range(20)] == list(range(20))
  assert queue.wakes_at(9.0) is None


def test_in_order_the_last_makes_way_for_the_first():
  """Histories of 400 in host memory of 1000: users 1 and 2 wait there, 0 came before them."""
  queue = on_disk(400, 400, 400, make=InOrder)
  placement = queue._placement
  for id, user in ((5, 1), (6, 2)):
    queue.arrive(request(id, user, 2 + user), 3)
  assert [queue.next(99, yes).id for _ in range(2)] == [5, 6]  # both are read now
  for id, user in ((5, 1), (6, 2)):
    queue.ended(request(id, user), 100, 1, 400)
  for id, user in ((8, 2), (7, 1)):
    queue.arrive(request(id, user, 100 + user), 110)
  queue.arrive(request(9, 70, 200), 200)  # has no history, and so none that could make way
  queue.arrive(request(1, 0, 50), 210)  # was late
  assert placement.where(0) is Where.READING
  assert placement.where(1) is Where.HOST and placement.where(2) is Where.DISK
  assert [queue.next(300, yes).id for _ in range(2)] == [1, 7]
  assert queue.next(300, yes) is None  # 8 waits for room, and 9 for 8
  queue.ended(request(7, 1), 300, 1, 400)
  assert [queue.next(400, yes).id for _ in range(2)] == [8, 9]


def test_in_order_keeps_nothing_of_who_has_been_served():
  queue = on_disk(make=InOrder)
  for id in range(300):
    queue.arrive(request(id, 50 + id % 2, id), id)
    assert queue.next(id, yes).id == id
    queue.ended(request(id, 50 + id % 2), id, 1, 10)
  assert len(queue._in_host_heap) < 100


def test_reads_at_once():
  queue = on_disk(100, 100, 100, reads_at_once=2)
  for user in range(3):
    queue.arrive(request(user, user), 0.0)
  assert sum(queue._placement.where(user) is Where.READING for user in range(3)) == 2


def test_who_does_not_fit_is_passed_over_and_keeps_its_place():
  queue = on_disk()
  for id in range(5):
    queue.arrive(request(id, id, id), id)
  assert queue.next(9, lambda r: r.id > 1).id == 2
  assert [queue.next(9, yes).id for _ in range(4)] == [0, 1, 3, 4]


def test_a_choice_looks_at_so_many():
  queue = on_disk()
  for id in range(MOST_PASSED + 1):
    queue.arrive(request(id, id, id), id)
  assert queue.next(99, lambda r: r.id == MOST_PASSED) is None
  assert queue.next(99, lambda r: r.id == MOST_PASSED - 1).id == MOST_PASSED - 1
  assert queue.next(99, lambda r: r.id == MOST_PASSED).id == MOST_PASSED


def test_a_history_that_has_no_room_yet_lets_others_be_read():
  queue = on_disk(900, 300)
  placement = queue._placement
  queue.arrive(request(9, 50), 0)
  assert queue.next(0, yes).id == 9
  placement.end_turn(50, 0, 1, 500)  # it goes on, and is pinned
  queue.arrive(request(0, 0), 1)
  queue.arrive(request(1, 1), 1)
  assert placement.where(0) is Where.DISK and placement.where(1) is Where.READING
  assert queue.next(4, yes).id == 1
  assert queue.ended(request(1, 1), 5, 1, 310) is Where.HOST
  assert placement.where(0) is Where.DISK
  queue.ended(request(9, 50), 6, 1, 510)
  assert placement.where(0) is Where.READING  # 50 and 1 made way
  assert placement.resident == set()


def test_two_turns_of_one_user_are_served_one_after_the_other():
  queue = on_disk(100)
  queue.arrive(request(0, 0, 0), 0)
  queue.arrive(request(1, 0, 0), 0)
  queue.arrive(request(2, 0, 0), 0)
  assert queue.next(1, yes).id == 0
  assert queue.next(1, yes) is None
  assert len(queue) == 2
  queue.ended(request(0, 0), 2, 5, 120)
  queue.drop(request(2, 0))
  assert queue.next(2, yes).id == 1
  queue.gave_up(request(1, 0), 3)
  assert not queue._placement.pinned(0) and queue._placement.size_bytes(0) == 120
  assert len(queue) == 0


def test_drop_in_every_state():
  queue = on_disk(100, 200, 300)
  placement = queue._placement
  for id, user in enumerate((0, 1, 2, 50, 2)):  # reading, preparing twice, ready, behind
    queue.arrive(request(id, user), 0)
  for id, user in ((4, 2), (3, 50), (0, 0), (1, 1)):
    queue.drop(request(id, user))
    assert placement.pinned(user) == (id == 4)
  assert len(queue) == 1
  assert queue.next(1, yes) is None
  assert placement.resident == {0}  # the read went on
  queue.arrive(request(5, 0), 1)
  assert queue.next(1, yes).id == 5
  assert queue.next(4, yes).id == 2  # begun at 1: nobody read user 1


def test_a_request_joins_the_read_of_one_that_was_dropped():
  queue = on_disk(100)
  queue.arrive(request(0, 0), 0)
  queue.drop(request(0, 0))
  queue.arrive(request(1, 0), 0.5)
  assert queue.next(0.5, yes) is None and queue.wakes_at(0.5) == 1
  assert queue.next(1, yes).id == 1


def test_who_was_preempted_waits_where_it_was_by_arrival():
  queue = on_disk()
  queue.arrive(request(0, 50, 0), 0)
  queue.arrive(request(1, 51, 1), 1)
  assert queue.next(2, yes).id == 0
  queue.arrive(request(0, 50, 0), 3)
  assert queue.next(3, yes).id == 0
  queue.ended(request(0, 50), 4, 1, 10)
  assert not queue._placement.pinned(50)


class BadDisk(TimedDisk):
  """Cannot read the history of user 0."""

  def ended(self, now):
    return [Read(user, when, user != 0) for user, when, _ in super().ended(now)]


def test_a_history_that_cannot_be_read_is_computed_anew():
  queue = on_disk(100, 100, disk=BadDisk(100))
  queue.arrive(request(0, 0), 0)
  queue.arrive(request(1, 1), 0)
  assert queue.next(1, yes).id == 0
  assert queue._placement.where(0) is Where.NOWHERE
  assert queue.next(2, yes).id == 1
  assert queue.ended(request(0, 0), 3, 1, 110) is Where.HOST


def test_a_history_larger_than_the_host_is_ready_at_once():
  queue = on_disk(HOST + 1)
  queue.arrive(request(0, 0), 0)
  assert queue.next(0, yes).id == 0


def test_no_reads_at_once_is_an_error():
  with pytest.raises(ValueError, match="reads_at_once is 0"):
    DualQueue(Placement(HOST, lru()), TimedDisk(1), reads_at_once=0)
  for rate, seek in ((0, 0), (1, -1), (float("nan"), 0)):
    with pytest.raises(ValueError, match=f"a disk of {rate} bytes/s"):
      TimedDisk(rate, seek)


class Fake:
  """Takes two seconds for a turn, whatever is read meanwhile; histories grow by 40 bytes."""

  def __init__(self, placement, slots=3):
    self.slots, self.placement, self.running = slots, placement, {}

  def why_not(self, request):
    return None

  def fits(self, request):
    return self.placement.where(request.user) in (Where.HOST, Where.NOWHERE, Where.TOO_LARGE)

  def start(self, slot, request):
    user = request.user
    assert user not in self.running.values() and self.placement.pinned(user)
    assert self.placement.where(user) in (Where.HOST, Where.NOWHERE)
    self.running[slot] = user
    return Made({slot: 1}, 1.0)

  def step(self, tokens):
    return Made({slot: 1 for slot in tokens}, 1.0)

  def stop(self, slot):
    del self.running[slot]

  def reloading(self, slot):
    return False


@pytest.mark.parametrize("seed", range(4))
def test_served_to_the_end(seed):
  """Everything is served, each user's turns in their order, and nothing stays pinned."""
  rng = random.Random(seed)
  arrivals = sorted(rng.random() * 250 for _ in range(150))
  users = [rng.randrange(12) for _ in arrivals]
  requests = [
    Request(id, (user,), rng.choice((1, 2)), user, when)
    for id, (user, when) in enumerate(zip(users, arrivals, strict=True))
  ]
  placement = Placement(HOST, PreviousAnswer(HOST, window=50, every=20))
  disk = TimedDisk(300, seek_s=0.1)
  queue = DualQueue(
    placement, disk, reads_at_once=1 + seed % 2, cost=disk.read_s if seed > 1 else float
  )
  served = {user: [] for user in range(12)}
  for finished in serve(requests, Fake(placement), VirtualClock(), queue):
    assert finished.outcome is Outcome.DONE
    user = finished.request.user
    served[user].append(finished.request.id)
    size = min(placement.size_bytes(user) + 40, 300)
    queue.ended(finished.request, finished.ended_s, len(finished.tokens), size)
  assert served == {u: [id for id, user in enumerate(users) if user == u] for u in range(12)}
  assert not any(placement.pinned(user) for user in range(12))
  assert len(queue) == 0 and not queue._started and not queue._turn
  assert placement.evictions > 20 and disk.busy_s > 20
