"""Microseconds of Bidaw's decisions: who is evicted, who is read, who is served.

    python -m scripts.bench_bidaw
    python -m scripts.bench_bidaw --conversations=100000

Conversations of 1,000 bytes, half of them in host memory. For each policy: turns of users who come
back the later the longer their answer was; an eviction is one call of `victim`, and what arrivals
and answers cost the policy is told beside it, with the tables that are made again now and then.
Then the dual queue with a request of every conversation waiting, half of them for the disk, and
Belady's policy played over a window of accesses, as previous-answer's ghost cache does in slices,
with the memory of both. Processor time of this thread; median, 99th percentile, and the longest.
Python's garbage collector, which may come in any call, waits for its end and is told apart.

    python -m scripts.bench_bidaw --requests=1000000

also serves so many turns with Bidaw in virtual time, and says how long that took, and how much
memory Python held at a tenth and at the end.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import random
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from eval import cli
from eval.tables import table
from kvjax.bidaw import (
  DualQueue,
  Eviction,
  InTheWild,
  Placement,
  PreviousAnswer,
  TimedDisk,
  Where,
  belady,
  fifo,
  lru,
  queue_lru,
  s3fifo,
)
from kvjax.bidaw.ghost import Access, hit_rates
from kvjax.bidaw.previous_answer import NUM_BUCKETS, WINDOW
from kvjax.sim import machine
from kvjax.sim.generator import INTERACTIVE, generate
from kvjax.sim.systems import SYSTEMS, Setup, System
from kvjax.sim.workloads import requests
from models import abstract

SIZE = 1000  # bytes of a history
TURNS = 5_000  # after the first of each conversation
GHOST = f"ghost cache: Belady over {WINDOW:,} accesses"
COLLECTOR = "Python's garbage collector"
COLUMNS = ("what", "calls", "median_us", "p99_us", "longest_us", "mean_us", "memory_bytes")


class Waiting(NamedTuple):
  """A request, as far as a scheduler reads it."""

  id: int
  user: int
  arrival_s: float


class Timed:
  """Calls without garbage collections, and the microseconds that each took."""

  def __init__(self):
    self.spent_us: list[float] = []

  def __call__(self, function: Callable[..., Any], *args) -> Any:
    gc.disable()
    start = time.thread_time_ns()
    result = function(*args)
    self.spent_us.append((time.thread_time_ns() - start) / 1e3)
    gc.enable()
    return result

  def columns(self) -> dict[str, float | int]:
    """How many, and microseconds."""
    spent = np.array(self.spent_us or [0.0])
    return {
      "calls": len(self.spent_us),
      "median_us": _short(np.median(spent)),
      "p99_us": _short(np.quantile(spent, 0.99)),
      "longest_us": _short(spent.max()),
      "mean_us": _short(spent.mean()),
    }


@contextlib.contextmanager
def collections() -> Iterator[Timed]:
  """Times the garbage collections that come meanwhile."""
  timed, start = Timed(), 0

  def note(phase: str, info: Mapping[str, int]) -> None:
    nonlocal start
    del info
    now = time.thread_time_ns()
    if phase == "stop":
      timed.spent_us.append((now - start) / 1e3)
    start = now

  gc.callbacks.append(note)
  try:
    yield timed
  finally:
    gc.callbacks.remove(note)


def _short(value: float) -> float | int:
  return round(float(value), 1) if value < 100 else round(float(value))


def policies(conversations: int) -> dict[str, Eviction]:
  """Every policy, for host memory of half of the conversations; Belady is told nonsense."""
  half = conversations // 2
  return {
    "fifo": fifo(),
    "lru": lru(),
    "s3fifo": s3fifo(half),
    "queue_lru": queue_lru(lambda: range(30)),
    "belady": belady(lambda user: user * 7919 % conversations),
    "in_the_wild": InTheWild(),
    "previous_answer": PreviousAnswer(half * SIZE),
  }


def evictions(policy: Eviction, conversations: int, turns: int) -> tuple[Timed, Timed]:
  """Plays turns: a history that is not in host memory comes in, and another one leaves."""
  victim, hearing, rng = Timed(), Timed(), random.Random(0)
  due = [(rng.random() * 100, user) for user in range(conversations)]
  heapq.heapify(due)
  resident: set[int] = set()
  for _ in range(conversations + turns):
    now, user = heapq.heappop(due)
    answer = 2 * rng.randrange(50)
    hearing(policy.arrived, user, now)
    policy.pin(user)
    if user not in resident:
      policy.insert(user)
      resident.add(user)
    hearing(policy.answered, user, now, answer, SIZE)
    if len(resident) > conversations // 2:
      resident.remove(victim(policy.victim))
    policy.unpin(user)
    heapq.heappush(due, (now + 50 + answer + 10 * rng.random(), user))
  return victim, hearing


def scheduling(conversations: int) -> dict[str, Timed]:
  """A request of every conversation waits; each is served, and comes again."""
  placement = Placement(conversations * SIZE * 10 // 19, lru())
  for user in range(conversations):
    placement.arrive(user, 0.0)
    placement.end_turn(user, 0.0, 10, SIZE)
    placement.unpin(user)
  queue = DualQueue(placement, TimedDisk(1000 * SIZE))
  timed = {name: Timed() for name in ("arrive", "next", "ended")}
  for user in range(conversations):
    timed["arrive"](queue.arrive, Waiting(user, user, user / 1e6), user / 1e6)
  now, id = 1.0, conversations
  for _ in range(conversations):
    now += 0.002
    request = timed["next"](queue.next, now, lambda request: True)
    if request is not None:
      timed["ended"](queue.ended, request, now, 10, SIZE)
      timed["arrive"](queue.arrive, Waiting(id, request.user, now), now)
      id += 1
  assert any(placement.where(user) is Where.HOST for user in range(conversations))
  return timed


def ghost(conversations: int) -> tuple[Timed, int]:
  """Belady's hit rates over a window, ten times; and most bytes of the window and of one time."""
  rng, half = random.Random(0), conversations // 2 * SIZE
  tracemalloc.start()
  window = [
    Access(rng.randrange(conversations), SIZE + rng.randrange(9), rng.randrange(NUM_BUCKETS))
    for _ in range(WINDOW)
  ]
  hit_rates(window, half, NUM_BUCKETS)
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  timed = Timed()
  for _ in range(10):
    timed(hit_rates, window, half, NUM_BUCKETS)
  return timed, most


