"""Where the histories of all conversations lie: host memory, which is bounded, and disk.

A history is all keys and values of one user's conversation, the unit of caching. The disk has every
history (the tiers are inclusive), so leaving host memory costs nothing and a miss is a read. Only
bookkeeping is done here, in bytes; `kvjax.bidaw.eviction` says who leaves, `kvjax.bidaw.scheduler`
who is read.

Host memory holds the histories that are resident and room for those that are being read. Whenever
something comes in and less than 5 % of it would be free, histories are evicted until that much is
free again, but none that is pinned: a request of its user waits or is being served.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable

from kvjax.bidaw.eviction import Eviction

FREE_SHARE = 0.05


class Where(enum.StrEnum):
  """Where a history lies.

  NOWHERE: there is none. HOST: in host memory, and on disk. DISK: on disk only. READING: on its way
  from disk to host memory. TOO_LARGE: on disk only, and larger than host memory.
  """

  NOWHERE = enum.auto()
  HOST = enum.auto()
  DISK = enum.auto()
  READING = enum.auto()
  TOO_LARGE = enum.auto()


class Placement:
  """The one owner of what lies where; O(log n) for each call and each eviction.

  Args:
    host_bytes: of host memory for histories.
    eviction: says who leaves it; it belongs to this placement from now on.
    evicted: `evicted(user)`: called when a history has left host memory to make room.

  Attributes:
    host_bytes: as given.
    used_bytes: of host memory, by resident histories and those being read.
    evictions: so far.
    hits: requests that found their user's history in host memory when they arrived.
    misses: those that found it on disk, or on its way.

  Raises:
    ValueError: host memory of no bytes.
  """

  def __init__(
    self, host_bytes: int, eviction: Eviction, evicted: Callable[[int], None] = lambda user: None
  ):
    if host_bytes < 1:
      raise ValueError(f"host_bytes is {host_bytes}; give the host at least 1 byte for histories")
    self.host_bytes, self.used_bytes = host_bytes, 0
    self.evictions = self.hits = self.misses = 0
    self._eviction, self._evicted = eviction, evicted
    self._size: dict[int, int] = {}  # every history
    self._host: dict[int, int] = {}  # bytes of those that are in host memory, or being read
    self._reading: set[int] = set()
    self._pins: Counter[int] = Counter()  # user -> requests that wait or are served
    self._kept_bytes = 0  # of host memory: what is pinned or being read

  def __len__(self) -> int:
    return len(self._size)

  def where(self, user: int) -> Where:
    """Where the user's history lies."""
    if user in self._reading:
      return Where.READING
    if user in self._host:
      return Where.HOST
    if user not in self._size:
      return Where.NOWHERE
    return Where.DISK if self._size[user] <= self.host_bytes else Where.TOO_LARGE

  def size_bytes(self, user: int) -> int:
    """Bytes of the user's history, 0 if there is none."""
    return self._size.get(user, 0)

  def pinned(self, user: int) -> bool:
    """Whether a request of the user waits or is being served."""
    return user in self._pins

  @property
  def resident(self) -> frozenset[int]:
    """Users whose history is in host memory."""
    return frozenset(self._host.keys() - self._reading)

  @property
  def readable_bytes(self) -> int:
    """The largest history that could be read now: all that is not pinned would make way."""
    return self.host_bytes - self._kept_bytes

  def found(self, user: int, size_bytes: int) -> None:
    """A history that lies on disk from before; nothing of it is in host memory."""
    if size_bytes > 0:
      self._size[user] = size_bytes

  def arrive(self, user: int, now: float) -> Where:
    """A request of the user arrives, and pins its history; says where that lies."""
    self._pins[user] += 1
    if self._pins[user] == 1:
      self._eviction.pin(user)
      if user not in self._reading:
        self._kept_bytes += self._host.get(user, 0)
    self._eviction.arrived(user, now)
    where = self.where(user)
    self.hits += where is Where.HOST
    self.misses += where not in (Where.HOST, Where.NOWHERE)
    return where

  def unpin(self, user: int) -> None:
    """One request of the user neither waits nor is served any more.

    Raises:
      KeyError: no request of the user has arrived.
    """
    if user not in self._pins:
      raise KeyError(f"no request of user {user} has arrived that has not ended")
    self._pins[user] -= 1
    if self._pins[user] == 0:
      del self._pins[user]
      self._eviction.unpin(user)
      if user not in self._reading:
        self._kept_bytes -= self._host.get(user, 0)

  def begin_read(self, user: int) -> bool:
    """Makes room for a history that is read from disk from now on; False if there is too little.

    Raises:
      ValueError: the history does not lie on disk only.
    """
    if self.where(user) not in (Where.DISK, Where.TOO_LARGE):
      raise ValueError(f"the history of user {user} is {self.where(user)}; read those on disk")
    size = self._size[user]
    if size > self.readable_bytes:
      return False
    self._make_room(size)
    self._host[user] = size
    self._reading.add(user)
    self.used_bytes += size
    self._kept_bytes += size
    return True

  def end_read(self, user: int) -> None:
    """What was read is there. KeyError if nothing was being read."""
    self._reading.remove(user)
    if not self.pinned(user):
      self._kept_bytes -= self._host[user]
    self._eviction.insert(user)

  def give_up(self, user: int) -> None:
    """The history leaves host memory though it may be pinned, for one that is needed sooner."""
    self._leave_host(user)
    self.evictions += 1

  def lose(self, user: int) -> None:
    """The history could not be read, or is damaged: there is none any more, in either tier."""
    self._leave_host(user)
    self._size.pop(user, None)

  def end_turn(self, user: int, now: float, answer_tokens: int, size_bytes: int) -> Where:
    """A turn of the user has ended; its history is so large now and comes from the device.

    Returns HOST, or where it lies else if host memory has no room even without all that may leave.
    The request that is ended here stays pinned until `unpin`.

    Args:
      user: whose.
      now: seconds.
      answer_tokens: of the turn's answer.
      size_bytes: of the whole history.

    Raises:
      ValueError: the history is being read.
    """
    if user in self._reading:
      raise ValueError(f"the history of user {user} is being read; end the read before a turn")
    self._size[user] = size_bytes
    self._hold(user, size_bytes)
    self._eviction.answered(user, now, answer_tokens, size_bytes)
    return self.where(user)

  def forget(self, user: int) -> None:
    """The conversation is over.

    Raises:
      ValueError: a request of the user waits or is being served.
    """
    if self.pinned(user):
      raise ValueError(f"user {user} has requests that have not ended; end them before forgetting")
    self.lose(user)
    self._eviction.forget(user)

  def _hold(self, user: int, size_bytes: int) -> None:
    """The history is in host memory with so many bytes, or not at all if they do not fit."""
    pinned, old = self.pinned(user), self._host.get(user, 0)
    if size_bytes > self.readable_bytes + (old if pinned else 0):
      self._leave_host(user)
      return
    if user not in self._host:
      self._eviction.insert(user)
    self._host[user] = size_bytes
    self.used_bytes -= old
    self._kept_bytes += size_bytes - old if pinned else 0
    self._eviction.pin(user)  # it does not make room for itself
    self._make_room(size_bytes)
    if not pinned:
      self._eviction.unpin(user)
    self.used_bytes += size_bytes

  def _make_room(self, num_bytes: int) -> None:
    """Evicts until so many bytes fit and 5 % stay free, or nobody may leave."""
    most = self.host_bytes * (1 - FREE_SHARE) - num_bytes
    while self.used_bytes > most:
      victim = self._eviction.victim()
      if victim is None:
        return
      self.used_bytes -= self._host.pop(victim)
      self.evictions += 1
      self._evicted(victim)

  def _leave_host(self, user: int) -> None:
    if user not in self._host:
      return
    size = self._host.pop(user)
    self.used_bytes -= size
    if user in self._reading or self.pinned(user):
      self._kept_bytes -= size
    if user in self._reading:
      self._reading.remove(user)
    else:
      self._eviction.remove(user)
