"""Policies over histories: exact victims of small traces, and previous-answer by its definition."""

from __future__ import annotations

import bisect
import math
import random

import pytest

from kvjax.bidaw import InTheWild, PreviousAnswer, belady, fifo, lru, queue_lru, s3fifo
from kvjax.bidaw.envelope import lower_envelope
from kvjax.bidaw.ghost import Access, hit_rates
from kvjax.bidaw.previous_answer import GRADES, LEAST_SPEARMAN, NUM_BUCKETS, bucket_edges, np, worth
from kvjax.eviction import Belady, Fifo, Lru

HOST = 100


def turn(policy, user: int, now: float, answer: int = 10, size: int = 10) -> None:
  policy.arrived(user, now)
  policy.answered(user, now, answer, size)


def filled(policy, users):
  for now, user in enumerate(users):
    turn(policy, user, now)
    policy.insert(user)
  return policy


def drain(policy) -> list[int]:
  victims = []
  while (victim := policy.victim()) is not None:
    victims.append(victim)
  return victims


def test_orders_of_a_small_trace():
  for make, victims in (
    (fifo, [3, 1, 2, 4]),
    (lru, [1, 4, 3, 2]),
    (lambda: s3fifo(4), [1, 4, 3, 2]),
  ):
    policy = filled(make(), [3, 1, 2, 4])
    for user in (3, 3, 2, 2):
      turn(policy, user, 10)
    assert drain(policy) == victims


def test_what_is_pinned_stays_and_keeps_its_place():
  for make in (fifo, lru, InTheWild, lambda: PreviousAnswer(HOST), lambda: s3fifo(100)):
    policy = make()
    policy.pin(0)  # before it is there
    filled(policy, [0, 1, 2])
    policy.pin(2)
    assert policy.victim() == 1
    assert policy.victim() is None
    policy.unpin(2)
    policy.unpin(0)
    assert sorted(drain(policy)) == [0, 2]


@pytest.mark.parametrize(
  ("make", "order"), [(fifo, Fifo), (lru, Lru), (belady, Belady)], ids=["fifo", "lru", "belady"]
)
def test_ranked_is_the_order_that_passes_over_the_pinned(make, order):
  rng = random.Random(1)
  due = [rng.random() for _ in range(30)]
  given = [due.__getitem__] if order is Belady else []
  policy, plain, pinned = make(*given), order(*given), set()
  for _ in range(2000):
    user, event = rng.randrange(30), rng.random()
    due[user] = rng.random()
    if event < 0.3:
      policy.arrived(user, 0)
      if user in plain:
        plain.touch(user)
    elif event < 0.6 and user not in plain:
      policy.insert(user)
      plain.insert(user)
    elif event < 0.8:
      (policy.unpin if user in pinned else policy.pin)(user)
      pinned.symmetric_difference_update({user})
    elif event < 0.85 and user in plain:
      policy.remove(user)
      plain.remove(user)
    elif any(other in plain and other not in pinned for other in range(30)):
      assert policy.victim() == plain.victim(lambda other: other not in pinned)
    else:
      assert policy.victim() is None


def test_queue_lru_spares_who_comes_soon():
  policy = filled(queue_lru(lambda: (1, 9, 2, 1)), [1, 2, 3, 4])
  policy.pin(4)
  assert policy.victim() == 3
  assert policy.victim() == 2  # all others come soon or are pinned: whose turn is last
  assert policy.victim() == 1
  assert policy.victim() is None


def test_belady_gives_up_the_farthest():
  policy = filled(belady({1: 5.0, 2: math.inf, 3: 9.0}.__getitem__), [1, 2, 3])
  assert drain(policy) == [2, 3, 1]


def worth_in_the_wild(log, user, now, life):
  """By the definition: `log` has (user, time, turn number) of every turn that has ended."""
  category = {u: min(turn, 8) for u, _, turn in log}
  mine = [entry for entry in log if min(entry[2], 8) == category[user]]
  gaps = [
    after[1] - entry[1]
    for entry in mine
    for after in log
    if after[0] == entry[0] and after[2] == entry[2] + 1
  ]
  mean = (1 + sum(gaps)) / (1 + len(gaps))
  idle = now - max(time for u, time, _ in log if u == user)
  within = math.exp(-idle / mean) - math.exp(-(idle + life) / mean)
  return (1 + len(gaps)) / (1 + len(mine)) * within


