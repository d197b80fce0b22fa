"""The serving loop: requests arrive, wait, are read, decoded in one batch, and end.

Written once over a `Backend` and a `Clock`: a real model in wall time (`kvjax.engine.batching`), or
a cost model in virtual time; nothing here knows of arrays. A step decodes one token of every
request that has a slot. Between two steps requests may arrive, be cancelled, or lose their slot.

    cache = CacheConfig(batch_size=8, capacity_tokens=4096)
    backend = JaxBackend(prepare(model, policy, "resident", cache), params)
    requests = [Request(id=0, prompt=ids, max_new_tokens=64, stop_ids=tokenizer.stop_ids)]
    for finished in serve(requests, backend, WallClock()):
      print(finished.request.id, finished.outcome, finished.ttft_s, finished.tpot_s)

A request that was preempted begins again from its prompt: what it had made is fed to it token by
token, in steps that the others use too. A prefill over prompt and answer would be faster, but it
attends to everything, where decode attended to what the policy selected; the rest of the answer
would not be that of a request that was left alone.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from kvjax.engine.clock import Clock
from kvjax.engine.requests import Finished, Outcome, Request, Usage


class Made(NamedTuple):
  """What a backend did.

  Attributes:
    tokens: slot -> the token after the one that it was given.
    seconds: that it took, for clocks that do not see it.
    lost: slot -> why its row cannot go on; its token means nothing.
  """

  tokens: Mapping[int, int]
  seconds: float = 0.0
  lost: Mapping[int, str] = {}


class Backend(Protocol):
  """What computes.

  Attributes:
    slots: requests that are decoded at once.
    why_not: `why_not(request)`: why it could never be served; None if it could.
    fits: `fits(request)`: whether there is room for it now, besides a free slot.
    start: `start(slot, request)`: reads its prompt into a free slot and makes its first token.
    step: `step(tokens)`: slot -> the newest token of each request that goes on; the others, whose
      slots are not named, stay as they are.
    stop: `stop(slot)`: the slot is free.
    reloading: `reloading(slot)`: what the slot's next step needs is still on its way.
  """

  @property
  def slots(self) -> int: ...
  def why_not(self, request: Request) -> str | None: ...
  def fits(self, request: Request) -> bool: ...
  def start(self, slot: int, request: Request) -> Made: ...
  def step(self, tokens: Mapping[int, int]) -> Made: ...
  def stop(self, slot: int) -> None: ...
  def reloading(self, slot: int) -> bool: ...


class Skipped(NamedTuple):
  """What a backend did at one go.

  Attributes:
    steps: so many, at least 1.
    token: that each of them made for every slot.
    seconds: of them all.
  """

  steps: int
  token: int
  seconds: float


@runtime_checkable
class Skipping(Backend, Protocol):
  """A backend whose tokens all are the same, so that steps need not be made one by one.

  Attributes:
    skip: `skip(most_steps, within_s)`: as many calls of `step` for all slots that were started and
      not stopped, up to `most_steps`, or up to the first after which `within_s` have passed. No
      slot is ever reloading.
  """

  def skip(self, most_steps: int, within_s: float) -> Skipped: ...


class Scheduler(Protocol):
  """Who is next.

  Attributes:
    arrive: `arrive(request, now)`: it waits from now on; after a preemption again.
    next: `next(now, fits)`: takes out the request that gets a free slot now, of those that fit;
      None for nobody.
    drop: `drop(request)`: it does not wait any more.
    wakes_at: `wakes_at(now)`: when `next` may have somebody, or something else is to be seen to,
      though nothing arrives or ends; None if never. It is asked at least once a step, so that a
      scheduler can look after what goes on beside, as a disk.
    len: how many wait.
  """

  def arrive(self, request: Request, now: float) -> None: ...
  def next(self, now: float, fits: Callable[[Request], bool]) -> Request | None: ...
  def drop(self, request: Request) -> None: ...
  def wakes_at(self, now: float) -> float | None: ...
  def __len__(self) -> int: ...


class Fcfs:
  """First come, first served; who was preempted comes again."""

  def __init__(self):
    self._waiting: OrderedDict[int, Request] = OrderedDict()

  def arrive(self, request: Request, now: float) -> None:
    del now
    self._waiting[request.id] = request

  def next(self, now: float, fits: Callable[[Request], bool]) -> Request | None:
    del now
    if not self._waiting or not fits(next(iter(self._waiting.values()))):
      return None
    return self._waiting.popitem(last=False)[1]

  def drop(self, request: Request) -> None:
    del self._waiting[request.id]

  def wakes_at(self, now: float) -> float | None:
    del now
    return None

  def __len__(self) -> int:
    return len(self._waiting)


@dataclasses.dataclass(slots=True)
class _Live:
  """A request that has not ended: the tokens it has made, of which so many were fed again."""

  request: Request
  slot: int | None = None
  made: list[int] = dataclasses.field(default_factory=list)
  fed: int = 0
  started_s: float | None = None
  first_token_s: float | None = None
  preemptions: int = 0
  sat_out: int = 0


def _has_all(live: _Live) -> bool:
  return len(live.made) == live.request.max_new_tokens


class Server:
  """The state of a serving loop; whoever drives it calls `step` and what goes between two steps.

  Args:
    backend: computes.
    clock: tells the time.
    scheduler: says who is next; `Fcfs` by default.
    queue_limit: most requests that may wait while no slot is free; None for any number.
  """

  def __init__(
    self,
    backend: Backend,
    clock: Clock,
    scheduler: Scheduler | None = None,
    *,
    queue_limit: int | None = None,
  ):
    self.usage: defaultdict[int, Usage] = defaultdict(Usage)  # by user
    self._backend, self._clock, self._queue_limit = backend, clock, queue_limit
    self._skipping = backend if isinstance(backend, Skipping) else None
    self._scheduler = Fcfs() if scheduler is None else scheduler
    self._live: dict[int, _Live] = {}
    self._running: dict[int, _Live] = {}  # by slot
    self._free = list(range(backend.slots))
    self._ended: list[Finished] = []

  @property
  def busy(self) -> bool:
    """Whether there are requests that have not ended."""
    return bool(self._live)

  @property
  def running(self) -> Collection[int]:
    """Ids of the requests that have a slot."""
    return [live.request.id for live in self._running.values()]

  def take_ended(self) -> list[Finished]:
    """What has ended since this was last asked."""
    ended, self._ended = self._ended, []
    return ended

  def submit(self, request: Request) -> None:
    """A request arrives. One that is refused has ended at once.

    Raises:
      ValueError: another one of the same id has not ended.
    """
    if request.id in self._live:
      raise ValueError(f"request {request.id} has not ended; give another one an id of its own")
    live = self._live[request.id] = _Live(request)
    self.usage[request.user].arrived += 1
    reason, waiting = self._backend.why_not(request), len(self._scheduler) - len(self._free)
    if reason is not None:
      self._end(live, Outcome.UNFIT, reason)
    elif self._queue_limit is not None and waiting >= self._queue_limit:
      self._end(live, Outcome.QUEUE_FULL)
    else:
      self._scheduler.arrive(request, self._clock.now())

  def cancel(self, request_id: int) -> bool:
    """Ends a request, whether it waits or has a slot; False if there is none of this id."""
    live = self._live.get(request_id)
    if live is None:
      return False
    if live.slot is None:
      self._scheduler.drop(live.request)
    self._end(live, Outcome.CANCELLED)
    return True

  def preempt(self, request_id: int) -> bool:
    """Takes a request's slot away; it waits and will begin again. False if it has none."""
    live = self._live.get(request_id)
    if live is None or live.slot is None:
      return False
    self._give_up_slot(live)
    live.preemptions += 1
    self._scheduler.arrive(live.request, self._clock.now())
    return True

  def step(self, until_s: float | None = None) -> bool:
    """Gives free slots to who is next, then decodes a token of everyone; False if nobody has a
    slot.

    Args:
      until_s: nothing arrives before. A backend that can skip decodes up to the first step that
        ends then or later, or after which somebody has ended or the scheduler has something to do:
        in between nothing can change. None for one token.
    """
    while self._free:
      request = self._scheduler.next(self._clock.now(), self._backend.fits)
      if request is None:
        break
      self._start(self._live[request.id])
    if not self._running:
      return False
    wakes_at = self.wakes_at()  # asked in every step: with no free slot `next` was not
    backend = self._skipping
    if backend is None or until_s is None or not self._skip(backend, until_s, wakes_at):
      self._decode()
    return True

  def _skip(self, backend: Skipping, until_s: float, wakes_at: float | None) -> bool:
    """False if somebody is fed again what it had made, which is not the same for all."""
    most = 1 << 62
    for live in self._running.values():
      made = len(live.made)
      if live.fed + 1 != made:
        return False
      most = min(most, live.request.max_new_tokens - made)
    until_s = until_s if wakes_at is None else min(until_s, wakes_at)
    steps, token, seconds = backend.skip(most, until_s - self._clock.now())
    self._clock.spend(seconds)
    tokens = [token] * steps
    for live in self._running.values():
      live.made += tokens
      live.fed += steps
      self.usage[live.request.user].new_tokens += steps
    if steps == most:
      for live in [live for live in self._running.values() if _has_all(live)]:
        self._end(live, Outcome.DONE)
    return True

  def _decode(self) -> None:
    reloading = [slot for slot in self._running if self._backend.reloading(slot)]
    if len(reloading) == len(self._running):
      reloading = []  # the step waits for them
    for slot in reloading:
      self._running[slot].sat_out += 1
    going = {slot: live for slot, live in self._running.items() if slot not in reloading}
    made = self._backend.step({slot: live.made[live.fed] for slot, live in going.items()})
    self._clock.spend(made.seconds)
    for slot, live in going.items():
      live.fed += 1
      self._take(live, slot, made)

  def wakes_at(self) -> float | None:
    """When `step` may have something to do, though nothing arrives; None if never."""
    return self._scheduler.wakes_at(self._clock.now())

  def _start(self, live: _Live) -> None:
    request, usage, now = live.request, self.usage[live.request.user], self._clock.now()
    slot = live.slot = heapq.heappop(self._free)
    self._running[slot] = live
    if live.started_s is None:
      live.started_s = now
      usage.queueing_s += now - request.arrival_s
    usage.prompt_tokens += len(request.prompt)
    made = self._backend.start(slot, request)
    self._clock.spend(made.seconds)
    live.fed = 0
    self._take(live, slot, made)

  def _take(self, live: _Live, slot: int, made: Made) -> None:
    """What came of a step for one request: a new token, one that it had before, or its end."""
    if slot in made.lost:
      self._end(live, Outcome.FAILED, made.lost[slot])
    elif live.fed == len(live.made):
      self._append(live, made.tokens[slot])

  def _append(self, live: _Live, token: int) -> None:
    if live.first_token_s is None:
      live.first_token_s = self._clock.now()
    if token in live.request.stop_ids:
      self._end(live, Outcome.DONE)
      return
    live.made.append(token)
    self.usage[live.request.user].new_tokens += 1
    if _has_all(live):
      self._end(live, Outcome.DONE)

  def _give_up_slot(self, live: _Live) -> None:
    if live.slot is None:
      return
    self._backend.stop(live.slot)
    del self._running[live.slot]
    heapq.heappush(self._free, live.slot)
    live.slot = None

  def _end(self, live: _Live, outcome: Outcome, reason: str = "") -> None:
    self._give_up_slot(live)
    del self._live[live.request.id]
    self.usage[live.request.user].ended += 1
    finished = Finished(
      live.request,
      outcome,
      tuple(live.made),
      self._clock.now(),
      live.started_s,
      live.first_token_s,
      live.preemptions,
      live.sat_out,
      reason,
    )
    self._ended.append(finished)


