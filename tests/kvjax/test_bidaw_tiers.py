"""Histories in host memory and on disk together, under a placement and its queue."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvjax.bidaw import DualQueue, Placement, Where, lru
from kvjax.bidaw.files import HistoryFiles
from kvjax.bidaw.tiers import Tiers
from kvjax.engine.requests import Request
from tests.kvjax.known_kv import STAMP, kv_of, tokens_of

USERS, HOST_TOKENS = 8, 120


class Stand:
  """Tiers with a placement and a queue; turns are answered at once."""

  def __init__(self, folder, **options):
    self.tiers = Tiers(HistoryFiles(folder, STAMP), **options)
    self.placement = Placement(HOST_TOKENS * STAMP.token_bytes, lru(), self.tiers.evict)
    self.queue = DualQueue(self.placement, self.tiers, reads_at_once=2)
    for user, size in self.tiers.found():
      self.placement.found(user, size)
    self.now = 0.0

  def serve_next(self) -> int | None:
    """One turn of whoever is ready; his user."""
    self.now += 1
    request = self.queue.next(self.now, lambda request: True)
    if request is None:
      for read in list(self.tiers._reads.values()):
        read.result()  # instead of sleeping
      return None
    user, history = request.user, self.tiers.history(request.user)
    known = tokens_of(user, len(history.tokens))
    np.testing.assert_array_equal(history.tokens, known)
    first = history.kv_tokens
    if first:
      np.testing.assert_array_equal(np.concatenate(history.chunks), kv_of(known)[:first])
    if self.placement.where(user) is Where.HOST:
      assert first == len(known) - 1
    tokens = tokens_of(user, len(known) + len(request.prompt))
    self.tiers.end_turn(user, tokens, first, kv_of(tokens, first)[:-1])
    size = self.tiers.size_bytes(user)
    if self.queue.ended(request, self.now, 1, size) is not Where.HOST:
      self.tiers.evict(user)
    held = {user: self.tiers.size_bytes(user) for user in self.tiers._host}
    assert held.keys() == self.placement.resident
    assert sum(held.values()) <= self.placement.host_bytes
    return user


@pytest.mark.parametrize("unwritten_bytes", [1 << 20, 0])
def test_at_random(tmp_path, unwritten_bytes):
  rng, lengths = random.Random(unwritten_bytes), [0] * USERS
  reads = id = 0
  for _ in range(2):  # with a restart
    stand = Stand(tmp_path, unwritten_bytes=unwritten_bytes)
    for _ in range(60):
      for user in rng.sample(range(USERS), rng.randrange(1, 4)):
        length, id = rng.choice((2, 5, 11)), id + 1
        lengths[user] += length
        stand.queue.arrive(Request(id, (0,) * length, 1, user, stand.now), stand.now)
      while len(stand.queue):
        stand.serve_next()
    reads += stand.tiers.files.read_bytes
    assert not stand.tiers.take_faults() and stand.placement.evictions > 10
    stand.tiers.close()
  assert reads > 10_000 and max(lengths) > HOST_TOKENS  # some have come to be too large
  files = HistoryFiles(tmp_path, STAMP)
  for user, length in enumerate(lengths):
    tokens = tokens_of(user, length)
    np.testing.assert_array_equal(files.found[user], tokens)
    np.testing.assert_array_equal(np.concatenate(files.read(user, tokens)), kv_of(tokens)[:-1])
  files.close()


def test_forks(tmp_path):
  stand = Stand(tmp_path)
  tokens = tokens_of(3, 20)
  stand.tiers.end_turn(3, tokens, 0, kv_of(tokens)[:-1])
  stand.tiers.fork(3, 4)
  stand.placement.found(4, 19 * STAMP.token_bytes)
  stand.queue.arrive(Request(0, (1, 2), 1, 4), 0.0)
  while (request := stand.queue.next(1.0, lambda request: True)) is None:
    for read in list(stand.tiers._reads.values()):
      read.result()
  assert request.user == 4
  np.testing.assert_array_equal(np.concatenate(stand.tiers.history(4).chunks), kv_of(tokens)[:-1])
  with pytest.raises(ValueError, match="user 4 has a history already"):
    stand.tiers.fork(3, 4)
  with pytest.raises(ValueError, match="user 9 has no history"):
    stand.tiers.fork(9, 10)
  stand.tiers.forget(3)
  assert not len(stand.tiers.history(3).tokens)
  stand.tiers.close()


def test_a_gap_is_refused(tmp_path):
  stand = Stand(tmp_path)
  tokens = tokens_of(3, 20)
  with pytest.raises(ValueError, match="keys and values from position 5 of user 3"):
    stand.tiers.end_turn(3, tokens, 5, kv_of(tokens, 5))
  stand.tiers.close()