def test_in_the_wild_by_its_definition():
  rng, policy, log, turns = random.Random(0), InTheWild(), [], {}
  now, size = 0.0, {}
  for user in [rng.randrange(9) for _ in range(60)]:
    now += rng.random() * 4
    turns[user] = turns.get(user, 0) + 1
    size[user] = rng.randrange(1, 99)
    turn(policy, user, now, size=size[user])
    log.append((user, now, turns[user]))
    if turns[user] == 1:
      policy.insert(user)
  policy.pin(3)
  life, left = math.inf, set(size) - {3}
  while left:
    want = min(left, key=lambda u: (worth_in_the_wild(log, u, now, life), -size[u]))
    assert policy.victim() == want
    idle = now - max(time for u, time, _ in log if u == want)
    life = idle if math.isinf(life) else 0.9 * life + 0.1 * idle
    left.remove(want)
  assert policy.victim() is None


def test_in_the_wild_with_one_category_is_lru():
  policy = filled(InTheWild(), [4, 1, 3, 0])
  assert drain(policy) == [4, 1, 3, 0]


class Plain:
  """Previous-answer as its text defines it, made anew from all that has happened."""

  def __init__(self, passed: bool, window: int, every: int):
    self.passed, self.window, self.every = passed, window, every
    self.edges = bucket_edges(HOST)
    self.users: list[int] = []  # of every arrival
    self.size: dict[int, int] = {}
    self.answer: dict[int, int] = {}
    self.own: dict[int, list[int]] = {}  # buckets
    self.samples, self.accesses = [], []
    self.everyone = [1 / NUM_BUCKETS] * NUM_BUCKETS
    self.hit = [1 - bucket / 8 for bucket in range(NUM_BUCKETS)]
    self.envelope = lower_envelope(np.array([], int), np.array([], float))

  def since(self, user: int) -> int:
    last = len(self.users) - 1 - self.users[::-1].index(user)
    return sum(self.size[other] for other in set(self.users[last + 1 :]) - {user})

  def bucket(self, distance: float) -> int:
    return bisect.bisect_right(self.edges, distance)

  def turn(self, user: int, answer: int, size: int) -> None:
    bucket = None
    if user in self.users:
      distance = self.since(user)
      bucket = self.bucket(distance)
      self.own.setdefault(user, []).append(bucket)
      self.samples.append((self.answer[user], distance))
    self.users.append(user)
    if len(self.users) % self.every == 0:
      self.refresh()
    self.answer[user], self.size[user] = answer, size
    self.accesses.append(Access(user, size, bucket))

  def refresh(self) -> None:
    samples = self.samples[-self.window :]
    if samples:
      tokens, distances = map(np.array, zip(*samples, strict=True))
      self.envelope = lower_envelope(tokens, distances)
      buckets = [self.bucket(distance) for distance in distances.tolist()]
      counts = [1 + buckets.count(bucket) for bucket in range(NUM_BUCKETS)]
      self.everyone = [count / sum(counts) for count in counts]
    rates = hit_rates(self.accesses[-self.window :], HOST, NUM_BUCKETS)
    self.hit = [1.0, *rates[1:-1], 0.0]

  def victim(self, residents: set[int]) -> int:
    return min(residents, key=self.key)

  def key(self, user: int) -> tuple[int, int]:
    last = len(self.users) - self.users[::-1].index(user)
    if self.envelope.spearman < LEAST_SPEARMAN:
      return 0, last
    counts = [self.own.get(user, []).count(bucket) for bucket in range(NUM_BUCKETS)]
    prior = [own + 3 * share for own, share in zip(counts, self.everyone, strict=True)]
    bound = self.envelope.lower_bound(self.answer[user])
    if self.passed:
      bound = max(bound, self.since(user))
    return round(GRADES * worth(prior, self.hit, self.bucket(bound))), last


def think(rng, answer: int, signal: bool) -> float:
  return 20 + (answer if signal else rng.randrange(60)) + 5 * rng.random()


