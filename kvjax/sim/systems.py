"""Whole systems in virtual time: Bidaw, what it is compared with, and Bidaw without its parts.

    for finished in System(SYSTEMS["bidaw"], setup).serve(requests(workload, config.max_tokens)):
      ...

All are the same serving loop, backend, placement and disk; they differ by a `Design`. Histories
that are read from disk are on disk for all of them, and writing costs no time. (On an engine whose
costs were measured a turn that ends takes time to store.)

| system | queue | leaves host memory | keeps |
| --- | --- | --- | --- |
| recompute (vLLM) | in order | | nothing |
| cached_attention | in order, read ahead | least recently used, not who waits | keys and values |
| flashgen | the same; skips who does not fit | the same | the same; reads them in part |
| bidaw | dual | previous answer | activations where they are smaller |
| ideal | dual | nothing: memory without end | keys and values |

FlashGen's share of a history that is read is what the disk reads in the time in which the device
computes the rest [ours]: both work on it equally long.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvjax.bidaw import (
  DualQueue,
  Eviction,
  InOrder,
  Placement,
  PreviousAnswer,
  Read,
  TimedDisk,
  Where,
  lru,
)
from kvjax.bidaw.tiers import POLL_S
from kvjax.config import ModelConfig
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.engine.serving import serve
from kvjax.sim import costs
from kvjax.sim.backend import History, SimBackend
from kvjax.sim.engine_costs import EngineCosts
from kvjax.sim.hardware import Machine

IDLE_S = 3600.0  # after which a conversation's history is forgotten, as in CachedAttention
WITHOUT_END = 1 << 62  # bytes
SLOTS = 256  # room on the device decides before these do


class Setup(NamedTuple):
  """What systems are compared on.

  Attributes:
    config: the model's shape.
    machine: from `hardware`; its disk is the one that is read.
    host_bytes: of host memory for histories.
    slots: turns that are decoded at once, at most.
    engine: what starts, steps and ends take, as measured; None for what the machine would. Its loop
      sees only now and then that a read has ended, and begins the next one then.
  """

  config: ModelConfig
  machine: Machine
  host_bytes: int
  slots: int = SLOTS
  engine: EngineCosts | None = None


class Design(NamedTuple):
  """What makes a system.

  Attributes:
    queue: `queue(placement, disk)`, the scheduler.
    eviction: `eviction(host_bytes)`.
    keeps: whether histories are kept at all.
    as_activations: as normalised activations, if these are smaller than keys and values.
    in_part: whether a part of what is on disk is computed anew.
    without_end: whether host memory has no end.
  """

  queue: Callable[[Placement, TimedDisk], DualQueue[Request]]
  eviction: Callable[[int], Eviction]
  keeps: bool = True
  as_activations: bool = False
  in_part: bool = False
  without_end: bool = False


def _lru(host_bytes: int) -> Eviction:
  """In a queue that pins who waits, this is the queue-enhanced LRU."""
  del host_bytes
  return lru()


_SKIPPING = functools.partial(InOrder[Request], skip_ahead=True)
_BIDAW = Design(DualQueue[Request], PreviousAnswer, as_activations=True)
SYSTEMS: dict[str, Design] = {
  "recompute": Design(InOrder[Request], _lru, keeps=False),
  "cached_attention": Design(InOrder[Request], _lru),
  "flashgen": Design(_SKIPPING, _lru, in_part=True),
  "bidaw": _BIDAW,
  "ideal": Design(DualQueue[Request], _lru, without_end=True),
  # Bidaw without one of its parts, and with one or two of them only.
  "without_dual_queue": _BIDAW._replace(queue=_SKIPPING),
  "without_previous_answer": _BIDAW._replace(eviction=_lru),
  "without_tensor": _BIDAW._replace(as_activations=False),
  "in_order": Design(_SKIPPING, _lru),
  "dual_queue": Design(DualQueue[Request], _lru),
}


class PartialDisk(TimedDisk):
  """A disk of whose histories only a share is read, and which may be looked at now and then only.

  Args:
    bytes_per_s: of a read.
    seek_s: before its first byte.
    share: of each history.
    poll_s: a read ends when it is seen, by a loop that looks again after so many seconds or a step,
      as at the real disk; None for one that is told.

  Attributes:
    partial: users whose history was read in part and whose turn has not ended.
  """

  def __init__(
    self, bytes_per_s: float, seek_s: float, share: float, *, poll_s: float | None = None
  ):
    super().__init__(bytes_per_s, seek_s)
    self._share, self._poll_s = share, poll_s
    self.partial: set[int] = set()

  def read_s(self, num_bytes: int) -> float:
    return super().read_s(int(num_bytes * self._share))

  def begin(self, user: int, num_bytes: int, now: float) -> None:
    super().begin(user, int(num_bytes * self._share), now)
    self.partial.add(user)

  def ended(self, now: float) -> list[Read]:
    reads = super().ended(now)
    return reads if self._poll_s is None else [read._replace(ended_s=now) for read in reads]

  def wakes_at(self, now: float) -> float | None:
    wakes_at = super().wakes_at(now)
    return wakes_at if wakes_at is None or self._poll_s is None else now + self._poll_s


class EngineClock(VirtualClock):
  """Virtual time of a measured engine: its pace changes, and it is slower while the disk reads.

  Args:
    engine: what it costs.
    disk: that shares its cores.
  """

  def __init__(self, engine: EngineCosts, disk: TimedDisk):
    super().__init__()
    self._engine, self._disk = engine, disk

  def spend(self, seconds: float) -> None:
    while seconds > 0:
      now = self.now()
      pace, until = self._engine.pace_at(now)
      done = 1 / pace  # of the seconds, in each that passes
      if now < self._disk.free_s:
        done *= 1 - self._engine.lost_beside_read
        until = min(until, self._disk.free_s)
      if seconds <= (until - now) * done:
        super().spend(seconds / done)
        return
      super().wait_until(until)
      seconds -= (until - now) * done

  def wait_until(self, then: float) -> None:
    if then > self.now():
      super().wait_until(then + self._engine.wake_s)


class System:
  """A design on a setup, from now on.

  Args:
    design: one of `SYSTEMS`, or another.
    setup: model, machine and memory.

  Attributes:
    placement: where histories lie; counts hits, misses and evictions.
    disk: counts what was read.
    backend: the model.
    written_bytes: to disk: what each turn has added, once.
    rewritten_bytes: what it would be if a turn wrote its whole history.

  Raises:
    ValueError: a machine that cannot hold the model.
  """

  def __init__(self, design: Design, setup: Setup):
    config, machine, engine = setup.config, setup.machine, setup.engine
    self.token_bytes, activations = kept_bytes(design, setup)
    self._share = read_share(setup, self.token_bytes) if design.in_part else 1.0
    poll_s = None if engine is None else POLL_S
    disk = machine.disk_bytes_per_s, machine.transfer_s, self._share
    self.disk = PartialDisk(*disk, poll_s=poll_s)
    host_bytes = WITHOUT_END if design.without_end else setup.host_bytes
    self.placement = Placement(host_bytes, design.eviction(host_bytes))
    self.queue = design.queue(self.placement, self.disk)
    self.backend = SimBackend(
      config, machine, setup.slots, self.history, as_activations=activations, engine=engine
    )
    self._engine = engine
    self.written_bytes = self.rewritten_bytes = 0
    self._keeps = design.keeps
    self._tokens: dict[int, int] = {}  # user -> of its history, as far as the context reaches
    self._idle: OrderedDict[int, float] = OrderedDict()  # user -> end of its last turn

  def serve(self, requests: Iterable[Request]) -> Iterator[Finished]:
    """Serves requests by arrival, and gives each as it ends; once."""
    engine = self._engine
    clock = VirtualClock() if engine is None else EngineClock(engine, self.disk)
    for finished in serve(requests, self.backend, clock, self.queue):
      self._ended(finished)
      if engine is not None:
        clock.spend(engine.store_s)
      yield finished

  def history(self, user: int) -> History:
    """What the backend finds of a user's conversation."""
    tokens = self._tokens.get(user, 0)
    if not tokens or not self._keeps or self.placement.where(user) is not Where.HOST:
      return History(tokens)
    return History(tokens, int(tokens * self._share) if user in self.disk.partial else tokens)

  def _ended(self, finished: Finished) -> None:
    request, now = finished.request, finished.ended_s
    if finished.outcome is not Outcome.DONE:
      self.queue.gave_up(request, now)
      return
    user, new = request.user, len(request.prompt) + len(finished.tokens)
    tokens = min(self._tokens.get(user, 0) + new, self.backend.context_tokens)
    self._tokens[user] = tokens
    self.written_bytes += min(new, tokens) * self.token_bytes
    self.rewritten_bytes += tokens * self.token_bytes
    self.disk.partial.discard(user)
    self.queue.ended(request, now, len(finished.tokens), tokens * self.token_bytes)
    self._forget_idle(user, now)

  def _forget_idle(self, user: int, now: float) -> None:
    self._idle[user] = now
    self._idle.move_to_end(user)
    while now - next(iter(self._idle.values())) > IDLE_S:
      idle, _ = self._idle.popitem(last=False)
      if not self.placement.pinned(idle):
        self.placement.forget(idle)


def kept_bytes(design: Design, setup: Setup) -> tuple[int, bool]:
  """Bytes that are kept of a token, and whether they are activations."""
  config, item_bytes = setup.config, setup.machine.item_bytes
  pairs = costs.kv_bytes(config, 1, item_bytes)
  activations = costs.activation_bytes(config, 1, item_bytes)
  if not design.keeps:
    return 0, False
  smaller = design.as_activations and activations < pairs
  return (activations, True) if smaller else (pairs, False)


def read_share(setup: Setup, token_bytes: int) -> float:
  """Share of a history that is read while the rest could be computed."""
  numbers = setup.config.num_layers * costs.layer_numbers(setup.config)
  compute_s = 2 * numbers / setup.machine.product_flops_per_s
  return compute_s / (compute_s + token_bytes / setup.machine.disk_bytes_per_s)