def serve(
  requests: Iterable[Request],
  backend: Backend,
  clock: Clock,
  scheduler: Scheduler | None = None,
  *,
  queue_limit: int | None = None,
) -> Iterator[Finished]:
  """Serves requests as they arrive, and gives each as it ends.

  What has ended is given before the loop goes on, so that a scheduler that is told by the caller
  knows it. Nothing is kept of what has ended, so requests may be a generator of any length.

  Args:
    requests: by arrival time; one that is late in this order arrives when it is seen.
    backend: computes.
    clock: tells the time.
    scheduler: says who is next; `Fcfs` by default.
    queue_limit: most requests that may wait while no slot is free; None for any number.

  Raises:
    ValueError: two requests of one id at the same time.
    RuntimeError: a scheduler that keeps requests waiting for nothing.
  """
  server = Server(backend, clock, scheduler, queue_limit=queue_limit)
  coming = iter(requests)
  following = next(coming, None)
  while following is not None or server.busy:
    while following is not None and following.arrival_s <= clock.now():
      server.submit(following)
      following = next(coming, None)
    stepped = server.step(math.inf if following is None else following.arrival_s)
    ended = server.take_ended()
    yield from ended
    if not stepped and not ended and (following is not None or server.busy):
      events = [server.wakes_at(), None if following is None else following.arrival_s]
      times = [time for time in events if time is not None]
      if not times:
        raise RuntimeError("requests wait, all slots are free, and the scheduler starts none")
      clock.wait_until(min(times))
