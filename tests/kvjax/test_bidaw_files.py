"""Histories on disk: what is read is what was written, whatever happened to the disk meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from kvjax.bidaw.files import HistoryFiles, Kind, Piece
from kvjax.bidaw.objects import header_bytes
from tests.kvjax.known_kv import STAMP, kv_of, tokens_of

ENDS = (5, 9, 40, 41)  # of the turns of a history


@pytest.fixture
def opened(tmp_path):
  """Opens the folder, after whoever had it before has closed it."""
  have = []

  def open_files(stamp=STAMP, folder=tmp_path, **options) -> HistoryFiles:
    while have:
      have.pop().close()
    have.append(HistoryFiles(folder, stamp, **options))
    return have[-1]

  yield open_files
  have.pop().close()


def write(files: HistoryFiles, user: int, ends=ENDS) -> np.ndarray:
  for end in ends:
    tokens = tokens_of(user, end + 1)  # the last one has no keys and values yet
    assert files.append(user, tokens, kv_of(tokens, files.end(user), files.stamp)[:-1])
  return tokens_of(user, ends[-1] + 1)


def objects(folder: Path, user: int, stamp=STAMP) -> list[Path]:
  """Those with keys and values, by position."""
  paths = sorted((folder / stamp.digest / str(user)).iterdir())
  return [path for path in paths if path.name[:9] != path.name[10:]]


def is_good(files: HistoryFiles, user: int, tokens: np.ndarray, end: int) -> None:
  """Keys and values of the first tokens up to end are there, and nothing else."""
  chunks = files.read(user, tokens)
  assert sum(map(len, chunks)) == files.end(user) == end
  for chunk, start in zip(chunks, (0, *ENDS), strict=False):
    np.testing.assert_array_equal(chunk, kv_of(tokens, start, files.stamp)[: len(chunk)])


def kinds(files: HistoryFiles) -> list[Kind]:
  return [fault.kind for fault in files.faults]


def heals(files: HistoryFiles, user: int, tokens: np.ndarray) -> None:
  """The next turn writes what is missing, and ids that were written for want of it go."""
  files.faults.clear()
  assert files.append(user, tokens, kv_of(tokens, files.end(user), files.stamp))
  assert sum(map(len, files.read(user, tokens))) == len(tokens)
  assert not files.faults


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_histories_are_as_they_were_written(opened, dtype):
  stamp = dataclasses.replace(STAMP, dtype=dtype)
  files = opened(stamp)
  expected = {user: write(files, user) for user in (0, 7, -3)}
  for _ in range(2):
    for user, tokens in expected.items():
      is_good(files, user, tokens, ENDS[-1])
    files = opened(stamp)
    assert files.found.keys() == expected.keys()
    for user, tokens in expected.items():
      np.testing.assert_array_equal(files.found[user], tokens)
  assert files.read_bytes == 0 and files.end(8) == 0 and files.read(8, tokens_of(8, 3)) == []
  files.forget(7)
  assert opened(stamp).found.keys() == {0, -3}
  assert not files.faults


def damage(path: Path, how: str, place: int) -> None:
  data = bytearray(path.read_bytes())
  place %= len(data)
  if how == "cut":
    del data[place:]
  elif how == "flip":
    data[place] ^= 1 << place % 8
  elif how == "longer":
    data += b"x"
  if how == "gone":
    path.unlink()
  else:
    path.write_bytes(data)


def places(path: Path) -> list[int]:
  """Of every kind: magic, length, checksum, header, its padding, payload."""
  begin, end = header_bytes(path.read_bytes()), path.stat().st_size
  return [0, 8, 9, 16, 30, begin - 40, begin - 1, begin, (begin + end) // 2, end - 1]


@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("how", ["cut", "flip", "longer", "gone"])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_damage_is_found_dropped_and_reported(opened, tmp_path, how, which, again):
  """What is before it stays, and so do all ids, unless they went with the newest object."""
  files, before, expected = opened(), (0, *ENDS)[which], {}
  for user in range(10 if how in ("cut", "flip") else 1):
    expected[user] = write(files, user)
    path = objects(tmp_path, user)[which]
    place = places(path)[user]
    if again and which == 3 and (how == "gone" or place < header_bytes(path.read_bytes())):
      expected[user] = expected[user][: before + 1] if how != "longer" else expected[user]
    damage(path, how, place)
  files = opened() if again else files
  for user, tokens in expected.items():
    chunks = files.read(user, files.found[user] if again else tokens)
    assert sum(map(len, chunks)) == files.end(user) == before
    if chunks:
      np.testing.assert_array_equal(np.concatenate(chunks), kv_of(tokens)[:before])
  if not (again and how == "gone" and which == 3):  # then it is as if it had never been
    assert {(f.user, f.kind) for f in files.faults} == {(user, Kind.DAMAGED) for user in expected}
  files = opened()
  assert not files.faults
  for user, tokens in expected.items():
    assert files.end(user) == before
    np.testing.assert_array_equal(files.found[user], tokens)
    heals(files, user, tokens)
    left = objects(tmp_path, user)
    assert len(left) == len(list(left[0].parent.iterdir())) == which + (len(tokens) > before)


FIELDS = ("model", "tokenizer", "positions", "tenant", "dtype", "tensors", "layout")


@pytest.mark.parametrize("field", FIELDS)
def test_of_another_stamp_nothing_is_returned(opened, tmp_path, field):
  other = dataclasses.replace(STAMP, **{field: {"dtype": "float16", "layout": 0}.get(field, "b")})
  tokens = write(opened(), 1)
  files = opened(other)
  assert not files.found and files.end(1) == 0
  write(files, 2)
  for restarted in (False, True):  # nor where somebody has moved it
    for mine, theirs in zip(objects(tmp_path, 2, other), objects(tmp_path, 1), strict=True):
      mine.write_bytes(theirs.read_bytes())
    files = opened(other) if restarted else files
    assert files.read(2, tokens_of(2, 42)) == [] and not files.found.keys() - {2}
    assert Kind.FOREIGN in kinds(files)
    files = opened(other)
    files.forget(2)
    write(files, 2)
  is_good(opened(), 1, tokens, ENDS[-1])


def test_of_another_conversation_nothing_is_returned(opened, tmp_path):
  files = opened()
  tokens, others = write(files, 1), write(files, 2)
  for which, restarted in ((1, False), (3, True)):
    path = objects(tmp_path, 1)[which]
    path.write_bytes(objects(tmp_path, 2)[which].read_bytes())
    files = opened() if restarted else files
    is_good(files, 1, tokens, (0, *ENDS)[which])
    assert kinds(files) == [Kind.FOREIGN]
    files.forget(1)
    write(files, 1)
  is_good(files, 2, others, ENDS[-1])


@contextlib.contextmanager
def full_disk(num_bytes: int):
  """No file can have more bytes."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("room", "ids"), [(16, False), (4096, True)])
