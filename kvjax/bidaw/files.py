"""The histories of all conversations on disk: for each a folder of objects, one a turn.

An object is written whole and then renamed (by TensorStore, which also syncs file and folder), and
never changed. Names say which positions an object holds:

    <stamp>/<user>/<start>-<end>

and a history is the objects that follow each other from position 0. So there is no other record
that could disagree with them, and a kill at any moment loses at most what is being written. A fork
has links to the objects of its parent.

An object with start = end holds ids only. It is written where keys and values are not there (the
disk was full, or they were damaged and dropped) and so that a fork knows its own name.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import re
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from kvjax.bidaw.objects import (
  Damaged,
  Foreign,
  Header,
  Stamp,
  check,
  hash_of,
  header_bytes,
  header_of,
  pack,
  unpack,
)

_UNFINISHED = ".__lock"  # what TensorStore calls a file that it has not renamed yet
_NUMBER, _NAME = re.compile(r"-?\d+"), re.compile(r"\d+-\d+")


class Kind(enum.StrEnum):
  """What can go wrong on disk; in each case what is lost is computed anew from token ids.

  DAMAGED: an object was not as it was written; it is dropped, with those after it. FOREIGN: it was
  another model's, tenant's or conversation's, and is dropped too. TIMED_OUT: a read took too long.
  UNREADABLE: a read failed; what is on disk was left alone. UNWRITTEN: a turn could not be written,
  as on a full disk. UNFINISHED: a write was cut short by the end of its process.
  """

  DAMAGED = enum.auto()
  FOREIGN = enum.auto()
  TIMED_OUT = enum.auto()
  UNREADABLE = enum.auto()
  UNWRITTEN = enum.auto()
  UNFINISHED = enum.auto()


class Fault(NamedTuple):
  """Something that went wrong: of which user, what, and in words."""

  user: int
  kind: Kind
  detail: str


class Piece(NamedTuple):
  """The positions of an object."""

  start: int
  end: int

  @property
  def name(self) -> str:
    """In the folder of its conversation; names sort as positions do."""
    return f"{self.start:09d}-{self.end:09d}"


class HistoryFiles:
  """The one owner of a folder of histories of one stamp.

  What is there is found by listing folders and by the newest object of each conversation; the
  others are looked at when they are read. Calls for different users may come from different
  threads, those for one user one after another.

  Args:
    folder: of histories of any stamp.
    stamp: of those that are read and written here.
    timeout_s: most seconds of a read of a history, and of a write.

  Attributes:
    found: user -> i32[n], the token ids of the histories that were there at first.
    faults: what has gone wrong so far, for whoever takes it out.
    read_bytes: of objects, so far; written_bytes likewise.

  Raises:
    ValueError: another process has the folder.
  """

  def __init__(self, folder: str | Path, stamp: Stamp, *, timeout_s: float = 30.0):
    self.stamp, self._timeout_s = stamp, timeout_s
    self._folder = Path(folder) / stamp.digest
    self._folder.mkdir(parents=True, exist_ok=True)
    self._lock = _locked(self._folder)
    self._store = open_store(self._folder)
    self._pieces: dict[int, list[Piece]] = {}
    self._notes: dict[int, set[Piece]] = {}
    self.found: dict[int, np.ndarray] = {}
    self.faults: deque[Fault] = deque()
    self.read_bytes = self.written_bytes = 0
    self._recover()

  def end(self, user: int) -> int:
    """Tokens of the user whose keys and values are on disk."""
    pieces = self._pieces.get(user)
    return pieces[-1].end if pieces else 0

  def append(self, user: int, tokens: np.ndarray, kv: np.ndarray) -> bool:
    """Writes what follows on `end(user)`; False, with a fault, if it is not on disk.

    Args:
      user: whose.
      tokens: i32[n], all ids of the conversation.
      kv: f[T, L, 2, K, D], T may be 0.
    """
    piece = Piece(self.end(user), self.end(user) + len(kv))
    data = pack(self.stamp, user, tokens, piece.start, kv)
    try:
      self._write(user, piece, data)
    except Exception as error:  # TensorStore's errors have no type in common
      self._fault(user, Kind.UNWRITTEN, f"positions {piece.name}: {_in_words(error)}")
      if len(kv):
        self.append(user, tokens, kv[:0])  # which is small, and may fit
      return False
    if len(kv):
      self._pieces.setdefault(user, []).append(piece)
      self._unlink(user, self._notes.pop(user, ()))
    else:
      self._notes.setdefault(user, set()).add(piece)
    return True

  def read(self, user: int, tokens: np.ndarray) -> list[np.ndarray]:
    """Keys and values f[T, L, 2, K, D] of the history's first tokens, object by object.

    All objects are asked for at once. What is damaged is dropped, with what follows on it.

    Args:
      user: whose.
      tokens: i32[n], all ids of the conversation.
    """
    deadline = time.monotonic() + self._timeout_s
    reads = [(p, self._store.read(_key(user, p))) for p in self._pieces.get(user, ())]
    chunks = []
    for piece, future in reads:
      try:
        result = future.result(timeout=max(0.0, deadline - time.monotonic()))
        if result.state != "value":
          raise Damaged("it is gone")
        chunks.append(unpack(result.value, self.stamp, tokens))
        self.read_bytes += len(result.value)
      except (Damaged, Foreign) as error:
        self._drop(user, piece, tokens, error)
        break
      except TimeoutError:
        self._fault(user, Kind.TIMED_OUT, f"{piece.name} was not read in {self._timeout_s} s")
        break
      except Exception as error:
        self._fault(user, Kind.UNREADABLE, f"{piece.name}: {_in_words(error)}")
        break
    return chunks

  def fork(self, user: int, new: int, tokens: np.ndarray) -> None:
    """A second conversation that begins as the user's does, and shares its objects.

    Raises:
      ValueError: there is one of this name.
    """
    if new in self._pieces or new in self._notes:
      raise ValueError(f"user {new} has a history already; fork {user} under another name")
    temporary, end = self._folder / f"fork-{new}", self.end(user)
    temporary.mkdir()
    for piece in self._pieces.get(user, ()):
      os.link(self._folder / _key(user, piece), temporary / piece.name)
    note = Piece(end, end)
    data = pack(self.stamp, new, tokens, end, self._no_tokens())
    self._store.write(f"{temporary.name}/{note.name}", data).result(timeout=self._timeout_s)
    temporary.rename(self._folder / str(new))
    self._pieces[new], self._notes[new] = list(self._pieces.get(user, ())), {note}

  def forget(self, user: int) -> None:
    """The conversation is over. What was shared with a fork stays there."""
    self._unlink(user, reversed(self._pieces.pop(user, [])))
    self._unlink(user, self._notes.pop(user, ()))
    with contextlib.suppress(OSError):
      (self._folder / str(user)).rmdir()

  def close(self) -> None:
    """Another process may have the folder."""
    os.close(self._lock)

  def _no_tokens(self) -> np.ndarray:
    return np.zeros((0, *self.stamp.token_shape), self.stamp.numpy_dtype)

  def _write(self, user: int, piece: Piece, data: bytes) -> None:
    self._store.write(_key(user, piece), data).result(timeout=self._timeout_s)
    self.written_bytes += len(data)

  def _fault(self, user: int, kind: Kind, detail: str) -> None:
    self.faults.append(Fault(user, kind, detail))

  def _unlink(self, user: int, pieces) -> None:
    for piece in pieces:
      (self._folder / _key(user, piece)).unlink(missing_ok=True)

  def _drop(self, user: int, piece: Piece, tokens: np.ndarray, error: Exception) -> None:
    """Objects from this one on, the newest first, after the ids that they have are safe."""
    self._fault(user, _kind(error), f"{piece.name}: {error}")
    kept = [p for p in self._pieces[user] if p.start < piece.start]
    dropped = self._pieces[user][len(kept) :]
    self._pieces[user] = kept
    self.append(user, tokens, self._no_tokens())
    self._unlink(user, reversed(dropped))

  def _recover(self) -> None:
    for folder in self._folder.iterdir():
      if folder.name.startswith("fork-"):
        shutil.rmtree(folder)
        self._fault(int(folder.name[5:]), Kind.UNFINISHED, "a fork")
      elif folder.is_dir() and _NUMBER.fullmatch(folder.name):
        self._recover_one(int(folder.name), folder)

  def _recover_one(self, user: int, folder: Path) -> None:
    pieces, behind, notes = self._listed(user, folder)
    known: list[np.ndarray] = []
    dropped: list[Piece] = []

    def good(piece: Piece) -> bool:
      tokens, error = self._look(user, piece, _longest(known) if known else None)
      known.extend([] if tokens is None else [tokens])
      if error is not None:
        self._fault(user, _kind(error), f"{piece.name}: {error}")
        dropped.append(piece)
      return error is None

    self._notes[user] = {note for note in sorted(notes) if good(note)}
    for piece in reversed(behind):
      if good(piece):
        self._fault(user, Kind.DAMAGED, f"{piece.name}: what it follows on is gone")
        dropped.append(piece)
    while pieces and not good(pieces[-1]):
      pieces.pop()
    if known:
      self._pieces[user], self.found[user] = pieces, _longest(known)
    if known and dropped:
      self.append(user, self.found[user], self._no_tokens())
    self._unlink(user, [piece for piece in dropped if piece not in self._notes[user]])
    if not known:
      self.forget(user)

  def _listed(self, user: int, folder: Path) -> tuple[list[Piece], list[Piece], set[Piece]]:
    """Objects that follow each other from position 0, those behind a gap, and those of ids only."""
    starts: dict[int, Piece] = {}
    notes, others = set(), []
    for path in folder.iterdir():
      if path.name.endswith(_UNFINISHED):
        path.unlink()
        self._fault(user, Kind.UNFINISHED, path.name.removesuffix(_UNFINISHED))
        continue
      if not _NAME.fullmatch(path.name):
        continue
      piece = Piece(*map(int, path.name.split("-")))
      if piece.start == piece.end:
        notes.add(piece)
        continue
      other = starts.get(piece.start, piece)  # of a write that came to an end after its time
      starts[piece.start] = max(piece, other)
      others += [min(piece, other)] if other != piece else []
    pieces: list[Piece] = []
    while (piece := starts.pop(pieces[-1].end if pieces else 0, None)) is not None:
      pieces.append(piece)
    self._unlink(user, others)
    return pieces, sorted(starts.values()), notes

  def _look(
    self, user: int, piece: Piece, known: np.ndarray | None
  ) -> tuple[np.ndarray | None, Exception | None]:
    """Ids that an object has, as far as they are good, and why it is of no use otherwise.

    Args:
      user: whose it should be.
      piece: which.
      known: ids of the user, of which it may hold the first without being the user's own.
    """
    try:
      header, size = _read_header(self._folder / _key(user, piece))
      shared = known is not None and header.through == hash_of(known[: header.end])
      check(header, self.stamp, None if shared else user)
      if (header.start, header.end) != piece:
        raise Damaged(f"it holds positions {Piece(header.start, header.end).name}")
    except (Damaged, Foreign) as error:
      return None, error
    expected = (piece.end - piece.start) * self.stamp.token_bytes
    if size != expected:
      return header.tokens, Damaged(f"it has {size} bytes of keys and values and not {expected}")
    return header.tokens, None


def open_store(folder: Path) -> Any:
  """TensorStore's store of the files below a folder."""
  return tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()


def _key(user: int, piece: Piece) -> str:
  return f"{user}/{piece.name}"


def _longest(known: list[np.ndarray]) -> np.ndarray:
  return known[np.argmax([len(tokens) for tokens in known])]


def _kind(error: Exception) -> Kind:
  return Kind.FOREIGN if isinstance(error, Foreign) else Kind.DAMAGED


def _in_words(error: Exception) -> str:
  return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()


def _read_header(path: Path) -> tuple[Header, int]:
  """The header of a file, and bytes of the payload behind it."""
  with path.open("rb") as file:
    beginning = file.read(1 << 12)
    size = header_bytes(beginning)
    whole = beginning + file.read(max(0, min(size, path.stat().st_size) - len(beginning)))
  return header_of(whole), path.stat().st_size - size


def _locked(folder: Path) -> int:
  """A descriptor by which this process has the folder until it ends."""
  descriptor = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o644)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    raise ValueError(
      f"histories in {folder} belong to another process; end it or give another folder"
    ) from None
  return descriptor
