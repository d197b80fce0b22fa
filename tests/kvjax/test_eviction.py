"""Eviction orders: exact victims of small traces, and the jitted twins against the plain ones."""

from __future__ import annotations

from functools import cache, partial

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.eviction import Belady, Fifo, Lru, S3Fifo, next_uses
from kvjax.opkv.eviction import EVICTIONS
from tests.kvjax.opkv_by_hand import order_of

ORDERS = {
  "fifo": Fifo,
  "lru": Lru,
  "s3fifo": partial(S3Fifo, 10),
  "belady": lambda: Belady(lambda key: 0.0),
}


def play(order, capacity: int, accesses) -> tuple[int, list]:
  """Misses, and what was given up, in order."""
  misses, gone = 0, []
  for key in accesses:
    if key in order:
      order.touch(key)
      continue
    misses += 1
    if len(order) == capacity:
      gone.append(order.victim())
    order.insert(key)
  return misses, gone


@pytest.mark.parametrize(
  ("make", "gone"),
  [(Fifo, ["a", "b", "c", "d"]), (Lru, ["b", "c", "d", "b"])],
)
def test_victims_of_a_small_trace(make, gone):
  assert play(make(), 3, "abcadbaec")[1] == gone


def test_belady_gives_up_what_is_used_last():
  accesses = "abcadbaec"
  following, place = next_uses(accesses), iter(range(len(accesses)))
  order = Belady(lambda key: following[next(place)])
  # At d: c is next used at 8, a at 6, b at 5. At e: d, b and a never again, d longest ago.
  assert play(order, 3, accesses) == (6, ["c", "d", "b"])


def test_belady_misses_least():
  rng = np.random.default_rng(0)
  accesses = (rng.zipf(1.3, 3000) % 97).tolist()
  following, place = next_uses(accesses), iter(range(len(accesses)))
  best, _ = play(Belady(lambda key: following[next(place)]), 20, accesses)
  others = {name: play(ORDERS[name](), 20, accesses)[0] for name in ("fifo", "lru")}
  others["s3fifo"] = play(S3Fifo(20), 20, accesses)[0]
  assert best < min(others.values())
  assert others["s3fifo"] < others["fifo"]  # most keys come once: what S3-FIFO is made for


def test_s3fifo_small_main_and_ghosts():
  order = S3Fifo(20)  # small is full with 2 keys, 18 evictions are remembered
  for key in "abcd":
    order.insert(key)
  for key in "aabccd":
    order.touch(key)
  assert order.victim() == "b"  # a was used twice and moves to main; b once
  order.insert("b")  # a ghost: to main, behind a
  assert order.victim() == "a"  # c moves to main as well, and small is no longer full
  assert [order.victim() for _ in range(3)] == ["b", "c", "d"]
  order.insert("a")  # given up by main, so not remembered
  order.insert("e")
  order.insert("d")  # remembered
  assert [order.victim() for _ in range(3)] == ["a", "d", "e"]


def test_s3fifo_main_gives_another_turn_for_each_use():
  order = S3Fifo(10)
  for key in "xy":
    order.insert(key)
    order.touch(key)
    order.touch(key)
  order.insert("z")
  assert order.victim() == "z"  # x and y moved to main
  for key in "xxy":
    order.touch(key)
  order.insert("w")
  order.touch("w")
  order.touch("w")  # x 2, y 1, then w, which moves to main without uses
  assert [order.victim() for _ in range(3)] == ["w", "y", "x"]


def test_s3fifo_knows_a_ghost_by_half_of_its_parts():
  def after(parts):
    parts_of = {"first": (0, 1), "second": (2, 3), "third": (4, 5)}
    parts_of |= {"again": parts, "later": (6,), "last": (7,)}
    order = S3Fifo(20, parts_of.__getitem__)
    for key in ("first", "second", "third"):
      order.insert(key)
    assert order.victim() == "first"
    order.insert("again")
    order.insert("later")
    order.insert("last")
    return [order.victim() for _ in range(4)]

  # Main gives only when small is no longer full.
  assert after((0, 99)) == ["second", "third", "later", "again"]
  assert after((0, 98, 99)) == ["second", "third", "again", "later"]