def test_a_full_disk(opened, tmp_path, room, ids):
  """Two turns are not written, of which ids may be; the next one writes all that is missing."""
  files = opened()
  write(files, 1)
  with full_disk(room):
    for length in (300, 400):
      tokens = tokens_of(1, length)
      assert not files.append(1, tokens, kv_of(tokens, 41))
  assert set(kinds(files)) == {Kind.UNWRITTEN}
  for restarted in (False, True):
    files = opened() if restarted else files
    is_good(files, 1, tokens, ENDS[-1])
  assert len(files.found[1]) == (400 if ids else 42) and not files.faults
  assert len(objects(tmp_path, 1)) == len(ENDS)
  heals(files, 1, tokens_of(1, 500))
  assert len(opened().found[1]) == 500


class Stalled:
  """A store whose reads of one object never end, and all else does at once."""

  def __init__(self, store, name: str):
    self._store, self._name, self.promises = store, name, []

  def read(self, key: str):
    if not key.endswith(self._name):
      return self._done(self._store.read(key))
    promise, future = tensorstore.Promise.new()
    self.promises.append(promise)
    return future

  def write(self, key: str, data: bytes):
    return self._done(self._store.write(key, data))

  def _done(self, future):
    future.result()
    return future


def test_a_read_that_hangs_is_given_up(opened):
  files = opened(timeout_s=0.05)
  tokens, store = write(files, 1), files._store
  files._store = Stalled(store, Piece(9, 40).name)
  chunks = files.read(1, tokens)
  np.testing.assert_array_equal(np.concatenate(chunks), kv_of(tokens)[:9])
  assert kinds(files) == [Kind.TIMED_OUT] and files.end(1) == ENDS[-1]
  files._store = store
  is_good(files, 1, tokens, ENDS[-1])  # it is there as it was


