"""Conversations served for real: a model, files and the clock of the wall, and what was watched.

    case = Case(loaded, runner, turns, "previous_answer", host_bytes=8_000_000)
    served = serve(case, folder)

Turns are those of a made workload (`kvjax.sim.generator`), of random tokens: times hang on lengths
and hardly on values. Time passes faster than in the workload, so that little is much: users come,
read and think `speed` times as fast, while the model computes as it does.

What the loop does is not changed by being watched: the classes here note when something began and
ended, in seconds of one clock, and leave the rest to those that they come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvjax import Runner
from kvjax.bidaw import DualQueue, Eviction, Placement, PreviousAnswer, Read, lru
from kvjax.bidaw.files import Fault, HistoryFiles
from kvjax.bidaw.tiers import Tiers
from kvjax.engine.clock import Clock, WallClock
from kvjax.engine.conversing import ConversationBackend, converse, stamp_of
from kvjax.engine.requests import Finished, Request
from kvjax.engine.serving import Made
from kvjax.sim.workloads import Workload
from models import Loaded

EVICTIONS: dict[str, Callable[[int], Eviction]] = {
  "previous_answer": PreviousAnswer,
  "lru": lambda host_bytes: lru(),
}


class Case(NamedTuple):
  """What is served, and with what.

  Attributes:
    loaded: the model.
    runner: dense on resident; its batch size is the number of slots.
    turns: by arrival.
    eviction: one of `EVICTIONS`.
    host_bytes: of host memory for histories.
  """

  loaded: Loaded
  runner: Runner
  turns: Sequence[Request]
  eviction: str
  host_bytes: int


class Span(NamedTuple):
  """When something began and ended, and how many bytes or rows it was of."""

  begin_s: float
  end_s: float
  amount: int = 0

  @property
  def seconds(self) -> float:
    """From beginning to end."""
    return self.end_s - self.begin_s


class Start(NamedTuple):
  """A turn that got its slot.

  Attributes:
    span: while its history was put there and the rest was read.
    past: tokens of the conversation before it.
    kept: the first of them, whose keys and values were at hand.
    prompt: new tokens.
    from_disk: whether what was at hand was read from disk for this turn.
  """

  span: Span
  past: int
  kept: int
  prompt: int
  from_disk: bool

  @property
  def lost(self) -> int:
    """Tokens of the history that had keys and values once, as all but the last of an answer do."""
    return max(0, self.past - 1 - self.kept)

  @property
  def tier(self) -> str:
    """Where the history was: host, disk, recomputed (at least in part), or new without one."""
    if self.past == 0:
      return "new"
    if self.lost:
      return "recomputed"
    return "disk" if self.from_disk else "host"


class Served(NamedTuple):
  """What came of a run.

  Attributes:
    began_s: when the clock of the turns was at 0, in seconds of that of the spans.
    finished: turns as they ended.
    starts: request id -> its start.
    steps: of rows each.
    longest: tokens of the longest row of each step.
    since: steps between the latest start or end and each step.
    stored_s: seconds in which turns that had ended were stored and told, before the loop went on.
    loop_s: seconds of the loop in which nothing was computed or stored and it did not sleep.
    reads: of bytes each, from when the loop asked for them until a thread had them.
    written_bytes: to disk.
    late_s: by which the loop went on late after each of its sleeps.
    sleeps: of the loop while a turn was ready; there should be none.
    disk_call_s: the longest of the loop's calls of the disk.
    hits: turns that found their history in host memory when they arrived; misses likewise.
    misses: those that found it on disk, or on its way.
    faults: of the disk.
  """

  began_s: float
  finished: Sequence[Finished]
  starts: dict[int, Start]
  steps: Sequence[Span]
  longest: Sequence[int]
  since: Sequence[int]
  stored_s: float
  loop_s: float
  reads: Sequence[Span]
  written_bytes: int
  late_s: Sequence[float]
  sleeps: Sequence[Span]
  disk_call_s: float
  hits: int
  misses: int
  faults: Sequence[Fault]


class WatchedFiles(HistoryFiles):
  """Notes its reads, from when they were asked for."""

  def __init__(self, folder: Path, stamp):
    super().__init__(folder, stamp)
    self.reads: list[Span] = []
    self.asked: dict[int, float] = {}  # by user

  def read(self, user: int, tokens: np.ndarray) -> list[np.ndarray]:
    chunks = super().read(user, tokens)
    num_bytes = sum(chunk.nbytes for chunk in chunks)
    self.reads.append(Span(self.asked.pop(user), time.perf_counter(), num_bytes))
    return chunks


class WatchedTiers(Tiers):
  """Notes how long the loop's calls take, and whose history was read since its last turn."""

  def __init__(self, files: WatchedFiles):
    super().__init__(files)
    self.asked = files.asked
    self.longest_call_s = 0.0
    self.fetched: set[int] = set()

  def begin(self, user: int, num_bytes: int, now: float) -> None:
    self.fetched.add(user)
    self.asked[user] = time.perf_counter()
    self._timed(super().begin, user, num_bytes, now)

  def ended(self, now: float) -> list[Read]:
    return self._timed(super().ended, now)

  def wakes_at(self, now: float) -> float | None:
    return self._timed(super().wakes_at, now)

  def _timed[T](self, call: Callable[..., T], *args) -> T:
    begin = time.perf_counter()
    result = call(*args)
    self.longest_call_s = max(self.longest_call_s, time.perf_counter() - begin)
    return result