def decisions(
  chosen: Mapping[str, Eviction], conversations: int, turns: int
) -> Iterator[dict[str, Any]]:
  """What each decision takes: of the policies that are chosen, of the queue, of the ghost cache."""
  with collections() as collector:
    for name, policy in chosen.items():
      victim, hearing = evictions(policy, conversations, turns)
      yield {"what": f"{name}: eviction"} | victim.columns()
      yield {"what": f"{name}: arrival or answer"} | hearing.columns()
    for name, timed in scheduling(conversations).items():
      yield {"what": f"dual queue: {name}"} | timed.columns()
  yield {"what": COLLECTOR} | collector.columns()
  timed, most = ghost(conversations)
  yield {"what": GHOST} | timed.columns() | {"memory_bytes": most}


def simulation(requests_wanted: int) -> str:
  """Serves OPT-13B's turns on an A800, 20 users a minute; in words, how long it took."""
  config = abstract("random:opt-13b")[0].config
  users = -(-requests_wanted // 22)
  turns = itertools.islice(
    requests(generate(INTERACTIVE, users, 20, 0), config.max_tokens), requests_wanted
  )
  system = System(SYSTEMS["bidaw"], Setup(config, machine("a800"), 200 * 10**9))
  held, start, number = 0, time.process_time(), 0
  for number, _ in enumerate(system.serve(turns), 1):
    if number == requests_wanted // 10:
      held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return (
    f"{number:,} turns served in {time.process_time() - start:.0f} s of processor time; most "
    f"memory {held / 1024:.0f} MiB after a tenth of them, {most / 1024:.0f} MiB at the end"
  )


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_integer("conversations", 10_000, "Conversations.", lower_bound=100)
  flags.DEFINE_integer("turns", TURNS, "Turns after the first of each conversation.", lower_bound=1)
  flags.DEFINE_integer("requests", 0, "Turns to serve in virtual time as well.", lower_bound=0)


def main(args: flags.FlagValues) -> None:
  """Measures policies and queue, prints the table."""
  print(f"{args.conversations:,} conversations, half of them in host memory\n", flush=True)
  gc.freeze()  # a collection that looks at all that was imported takes 0.2 s
  chosen = policies(args.conversations)
  print(table(decisions(chosen, args.conversations, args.turns), COLUMNS))
  if args.requests:
    print(simulation(args.requests))


if __name__ == "__main__":
  cli.run(main, define_flags)