def play(policy, *others, users=25, turns=300, seed=0, signal=True):
  """Users who come back the later the longer their answer was; yields after each turn."""
  rng = random.Random(seed)
  due = {user: rng.random() * 50 for user in range(users)}
  for _ in range(turns):
    user = min(due, key=due.__getitem__)
    now, answer, size = due[user], 2 * rng.randrange(30), rng.randrange(8, 16)
    policy.arrived(user, now)
    policy.refresh()  # the tables as of now, not in slices
    policy.answered(user, now, answer, size)
    for other in others:
      other.turn(user, answer, size)
    due[user] = now + think(rng, answer, signal)
    yield user


@pytest.mark.parametrize("passed", [True, False])
def test_previous_answer_by_its_definition(passed):
  policy = PreviousAnswer(HOST, passed=passed, window=150, every=20)
  plain, resident, ranked = Plain(passed, 150, 20), set(), 0
  for user in play(policy, plain, turns=260):  # nobody has 32 turns, when counts would be halved
    if user not in resident:
      resident.add(user)
      policy.insert(user)
    if len(resident) > 9:
      want = plain.victim(resident)
      assert policy.victim() == want
      resident.remove(want)
      ranked += not policy.falls_back
  assert ranked > 100
  assert policy.hit == plain.hit and policy.envelope == plain.envelope


def test_worth_by_hand():
  prior, hit = [0.5, 0.25, 0.25], [1.0, 0.4, 0.0]
  assert worth(prior, hit, 0) == 0.6
  assert worth(prior, hit, 1) == 0.2
  assert worth(prior, hit, 2) == 0
  assert worth([1.0, 0.0, 0.0], hit, 1) == 0  # nothing is left of the prior: all is extreme


def test_buckets_of_the_paper():
  assert [edge / 1e9 for edge in bucket_edges(200 * 10**9)] == [
    200,
    240,
    280,
    320,
    360,
    400,
    440,
    480,
  ]


def test_it_is_lru_until_it_has_learnt_something():
  policy = filled(PreviousAnswer(HOST), [5, 2, 7])
  assert policy.falls_back
  turn(policy, 5, 10, answer=1)
  assert drain(policy) == [2, 7, 5]


def test_it_is_lru_where_answers_say_nothing():
  last: dict[int, int] = {}
  policy = PreviousAnswer(HOST, window=2000, every=100)
  for place, user in enumerate(play(policy, turns=2000, signal=False)):
    last[user] = place
  assert policy.falls_back
  for user in last:
    policy.insert(user)
  assert drain(policy) == sorted(last, key=last.__getitem__)


def test_it_follows_a_workload_that_changes():
  """A signal that ends and begins again: tables are of the last accesses only."""
  policy = PreviousAnswer(HOST, window=400, every=50)
  seen = []
  for signal in (True, False, True):
    for _ in play(policy, turns=800, signal=signal):
      pass
    seen.append(policy.falls_back)
  assert seen == [False, True, False]


def test_who_got_a_long_answer_goes_before_who_was_here_earlier():
  policy = PreviousAnswer(HOST, window=400, every=50)
  for _ in play(policy, turns=400):
    pass
  for user, answer in ((100, 2), (101, 58)):
    turn(policy, user, 10**6, answer)
    policy.insert(user)
  assert policy.victim() == 101


def test_who_never_comes_back_is_given_up():
  policy = PreviousAnswer(HOST, window=400, every=50)
  for _ in play(policy, turns=400):
    pass
  turn(policy, 100, 10**6, answer=0)
  policy.insert(100)
  recent = list(play(policy, users=40, turns=40, seed=1))[-1]
  policy.insert(recent)
  assert drain(policy) == [100, recent]


def test_memory_is_that_of_the_users():
  policy = PreviousAnswer(HOST, window=50, every=25)
  for _ in play(policy, turns=600):
    pass
  assert len(policy._window) == len(policy._samples) == 50
  assert sum(map(len, policy._waiting)) <= 25 == len(policy._users)
  for user in range(25):
    policy.forget(user)
  assert not policy._users and not any(policy._waiting)


def test_what_a_user_did_long_ago_counts_less():
  policy = PreviousAnswer(HOST)
  for _ in range(40):  # the other's 10 bytes are between
    turn(policy, 0, 0)
    turn(policy, 1, 0)
  counts = policy._users[0].counts
  assert counts[0] == sum(counts) == 16 + (39 - 32)
