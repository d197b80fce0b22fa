"""Placement: bytes are conserved, the pinned stay, free space is kept, under any policy."""

from __future__ import annotations

import random

import pytest

from kvjax.bidaw import (
  InTheWild,
  Placement,
  PreviousAnswer,
  Where,
  belady,
  fifo,
  lru,
  queue_lru,
  s3fifo,
)

HOST = 1000
POLICIES = {
  "fifo": fifo,
  "lru": lru,
  "s3fifo": lambda: s3fifo(8),
  "queue_lru": lambda: queue_lru(lambda: (3, 1, 3)),
  "belady": lambda: belady(lambda user: user * 7 % 5),
  "in_the_wild": InTheWild,
  "previous_answer": lambda: PreviousAnswer(HOST, window=40, every=10),
  "previous_answer_plain": lambda: PreviousAnswer(HOST, passed=False, window=40, every=10),
}


def turn(placement: Placement, user: int, now: float, size: int, answer: int = 10) -> Where:
  """A whole turn of a user whose history, if there is one, is read first."""
  if placement.arrive(user, now) is Where.DISK:
    assert placement.begin_read(user)
    placement.end_read(user)
  where = placement.end_turn(user, now, answer, size)
  placement.unpin(user)
  return where


def check(placement: Placement) -> None:
  """The sums that are kept are the sums of what is there, and nothing is more than the host."""
  held = placement._host
  assert placement.used_bytes == sum(held.values()) <= HOST
  kept = [u for u in held if placement.pinned(u) or placement.where(u) is Where.READING]
  assert placement.readable_bytes == HOST - sum(held[u] for u in kept)
  assert all(held[user] == placement.size_bytes(user) for user in held)
  assert placement.resident == {u for u in range(12) if placement.where(u) is Where.HOST}


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_random_events(name, seed):
  rng, evicted = random.Random(seed), []

  def on_evict(user):
    assert not placement.pinned(user)
    evicted.append(user)

  policy = POLICIES[name]()
  placement = Placement(HOST, policy, on_evict)
  sizes: dict[int, int] = {}
  open_turns: list[int] = []
  for now in range(400):
    user, event = rng.randrange(12), rng.random()
    where = placement.where(user)
    gone = len(evicted)
    if event < 0.35 and len(open_turns) < 8:
      assert placement.arrive(user, now) is where
      open_turns.append(user)
    elif event < 0.6 and where in (Where.DISK, Where.TOO_LARGE):
      fits = placement.readable_bytes >= sizes[user]
      assert placement.begin_read(user) is fits
      assert placement.where(user) is (Where.READING if fits else where)
      if fits:
        assert free_or_kept(placement)
    elif event < 0.75 and where is Where.READING:
      placement.end_read(user)
      assert placement.where(user) is Where.HOST
    elif event < 0.92 and open_turns:
      user = open_turns.pop(rng.randrange(len(open_turns)))
      if placement.where(user) is not Where.READING and rng.random() < 0.8:
        sizes[user] = sizes.get(user, 0) + rng.randrange(1, 150)
        where = placement.end_turn(user, now, rng.randrange(60), sizes[user])
        assert (where is Where.HOST) == (user in placement.resident)
        assert where is not Where.HOST or free_or_kept(placement)
      placement.unpin(user)
    elif event < 0.96:
      placement.lose(user)
      sizes.pop(user, None)
    elif not placement.pinned(user):
      placement.forget(user)
      sizes.pop(user, None)
    assert len(placement) == len(sizes)
    assert len(evicted) == placement.evictions
    assert all(
      placement.where(u) in (Where.DISK, Where.HOST, Where.READING, Where.TOO_LARGE)
      for u in evicted[gone:]
    )
    check(placement)
  for user in open_turns:
    placement.unpin(user)
  # The policy knows whom it may give up: all that are resident, each once.
  resident = placement.resident
  victims = [policy.victim() for _ in resident]
  assert set(victims) == resident
  assert policy.victim() is None
  assert len(evicted) > 5


def free_or_kept(placement: Placement) -> bool:
  """5 % is free, or all that is in host memory has to stay."""
  kept = HOST - placement.readable_bytes
  return placement.used_bytes <= max(0.95 * HOST, kept)


def test_free_space_is_made_to_the_mark_and_not_beyond():
  placement = Placement(HOST, lru())
  for user in range(9):
    assert turn(placement, user, user, 100) is Where.HOST
  assert (placement.used_bytes, placement.evictions) == (900, 0)
  turn(placement, 9, 9, 50)
  assert (placement.used_bytes, placement.evictions) == (950, 0)  # 5 % is free
  turn(placement, 10, 10, 10)
  assert (placement.used_bytes, placement.evictions) == (860, 1)
  assert placement.where(0) is Where.DISK and placement.where(1) is Where.HOST


def test_a_history_that_grows_makes_others_leave_but_not_itself():
  placement = Placement(HOST, fifo())
  turn(placement, 0, 0, 400)
  turn(placement, 1, 1, 400)
  assert turn(placement, 0, 2, 800) is Where.HOST  # it is the oldest, too
  assert placement.resident == {0}


def test_without_room_a_history_is_on_disk_only():
  placement = Placement(HOST, lru())
  for user in (0, 1):
    turn(placement, user, 0, 400)
    placement.arrive(user, 1)
  placement.arrive(2, 1)
  assert placement.end_turn(2, 2, 5, 300) is Where.DISK
  assert not placement.begin_read(2)
  assert placement.end_turn(0, 3, 5, 700) is Where.DISK  # nor does it keep what it had
  assert placement.used_bytes == 400 and placement.evictions == 0
  placement.unpin(0)
  assert placement.begin_read(2)


def test_a_history_larger_than_the_host():
  placement = Placement(HOST, lru())
  turn(placement, 1, 0, 500)
  assert turn(placement, 0, 1, HOST + 1) is Where.TOO_LARGE
  assert placement.arrive(0, 2) is Where.TOO_LARGE
  assert not placement.begin_read(0)
  assert placement.resident == {1}


def test_a_history_of_all_the_host_may_use_the_free_space():
  placement = Placement(HOST, lru())
  turn(placement, 1, 0, 500)
  assert turn(placement, 0, 1, HOST) is Where.HOST
  assert placement.resident == {0}


def test_misuse_is_an_error():
  with pytest.raises(ValueError, match="host_bytes is 0"):
    Placement(0, lru())
  placement = Placement(HOST, lru())
  with pytest.raises(ValueError, match="user 3 is nowhere; read those on disk"):
    placement.begin_read(3)
  with pytest.raises(KeyError, match="no request of user 3"):
    placement.unpin(3)
  turn(placement, 0, 0, 900)
  turn(placement, 1, 1, 900)
  placement.arrive(0, 2)
  with pytest.raises(ValueError, match="have not ended; end them"):
    placement.forget(0)
  placement.begin_read(0)
  with pytest.raises(ValueError, match="being read; end the read"):
    placement.end_turn(0, 3, 1, 910)
