"""Reuse distances, their envelope and the ghost cache, against their definitions."""

from __future__ import annotations

import ast
import math
import random
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy import stats

import kvjax.bidaw
from kvjax.bidaw.envelope import Envelope, lower_envelope, robust_minimum, spearman
from kvjax.bidaw.ghost import Access, belady_hits, hit_rates
from kvjax.bidaw.reuse import ReuseDistances

ACCESSES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), max_size=90)


def distance_by_definition(users: list[int], sizes: dict[int, int]) -> int | None:
  """Of the last access of the list: the sizes of who came since the one before it."""
  *before, user = users
  if user not in before:
    return None
  last = len(before) - 1 - before[::-1].index(user)
  return sum(sizes[other] for other in set(before[last + 1 :]))


@settings(max_examples=60, deadline=None)
@given(accesses=ACCESSES)
def test_distances_are_those_of_the_definition(accesses):
  """Ninety accesses of seven users."""
  reuse, users, sizes = ReuseDistances(10**9), [], {}
  for user, size in accesses:
    users.append(user)
    assert reuse.access(user) == distance_by_definition(users, sizes)
    sizes[user] = size
    reuse.resize(user, size)
    for other in set(users):
      since = users[len(users) - users[::-1].index(other) :]
      assert reuse.since(other) == sum(sizes[u] for u in set(since))


@settings(max_examples=60, deadline=None)
@given(accesses=ACCESSES, limit=st.integers(1, 200))
def test_what_is_forgotten_is_beyond_the_limit(accesses, limit):
  reuse, users, sizes = ReuseDistances(limit), [], {}
  for user, size in accesses:
    users.append(user)
    true, found = distance_by_definition(users, sizes), reuse.access(user)
    assert found == true or (found is None and true >= limit)
    sizes[user] = max(size, sizes.get(user, 0))  # histories grow
    reuse.resize(user, sizes[user])
    oldest = next(iter(reuse._place))
    assert len(reuse) == 1 or reuse.since(oldest) < limit


def test_memory_does_not_grow_with_accesses():
  reuse = ReuseDistances(10**9)
  for place in range(5000):
    reuse.access(place % 10)
    reuse.resize(place % 10, 1)
  assert len(reuse._bytes) < 10_000
  assert reuse.access(0) == 9


@pytest.mark.parametrize("most", [64, 1 << 20])
def test_blocks_come_round(monkeypatch, most):
  """Small blocks and a short ring, which grows until it may not; then the oldest are dropped."""
  for name, value in (("_BLOCK", 4), ("_BLOCKS", 2), ("_MOST", most)):
    monkeypatch.setattr(f"kvjax.bidaw.reuse.{name}", value)
  rng, reuse, users, sizes, last = random.Random(0), ReuseDistances(10**9), [], {}, {}
  for place in range(700):
    user = rng.choice((rng.randrange(5), rng.randrange(40)))
    found = reuse.access(user)
    true = distance_by_definition([*users[-300:], user], sizes)
    near = place - last.get(user, -1000) < min(most - 8, 300)
    assert found == true if near else found in (None, true) or place - last[user] >= 300
    users.append(user)
    last[user] = place
    sizes[user] = rng.randrange(1, 9)
    reuse.resize(user, sizes[user])
  assert len(reuse._bytes) == 64 if most == 64 else len(reuse._bytes) > 64


def belady_by_definition(accesses: list[Access], capacity: int) -> list[bool | None]:
  users = [access.user for access in accesses]

  def next_use(user, place):
    return next((i for i in range(place + 1, len(users)) if users[i] == user), math.inf)

  held, hits = {}, []
  for place, (user, size, _) in enumerate(accesses):
    hits.append(user in held if user in users[:place] else None)
    held[user] = size
    while held and sum(held.values()) > capacity:
      del held[max(held, key=lambda u: next_use(u, place))]
  return hits


@settings(max_examples=60, deadline=None)
@given(
  accesses=st.lists(
    st.builds(Access, st.integers(0, 5), st.integers(1, 9), st.none()), max_size=40
  ),
  capacity=st.integers(1, 30),
)
def test_ghost_is_belady_by_definition(accesses, capacity):
  # Who is never used again goes first either way, whoever of them it is.
  assert belady_hits(accesses, capacity) == belady_by_definition(accesses, capacity)


def test_hit_rates_of_buckets():
  trace = [(1, None), (2, None), (1, 1), (2, 1), (3, None), (1, 3), (2, 3), (3, 4)]
  accesses = [Access(user, 10, bucket) for user, bucket in trace]
  # Two histories fit: 1 and 2 are hit twice, and 3, whose next use is last, never.
  assert belady_hits(accesses, 20) == [None, None, True, True, None, True, True, False]
  assert hit_rates(accesses, 20, 6) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_robust_minimum_by_definition(values):
  low, high = np.percentile(values, [25, 75])
  kept = [value for value in values if value >= low - 1.5 * (high - low)]
  assert robust_minimum(np.array(values)) == min(kept)


@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=30))
@settings(max_examples=60, deadline=None)
def test_spearman_is_scipys(pairs):
  x, y = np.array(pairs, float).T
  want = 0.0 if np.ptp(x) == 0 or np.ptp(y) == 0 else stats.spearmanr(x, y).statistic
  assert spearman(x, y) == pytest.approx(want, abs=1e-12)


def test_an_envelope_of_few_lengths():
  tokens = np.repeat([2, 10, 20, 30, 40], 20)
  lowest = np.array([5.0, 30.0, 20.0, 40.0, 50.0])
  distances = (lowest[:, None] + np.arange(20)).ravel()
  envelope = lower_envelope(tokens, distances)
  assert envelope.from_tokens == [2, 10, 20, 30, 40]
  assert envelope.bounds == [5, 30, 30, 40, 50]  # the third is raised by the second
  assert envelope.spearman == pytest.approx(0.9)
  asked = [0, 1, 2, 9, 10, 19, 20, 29, 40, 10**6]
  assert [envelope.lower_bound(a) for a in asked] == [0, 0, 5, 5, 30, 30, 30, 30, 50, 50]


def test_lengths_of_one_bin_and_rare_lengths_are_pooled():
  tokens = np.concatenate([np.full(400, 4), np.full(400, 5), [8, 10, 12, 14]])
  distances = np.concatenate([np.full(800, 7.0), [100.0, 1.0, 90.0, 80.0]])
  envelope = lower_envelope(tokens, distances)
  assert envelope.from_tokens == [4]  # four samples are less than a 32nd
  assert envelope.bounds == [7]
  assert envelope.spearman == 0


def test_no_samples_no_bounds():
  envelope = lower_envelope(np.array([], int), np.array([], float))
  assert envelope == Envelope([], [], 0.0)
  assert envelope.lower_bound(100) == 0


def test_bidaw_has_no_arrays_on_devices_and_knows_no_engine():
  allowed = {*sys.stdlib_module_names, "numpy", "kvjax.bidaw", "kvjax.config", "kvjax.eviction"}
  allowed |= {"ml_dtypes", "tensorstore", "xxhash"}  # histories in files
  for path in Path(kvjax.bidaw.__file__).parent.glob("*.py"):
    if path.name == "tensor_cache.py":  # the one that computes
      continue
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
      names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      names += [node.module] if isinstance(node, ast.ImportFrom) else []
      for name in names:
        unit = ".".join(name.split(".")[:2]) if name.startswith("kvjax") else name.split(".")[0]
        assert unit in allowed, f"{path.name} imports {name}"
