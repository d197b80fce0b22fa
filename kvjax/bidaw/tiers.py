"""The bytes of all histories: arrays in host memory, and their files, read and written beside.

`Placement` says who is where; this has what is there. It is the disk of a `DualQueue`:

    files = HistoryFiles(folder, stamp)
    tiers = Tiers(files)
    placement = Placement(host_bytes, lru(), tiers.evict)
    queue = DualQueue(placement, tiers)
    for user, size in tiers.found():
      placement.found(user, size)

Token ids of all histories stay in memory, a few bytes each beside kilobytes of keys and values: so
whatever is not there, for whatever reason, is computed anew and nothing of a conversation is lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from kvjax.bidaw.disk import Read
from kvjax.bidaw.files import Fault, HistoryFiles

POLL_S = 1e-3  # after which a loop with nothing else to do looks at reads again
_FIRST_GUESS = 1e9  # bytes/s, before anything was read
_READERS = 4  # threads, which mostly wait


class History(NamedTuple):
  """What is at hand of a conversation.

  Attributes:
    tokens: i32[n], all its ids.
    chunks: f[T, L, 2, K, D] each, keys and values of its first tokens one after another; none where
      it is not in host memory.
  """

  tokens: np.ndarray
  chunks: Sequence[np.ndarray] = ()

  @property
  def kv_tokens(self) -> int:
    """Tokens whose keys and values are at hand."""
    return sum(map(len, self.chunks))


class Tiers:
  """The one owner of histories in host memory; a `Disk` over real files.

  Host memory is bounded by `Placement`. What left it but is not on disk yet is beyond that: at most
  `unwritten_bytes`, as a turn that ends waits for the oldest write where there is more.

  Args:
    files: the disk; it belongs to the tiers from now on.
    unwritten_bytes: most bytes that wait to be written.
  """

  def __init__(self, files: HistoryFiles, *, unwritten_bytes: int = 1 << 30):
    self._files, self._unwritten_bytes = files, unwritten_bytes
    self._tokens = files.found  # of every conversation
    self._host: dict[int, list[np.ndarray]] = {}
    self._writes: deque[tuple[Future[None], int]] = deque()
    self._last_write: dict[int, Future[None]] = {}  # of users with turns that may not be written
    self._reads: dict[int, Future[list[np.ndarray]]] = {}
    self._writer = ThreadPoolExecutor(1, "kvjax-write")
    self._readers = ThreadPoolExecutor(_READERS, "kvjax-read")
    self._read_s = self._read_bytes = 0.0

  @property
  def files(self) -> HistoryFiles:
    """The disk."""
    return self._files

  def take_faults(self) -> list[Fault]:
    """What has gone wrong on disk since this was last asked."""
    faults = self._files.faults
    return [faults.popleft() for _ in range(len(faults))]

  def found(self) -> Iterator[tuple[int, int]]:
    """User and bytes of each history that is on disk only, once all is written."""
    self.flush()
    for user in self._tokens:
      if user not in self._host:
        yield user, self._files.end(user) * self._files.stamp.token_bytes

  def history(self, user: int) -> History:
    """What is at hand of the user's conversation, with no tokens if there is none."""
    tokens = self._tokens.get(user, np.zeros(0, np.int32))
    return History(tokens, tuple(self._host.get(user, ())))

  def size_bytes(self, user: int) -> int:
    """Of the keys and values that the user has in host memory."""
    return self.history(user).kv_tokens * self._files.stamp.token_bytes

  def end_turn(self, user: int, tokens: Sequence[int], first: int, kv: np.ndarray) -> None:
    """A turn has ended: the history goes to host memory now, and to disk in the background.

    Args:
      user: whose.
      tokens: all ids of the conversation.
      first: position of the first token of kv; the end of a chunk that is at hand, or 0.
      kv: f[T, L, 2, K, D], of the tokens from there on; ids after them have none yet.

    Raises:
      ValueError: there is a gap before kv.
    """
    kept = _before(self._host.get(user, []), first)
    if sum(map(len, kept)) != first:
      raise ValueError(
        f"keys and values from position {first} of user {user}, of whom {sum(map(len, kept))} "
        "tokens end before that; give them from there"
      )
    self._tokens[user] = np.array(tokens, np.int32)
    self._host[user] = [*kept, kv]
    self._collect()
    write = self._writer.submit(self._write, user, self._tokens[user], self._host[user])
    self._last_write[user] = write
    self._writes.append((write, kv.nbytes))
    while sum(num_bytes for _, num_bytes in self._writes) > self._unwritten_bytes:
      self._writes.popleft()[0].result()

  def evict(self, user: int) -> None:
    """The history is not in host memory any more."""
    self._host.pop(user, None)

  def fork(self, user: int, new: int) -> None:
    """A second conversation that begins as the user's does; it lies on disk, and shares its files.

    Raises:
      ValueError: there is none to fork, or one of the new name.
    """
    if user not in self._tokens:
      raise ValueError(f"user {user} has no history; end a turn before forking it")
    if new in self._tokens:
      raise ValueError(f"user {new} has a history already; fork {user} under another name")
    self._written(user)
    self._files.fork(user, new, self._tokens[user])
    self._tokens[new] = self._tokens[user]

  def forget(self, user: int) -> None:
    """The conversation is over; its files go."""
    self._written(user)
    self._host.pop(user, None)
    self._tokens.pop(user, None)
    self._files.forget(user)

  def flush(self) -> None:
    """Waits until everything is written."""
    while self._writes:
      self._writes.popleft()[0].result()
    self._last_write.clear()

  def close(self) -> None:
    """Everything is written, and another process may have the files."""
    self._writer.shutdown()
    self._readers.shutdown()
    self.flush()
    self._files.close()

  def read_s(self, num_bytes: int) -> float:
    """By the mean of all reads so far."""
    rate = self._read_bytes / self._read_s if self._read_bytes else _FIRST_GUESS
    return num_bytes / rate

  def begin(self, user: int, num_bytes: int, now: float) -> None:
    """Begins to read, after what is still to be written of the user."""
    del num_bytes, now
    read = self._read, user, self._tokens[user], self._last_write.get(user)
    self._reads[user] = self._readers.submit(*read)

  def ended(self, now: float) -> list[Read]:
    """Reads that have ended; those of damaged histories are good as far as something is left."""
    reads = []
    for user in [user for user, read in self._reads.items() if read.done()]:
      chunks = self._reads.pop(user).result()
      if chunks:
        self._host[user] = chunks
      reads.append(Read(user, now, bool(chunks)))
    return reads

  def wakes_at(self, now: float) -> float | None:
    """Soon, while something is being read."""
    return now + POLL_S if self._reads else None

  def _read(self, user: int, tokens: np.ndarray, write: Future[None] | None) -> list[np.ndarray]:
    if write is not None:
      write.result()
    begin = time.perf_counter()
    chunks = self._files.read(user, tokens)
    self._read_s += time.perf_counter() - begin
    self._read_bytes += sum(chunk.nbytes for chunk in chunks)
    return chunks

  def _write(self, user: int, tokens: np.ndarray, chunks: list[np.ndarray]) -> None:
    """What is not on disk of a history, which is a turn unless a write has failed before."""
    after = _from(chunks, self._files.end(user))
    self._files.append(user, tokens, after[0] if len(after) == 1 else np.concatenate(after))

  def _written(self, user: int) -> None:
    if user in self._last_write:
      self._last_write[user].result()

  def _collect(self) -> None:
    """Forgets writes that are done; an error in one is raised here."""
    while self._writes and self._writes[0][0].done():
      self._writes.popleft()[0].result()
    if not self._writes:
      self._last_write.clear()


def _before(chunks: Sequence[np.ndarray], end: int) -> list[np.ndarray]:
  """Those of the chunks that end by then."""
  kept, position = [], 0
  for chunk in chunks:
    position += len(chunk)
    if position > end:
      break
    kept.append(chunk)
  return kept


def _from(chunks: Sequence[np.ndarray], first: int) -> list[np.ndarray]:
  """The tokens of the chunks from position first on, at least one array, which may be empty."""
  parts, position = [], 0
  for chunk in chunks:
    parts.append(chunk[max(0, first - position) :])
    position += len(chunk)
  return [part for part in parts if len(part)] or parts[-1:]
