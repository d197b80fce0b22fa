"""OPKV in the plainest terms: Python sets and lists, one block and one token after the other.

Written from the text of the algorithm. `Pool.step` is what `kvjax.opkv.sub_block_manager.plan` does
at once.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from kvjax.eviction import Fifo, Lru, S3Fifo
from kvjax.opkv.filling import BY_PAGE, REFILL
from kvjax.opkv.sub_block_manager import Settings

NONE = -1


def order_of(name: str, num_blocks: int, parts_of):
  """A plain eviction order for a pool of n blocks; parts_of(block) is what it holds."""
  return {"fifo": Fifo, "lru": Lru, "s3fifo": lambda: S3Fifo(num_blocks, parts_of)}[name]()


@dataclasses.dataclass
class Step:
  """What a step does: block ids, and (list, token, block, slot) for every token that moves.

  Attributes:
    hits: for each list its hits by id.
    new: for each list its new blocks by id.
    moves: tokens to copy.
    visible: for each list token -> (block, slot).
    evicted: blocks that were given up.
    too_small: nothing was done.
  """

  hits: list[list[int]]
  new: list[list[int]]
  moves: list[tuple[int, int, int, int]]
  visible: list[dict[int, tuple[int, int]]]
  evicted: list[int]
  too_small: bool = False


class Pool:
  """n OP blocks of C slots, shared by X lists."""

  def __init__(self, num_blocks: int, page_size: int, num_lists: int, settings: Settings):
    self.n, self.c, self.lists, self.settings = num_blocks, page_size, num_lists, settings
    self.tokens = [[NONE] * page_size for _ in range(num_blocks)]
    self.owner = [NONE] * num_blocks
    self.order = order_of(settings.eviction, num_blocks, self._parts)

  def release(self, lists: Sequence[int]):
    """Frees the blocks of lists that ended."""
    for block in range(self.n):
      if self.owner[block] in lists:
        self.order.remove(block)
        self.owner[block] = NONE
        self.tokens[block] = [NONE] * self.c

  def step(self, selected: Sequence[set[int]], newest: Sequence[int] | None = None) -> Step:
    """One step of decode."""
    if not self.settings.reuse:
      self.release(range(self.lists))
    if newest is not None:
      selected = [{t for t in s if t < end} for s, end in zip(selected, newest, strict=True)]
    nothing = [self._new_blocks(s, 0, s) for s in selected]
    if sum(nothing) > self.n or max(nothing) > self.settings.width:
      empty: list = [[] for _ in selected]
      return Step(empty, empty, [], [{} for _ in selected], [], too_small=True)
    found = self._retrieve(selected)
    taken, evicted = self._take(selected, found)
    hits, new, moves, visible = [], [], [], []
    for x, (in_order, missing) in enumerate(found):
      mine = [taken.pop(0) for _ in range(self._new_blocks(selected[x], len(in_order), missing))]
      hits.append(sorted(in_order))
      new.append(mine)
      goes = self._places(selected[x], sorted(in_order), mine, sorted(missing), in_order)
      moves += [(x, t, *place) for t, place in goes.items()]
      filled = set(goes.values())
      old = self._visible(selected[x], in_order).items()
      visible.append({t: place for t, place in old if place not in filled} | goes)
    assert not taken
    for x, mine in enumerate(new):
      for block in mine:
        self.owner[block], self.tokens[block] = x, [NONE] * self.c
    for _, t, block, slot in moves:
      self.tokens[block][slot] = t
    for block in sorted(block for mine in new for block in mine):
      self.order.insert(block)
    if self.settings.exclusive:
      for x, t, block, _ in moves:
        self._forget(x, t, block)
    return Step(hits, new, moves, visible, evicted)

  def _forget(self, x: int, token: int, keeper: int):
    """Of the blocks of a list only the keeper has the token; one without any is free."""
    for block in range(self.n):
      if self.owner[block] == x and block != keeper and token in self.tokens[block]:
        self.tokens[block] = [NONE if t == token else t for t in self.tokens[block]]
        if not self._held(block):
          self.order.remove(block)
          self.owner[block] = NONE

  def _held(self, block: int) -> set[int]:
    """T_b."""
    return set(self.tokens[block]) - {NONE}

  def _parts(self, block: int) -> list[tuple[int, int]]:
    return [(self.owner[block], t) for t in self._held(block)]

  def _level(self, block: int, among: set[int]) -> int:
    """|S and T_b|; for BY_PAGE in C-ths of the tokens that the block has."""
    have = self._held(block)
    count = len(have & among)
    return count * self.c // max(len(have), 1) if self.settings.filling == BY_PAGE else count

  def _new_blocks(self, wanted: set[int], hits: int, missing: set[int]) -> int:
    if self.settings.filling == BY_PAGE:
      return len({t // self.c for t in missing})
    if self.settings.filling == REFILL:
      return max(math.ceil(len(wanted) / self.c) - hits, 0)
    return math.ceil(len(missing) / self.c)

  def _algorithm_1(self, x: int, wanted: set[int], theta: int, recheck: bool):
    """R and U."""
    mine = [b for b in range(self.n) if self.owner[b] == x]
    candidates = [b for b in mine if self._level(b, wanted) >= theta]
    uncovered, hits = set(wanted), []
    for b in sorted(candidates, key=lambda b: (-self._level(b, wanted), b)):
      if not recheck or self._level(b, uncovered) >= theta:
        hits.append(b)
        uncovered -= self._held(b)
    return hits, uncovered

  def _retrieve(self, selected):
    """R and U of each list, with theta raised where they would not fit."""
    theta = 1 if self.settings.filling == REFILL else math.ceil(self.settings.rho * self.c)

    def need(x, theta):
      hits, missing = self._algorithm_1(x, selected[x], theta, recheck=False)
      return len(hits) + self._new_blocks(selected[x], len(hits), missing)

    def first(fits):
      return next(raised for raised in range(theta, self.c + 2) if fits(raised))

    lists, width = range(self.lists), self.settings.width
    own = [first(lambda raised, x=x: need(x, raised) <= width) for x in lists]
    common = first(lambda raised: sum(need(x, max(own[x], raised)) for x in lists) <= self.n)
    rule = self.settings.recheck
    return [self._algorithm_1(x, selected[x], max(own[x], common), rule) for x in lists]

  def _take(self, selected, found) -> tuple[list[int], list[int]]:
    """Blocks for the new ones, by id, and which of them were given up for it."""
    hit = {b for hits, _ in found for b in hits}
    count = sum(
      self._new_blocks(s, len(hits), missing)
      for s, (hits, missing) in zip(selected, found, strict=True)
    )
    heads = self.settings.heads
    rows = range(self.lists // heads)
    holds = [sum(self.owner[b] // heads == row for b in range(self.n)) for row in rows]
    live = [
      row for row in rows if holds[row] or any(selected[row * heads + k] for k in range(heads))
    ]
    spared = {row for row in rows if holds[row] < 0.5 * self.n / max(len(live), 1)}
    for block in sorted(hit):
      self.order.touch(block)
    free = [b for b in range(self.n) if self.owner[b] == NONE]
    taken, evicted = free[:count], []
    idle = [b for b in range(self.n) if self.owner[b] != NONE and b not in hit]
    others = [b for b in idle if self.owner[b] // heads not in spared]
    if len(others) < count - len(taken):  # they all go
      for block in others:
        self.order.remove(block)
      evicted, others = others, [b for b in idle if b not in others]
    while len(taken) + len(evicted) < count:
      evicted.append(self.order.victim(others.__contains__))
      others.remove(evicted[-1])
    taken += evicted
    return sorted(taken), evicted

  def _places(self, wanted, hits, new, missing, in_order) -> dict[int, tuple[int, int]]:
    """Where each missing token goes."""
    if self.settings.filling == BY_PAGE:
      block_of = dict(zip(sorted({t // self.c for t in missing}), new, strict=True))
      return {t: (block_of[t // self.c], t % self.c) for t in missing}
    slots = [(b, slot) for b in new for slot in range(self.c)]
    if self.settings.filling == REFILL:
      used = set(self._visible(wanted, in_order, strict=True).values())
      slots = [(b, slot) for b in hits for slot in range(self.c) if (b, slot) not in used] + slots
    return dict(zip(missing, slots, strict=False))

  def _visible(self, wanted, in_order, strict=None) -> dict[int, tuple[int, int]]:
    """token -> the first slot of a hit, in the order of Algorithm 1, that has it."""
    strict = self.settings.strict if strict is None else strict
    seen: dict[int, tuple[int, int]] = {}
    for block in in_order:
      for slot, token in enumerate(self.tokens[block]):
        if token != NONE and (token in wanted or not strict):
          seen.setdefault(token, (block, slot))
    return seen


OWNED, TRANSFERRED, CPU, BOTH, FREED = "owned", "transferred", "cpu", "both", "freed"


class Ledger:
  """The states that a token's KV goes through, by the text of the Sub Block Manager.

      OWNED -> TRANSFERRED -> {CPU, BOTH} -> FREED

  TRANSFERRED is the moment between a request's handing over its blocks and their lying on the host;
  on the GPU alone no token is ever, since the host has them all. Errors: a second `free`, a free
  while copies are in flight, copies of what is not on the host, and what is left at the end.
  """

  def __init__(self):
    self.state: dict[tuple[int, int], str] = {}  # (list, token) -> state
    self.in_flight: set[int] = set()  # lists with copies that were planned and not yet made
    self.freed: set[int] = set()

  def transfer(self, x: int, tokens) -> None:
    """The tokens of list x are written to the host."""
    self.freed.discard(x)
    for t in tokens:
      assert self.state.get((x, t), OWNED) in (OWNED, FREED), f"{(x, t)} was transferred before"
      self.state[x, t] = TRANSFERRED
      self.state[x, t] = CPU

  def fetch(self, moves) -> None:
    """Copies (list, token) to the GPU begin."""
    for x, t in moves:
      assert self.state.get((x, t)) in (CPU, BOTH), f"{(x, t)} is not on the host"
      self.in_flight.add(x)

  def recall(self, resident) -> None:
    """Copies have ended; resident are all (list, token) that lie on the GPU now."""
    self.in_flight.clear()
    for key, state in self.state.items():
      if state in (CPU, BOTH):
        self.state[key] = BOTH if key in resident else CPU
    lost = [key for key in resident if self.state.get(key) != BOTH]
    assert not lost, f"{lost} lie on the GPU and belong to nobody"

  def free(self, x: int) -> None:
    """Request x ends."""
    assert x not in self.freed, f"list {x} was freed before"
    assert x not in self.in_flight, f"list {x} has copies in flight"
    self.freed.add(x)
    for key in self.state:
      if key[0] == x:
        self.state[key] = FREED

  def close(self, resident) -> None:
    """All requests have ended."""
    left = [key for key, state in self.state.items() if state != FREED]
    assert not left and not resident, f"{left or resident} leaked"


class Partition:
  """OP blocks that the device gave up, m at most: a max-heap of rows by the blocks that they hold.

  A block is (list, tokens, step in which it came).
  """

  def __init__(self, size: int, heads: int):
    self.size, self.heads = size, heads
    self.rows: dict[int, list] = {}  # row -> its blocks, the one hit longest ago first
    self.now = 0

  def held(self) -> list:
    """All blocks."""
    return [block for blocks in self.rows.values() for block in blocks]

  def release(self, lists) -> None:
    """Rows end, of which all lists are named."""
    for x in lists:
      self.rows.pop(x // self.heads, None)

  def step(self, gone: Sequence, back: Sequence) -> None:
    """Blocks (list, tokens) that come from the device, by id, and of those that were there some
    that leave; their places are free for later steps only."""
    for block in back:
      self.rows[block[0] // self.heads].remove(block)
    for block in gone:
      self.rows.setdefault(block[0] // self.heads, []).append((*block, self.now))
    heap = [(-len(blocks), row) for row, blocks in self.rows.items()]
    heapq.heapify(heap)
    for _ in range(len(self.held()) - (self.size - len(back))):
      count, row = heapq.heappop(heap)
      self.rows[row].pop(0)
      heapq.heappush(heap, (count + 1, row))
    self.now += 1