class WatchedClock:
  """Another clock; notes sleeps, by how much they were too long, and those that should not be.

  Args:
    clock: the other one.
    noted: whether a sleep should not be.
  """

  def __init__(self, clock: Clock, noted: Callable[[], bool]):
    self.now, self.spend = clock.now, clock.spend
    self.sleeps: list[Span] = []
    self.late_s: list[float] = []
    self.slept_s = 0.0
    self._clock, self._noted = clock, noted

  def wait_until(self, then: float) -> None:
    noted, early, begin = self._noted(), self.now() < then, time.perf_counter()
    self._clock.wait_until(then)
    span = Span(begin, time.perf_counter())
    self.slept_s += span.seconds
    if early:
      self.late_s.append(self.now() - then)
    if noted:
      self.sleeps.append(span)


class WatchedBackend(ConversationBackend):
  """Notes what it computes."""

  def __init__(self, runner: Runner, params, histories: WatchedTiers):
    super().__init__(runner, params, histories)
    self.warm_up()
    self.starts: dict[int, Start] = {}
    self.steps: list[Span] = []
    self.longest: list[int] = []
    self.since: list[int] = []
    self.stored_s = self.ended_s = 0.0
    self._fetched, self._since = histories.fetched, 0

  def start(self, slot: int, request: Request) -> Made:
    history, begin = self.histories.history(request.user), time.perf_counter()
    self._since = 0
    made = super().start(slot, request)
    span = Span(begin, time.perf_counter())
    fetched = request.user in self._fetched
    self._fetched.discard(request.user)
    past, kept, prompt = len(history.tokens), history.kv_tokens, len(request.prompt)
    self.starts[request.id] = Start(span, past, kept, prompt, fetched)
    return made

  def step(self, tokens) -> Made:
    begin = time.perf_counter()
    made = super().step(tokens)
    if tokens:  # not while warming up
      self.steps.append(Span(begin, time.perf_counter(), len(tokens)))
      self.longest.append(max(len(self._rows[slot].tokens) for slot in tokens))
      self.since.append(self._since)
      self._since += 1
    return made

  def stop(self, slot: int) -> None:
    begin, self._since = time.perf_counter(), 0
    super().stop(slot)
    self.stored_s += time.perf_counter() - begin

  def ended(self, finished: Finished) -> None:
    self.ended_s = time.perf_counter()
    super().ended(finished)

  def told(self) -> None:
    """The scheduler and the caller know that a turn has ended."""
    self.stored_s += time.perf_counter() - self.ended_s


def make_turns(
  workload: Workload, *, speed: float, most_tokens: int, vocab_size: int, seed: int
) -> list[Request]:
  """A workload as turns of random tokens.

  Args:
    workload: conversations.
    speed: how many times as fast time passes.
    most_tokens: of a conversation, which ends before the turn that would exceed them.
    vocab_size: of the model.
    seed: of the tokens.

  Raises:
    ValueError: no turn is left.
  """
  rng = np.random.default_rng(seed)
  kept = [
    turn
    for turn in workload
    if turn.history_tokens + turn.query_tokens + max(1, turn.answer_tokens) <= most_tokens
  ]
  if not kept:
    raise ValueError(
      f"no turn of {len(workload)} fits into {most_tokens} tokens; give a row more of them"
    )
  turns = []
  for id, turn in enumerate(kept):
    prompt = tuple(rng.integers(0, vocab_size, turn.query_tokens).tolist())
    new, arrival_s = max(1, turn.answer_tokens), turn.arrival_s / speed
    turns.append(Request(id, prompt, new, user=turn.user, arrival_s=arrival_s))
  return turns


def serve(
  case: Case,
  folder: Path,
  tell: Callable[[Finished], object] = lambda one: None,
  *,
  clock: Callable[[], Clock] = WallClock,
) -> Served:
  """Serves all turns; what compiles does so before time begins.

  Args:
    case: what is served.
    folder: for histories; there are none yet.
    tell: is called as each turn ends, in the loop.
    clock: makes the clock; only in tests another than that of the wall.

  Raises:
    ValueError: the folder has histories of this model already, or another process has it.
  """
  files = WatchedFiles(folder, stamp_of(case.runner))
  if files.found:
    files.close()
    raise ValueError(
      f"{folder} has histories of {len(files.found)} users already, which would go on; give an "
      "empty folder"
    )
  tiers = WatchedTiers(files)
  finished = []
  try:
    backend = WatchedBackend(case.runner, case.loaded.params, tiers)
    placement = Placement(case.host_bytes, EVICTIONS[case.eviction](case.host_bytes), tiers.evict)
    queue = DualQueue[Request](placement, tiers)
    watched, begin = WatchedClock(clock(), lambda: queue.num_ready > 0), time.perf_counter()
    for one in converse(case.turns, backend, watched, queue):
      finished.append(one)
      tell(one)
      backend.told()
    seconds = time.perf_counter() - begin
  finally:
    tiers.close()
  spans = [*(start.span for start in backend.starts.values()), *backend.steps]
  busy_s = sum(span.seconds for span in spans) + backend.stored_s
  return Served(
    begin,
    finished,
    backend.starts,
    backend.steps,
    backend.longest,
    backend.since,
    backend.stored_s,
    max(0.0, seconds - busy_s - watched.slept_s),
    files.reads,
    files.written_bytes,
    watched.late_s,
    watched.sleeps,
    tiers.longest_call_s,
    placement.hits,
    placement.misses,
    tiers.take_faults(),
  )