def test_s3fifo_forgets_ghosts():
  order = S3Fifo(10)  # remembers 9 evictions
  for key in range(20):
    order.insert(key)
  gone = [order.victim() for _ in range(19)]
  assert gone == list(range(19))
  assert len(order._ghosts) == 9
  assert min(order._ghosts) == 10


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_keys_that_may_not_go_keep_their_place(name):
  order = ORDERS[name]()
  for key in range(5):
    order.insert(key)
  assert order.victim(lambda key: key > 1) == 2
  assert [order.victim() for _ in range(4)] == [0, 1, 3, 4]


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_misuse_is_an_error(name):
  order = ORDERS[name]()
  with pytest.raises(LookupError, match="none of 0 keys"):
    order.victim()
  order.insert("a")
  with pytest.raises(KeyError, match="held already"):
    order.insert("a")
  for call in (order.touch, order.remove):
    with pytest.raises(KeyError):
      call("b")
  with pytest.raises(LookupError, match="none of 1 keys"):
    order.victim(lambda key: False)
  order.remove("a")
  assert len(order) == 0 and "a" not in order
  order.insert("a")
  assert order.victim() == "a"


NUM_BLOCKS, NUM_KEYS = 12, 40


@cache
def twin(name: str):
  """The functions of a jitted order, compiled once."""
  eviction = EVICTIONS[name]
  return eviction.start(NUM_BLOCKS, NUM_KEYS), *map(jax.jit, eviction[1:])


def of_blocks(ids) -> np.ndarray:
  """A mask; as everything below it goes to the twin as it is, without an operation of its own."""
  mask = np.zeros(NUM_BLOCKS, bool)
  mask[list(ids)] = True
  return mask


@pytest.mark.parametrize("name", sorted(EVICTIONS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_twins_agree_event_by_event(name, data):
  """Steps of hits, evictions, insertions and releases: the same blocks go, in every step."""
  state, touch, evict, insert = twin(name)
  key_of: dict[int, int] = {}  # block -> its one key
  plain = order_of(name, NUM_BLOCKS, lambda block: (key_of[block],))
  for _ in range(data.draw(st.integers(3, 25))):
    held = sorted(key_of)
    hits = data.draw(st.sets(st.sampled_from(held))) if held else set()
    idle = [block for block in held if block not in hits]
    barred = data.draw(st.sets(st.sampled_from(idle), max_size=2)) if idle else set()
    may_go = [block for block in idle if block not in barred]
    count = data.draw(st.integers(0, len(may_go)))
    keys = np.full((NUM_BLOCKS, 1), NUM_KEYS, np.int32)
    for block, key in key_of.items():
      keys[block] = key

    state = touch(state, of_blocks(hits))
    args = keys.copy(), of_blocks(held), of_blocks(may_go), np.int32(count)  # keys change below
    victims, state = evict(state, *args)
    for block in sorted(hits):
      plain.touch(block)
    gone = {plain.victim(may_go.__contains__) for _ in range(count)}
    assert set(np.flatnonzero(victims)) == gone

    for block in gone:
      del key_of[block]
    ended = data.draw(st.sets(st.sampled_from(sorted(key_of)), max_size=1)) if key_of else set()
    for block in ended:  # their row ended
      plain.remove(block)
      del key_of[block]
    room = [block for block in range(NUM_BLOCKS) if block not in key_of]
    new = sorted(data.draw(st.sets(st.sampled_from(room)))) if room else []
    free_keys = [key for key in range(NUM_KEYS) if key not in key_of.values()]
    for block in new:
      key_of[block] = free_keys.pop(data.draw(st.integers(0, len(free_keys) - 1)))
      keys[block] = key_of[block]
      plain.insert(block)
    state = insert(state, keys, of_blocks(new))
