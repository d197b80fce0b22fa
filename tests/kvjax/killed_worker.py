"""Kills processes that write histories, and looks at what each of them has left.

    python killed_worker.py FOLDER KILLS SEED

Prints how many turns were written and how many were cut short. jax is not imported: one process
loads everything, and each that is killed is a fork of it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def without_jax() -> None:
  """The modules of kvjax.bidaw that need none, though their packages import it."""
  sys.path.insert(0, str(ROOT))
  for name in ("kvjax", "kvjax.bidaw", "tests", "tests.kvjax"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    sys.modules[name] = package


without_jax()

import numpy as np  # noqa: E402

from kvjax.bidaw.files import HistoryFiles, Kind  # noqa: E402
from tests.kvjax.known_kv import STAMP, kv_of, tokens_of  # noqa: E402

ROUNDS_OF_A_USER = 5


def look(files: HistoryFiles, written: dict[int, int]) -> dict[int, int]:
  """Checks that nothing was lost but the turn that was being written; tokens of each user."""
  found = {user: len(tokens) for user, tokens in files.found.items()}
  for user, length in written.items():
    assert found.get(user, 0) >= length, (user, length, found)
  for user in sorted(found)[-2:]:  # what nobody has written to since was looked at before
    tokens = files.found[user]
    np.testing.assert_array_equal(tokens, tokens_of(user, len(tokens)))
    chunks = files.read(user, tokens)
    kv = np.concatenate(chunks) if chunks else kv_of(tokens[:0])
    np.testing.assert_array_equal(kv, kv_of(tokens)[: files.end(user)])
    assert files.end(user) == len(kv) == len(tokens)
  assert {fault.kind for fault in files.faults} <= {Kind.UNFINISHED}, files.faults
  left = [p for p in (Path(sys.argv[1]) / STAMP.digest).rglob("*") if p.name.endswith("__lock")]
  assert not left, left
  return found


def write_on(pipe: int, user: int, written: dict[int, int], rng: random.Random) -> None:
  """Looks, says what it found, and adds turns to a history until it is killed."""
  files = HistoryFiles(sys.argv[1], STAMP)
  found = look(files, written)
  os.write(pipe, f"found {user} {found.get(user, 0)} {len(files.faults)}\n".encode())
  while True:
    length = found.get(user, 0) + rng.choice((1, 30, 3000))
    tokens = tokens_of(user, length)
    assert files.append(user, tokens, kv_of(tokens, files.end(user)))
    found[user] = length
    os.write(pipe, f"wrote {user} {length} 0\n".encode())


def main() -> None:
  kills, rng = int(sys.argv[2]), random.Random(int(sys.argv[3]))
  written: dict[int, int] = {}
  turns = unfinished = 0
  for round in range(kills + 1):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
      try:
        write_on(write, round // ROUNDS_OF_A_USER, written, rng)
      finally:
        os._exit(1)
    os.close(write)
    lines = os.fdopen(read)
    wanted, delay = rng.randrange(2), rng.random() * 0.004
    for line in lines:
      kind, user, length, faults = line.split()
      written[int(user)] = int(length)
      turns += kind == "wrote"
      unfinished += int(faults)
      wanted -= 1
      if wanted < 0:
        break
    until = time.perf_counter() + delay
    while time.perf_counter() < until:
      pass
    os.kill(child, signal.SIGKILL)
    for line in lines:  # what it said before it was killed
      kind, user, length, _ = line.split()
      written[int(user)] = int(length)
      turns += kind == "wrote"
    lines.close()
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"round {round}: it ended by itself, see above"
  print(turns, unfinished)


if __name__ == "__main__":
  main()