def test_forks_share_what_they_have_in_common(opened, tmp_path):
  files = opened()
  tokens = write(files, 1)
  files.fork(1, 2, tokens)
  assert all(path.stat().st_nlink == 2 for path in objects(tmp_path, 1))
  longer = np.concatenate([tokens, tokens_of(5, 20)])
  assert files.append(2, longer, kv_of(longer, ENDS[-1]))
  for restarted in (False, True):
    files = opened() if restarted else files
    is_good(files, 1, tokens, ENDS[-1])
    np.testing.assert_array_equal(np.concatenate(files.read(2, longer)), kv_of(longer))
  np.testing.assert_array_equal(files.found[1], tokens)
  np.testing.assert_array_equal(files.found[2], longer)
  with pytest.raises(ValueError, match="user 2 has a history already; fork 1 under another name"):
    files.fork(1, 2, tokens)
  files.forget(1)
  files = opened()
  assert files.found.keys() == {2}
  np.testing.assert_array_equal(np.concatenate(files.read(2, longer)), kv_of(longer))
  assert not files.faults


def test_a_fork_that_was_cut_short_is_none(opened, tmp_path):
  files = opened()
  tokens = write(files, 1)
  unfinished = tmp_path / STAMP.digest / "fork-2"
  unfinished.mkdir()
  (unfinished / objects(tmp_path, 1)[0].name).hardlink_to(objects(tmp_path, 1)[0])
  files = opened()
  assert kinds(files) == [Kind.UNFINISHED] and not unfinished.exists()
  is_good(files, 1, tokens, ENDS[-1])


def test_a_write_that_ends_after_its_time_disturbs_nothing(opened, tmp_path):
  """An object of the same start as one that was written later."""
  files = opened()
  tokens = write(files, 1, ENDS[:2])
  folder = objects(tmp_path, 1)[0].parent
  late = objects(tmp_path, 1)[1].read_bytes()
  files.forget(1)
  files.append(1, tokens, kv_of(tokens)[:5])
  files.append(1, tokens_of(1, 30), kv_of(tokens_of(1, 30), 5))
  (folder / Piece(5, 9).name).write_bytes(late)
  files = opened()
  assert len(files.found[1]) == files.end(1) == 30 and not files.faults
  assert len(list(folder.iterdir())) == 2


def test_other_files_are_left_alone(opened, tmp_path):
  files = opened()
  write(files, 1)
  (tmp_path / STAMP.digest / "lost+found").mkdir()
  note = objects(tmp_path, 1)[0].parent / "notes.txt"
  note.write_text("mine")
  files = opened()
  assert files.found.keys() == {1} and note.exists() and not files.faults


def test_a_folder_has_one_owner(opened, tmp_path):
  opened()
  with pytest.raises(ValueError, match="belong to another process; end it or give another folder"):
    HistoryFiles(tmp_path, STAMP)
  HistoryFiles(tmp_path, dataclasses.replace(STAMP, tenant="another")).close()


def test_a_hundred_kills_lose_at_most_the_turn_that_was_being_written(tmp_path):
  """SIGKILL at random moments; each process looks at all that those before it have left."""
  worker = Path(__file__).with_name("killed_worker.py")
  command = [sys.executable, str(worker), str(tmp_path), "100", "0"]
  run = subprocess.run(command, capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stderr
  turns, unfinished = map(int, run.stdout.split())
  assert turns >= 48 and unfinished > 0  # turns that the worker waited for
