"""The eviction of "KVCache Cache in the Wild" (Wang et al., USENIX ATC 2025), for whole histories.

A history of category w that was last used t seconds ago is worth the probability to be used within
the time that a history lives:

    P_w(t) = share_w (exp(-t / mean_w) - exp(-(t + life) / mean_w))

an exponential distribution of reuse times for each category. The smallest goes first, of equal ones
the largest history. Within a category that is the least recently used, so only the heads of the
categories are compared: O(categories).

Departures: a category is the number of the turn, 8 and more being one, since histories have no
request type; the paper orders equal blocks by their offset, and a whole history has its size;
`share_w`, how many turns were followed by another one at all, is ours, and so is that `life` is a
running mean (a tenth of the newest) of the time from last use to eviction, without end at first.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict

CATEGORIES = 8
_NEWEST = 0.1


@dataclasses.dataclass(slots=True)
class _Category:
  """The histories of one category that may go, least recently used first, and its statistics."""

  queue: OrderedDict[int, None] = dataclasses.field(default_factory=OrderedDict)
  turns: int = 1  # one that was followed by another after a second: what is believed at first
  reuses: int = 1
  reuse_s: float = 1.0

  def worth(self, idle_s: float, life_s: float) -> float:
    mean_s = max(self.reuse_s / self.reuses, 1e-9)
    within = math.exp(-idle_s / mean_s) - math.exp(-(idle_s + life_s) / mean_s)
    return self.reuses / self.turns * within


@dataclasses.dataclass(slots=True)
class _User:
  """One conversation.

  Attributes:
    turns: that have ended.
    size_bytes: of the history.
    used_s: when it was last used; entering host memory and the end of a pin are uses as well.
    pinned: it may not go.
    held: in host memory.
  """

  turns: int = 0
  size_bytes: int = 0
  used_s: float = 0.0
  pinned: bool = False
  held: bool = False


class InTheWild:
  """Smallest probability of reuse first; an `Eviction`."""

  def __init__(self):
    self._categories = [_Category() for _ in range(CATEGORIES)]
    self._users: dict[int, _User] = {}
    self._now, self._life_s = 0.0, math.inf

  def arrived(self, user: int, now: float) -> None:
    self._now = max(self._now, now)
    state = self._user(user)
    if state.turns:
      category = self._category(state)
      category.reuses += 1
      category.reuse_s += self._now - state.used_s
    state.used_s = self._now
    self._place(user)

  def answered(self, user: int, now: float, answer_tokens: int, size_bytes: int) -> None:
    """The history is now of the next category, and has just been used."""
    self._now = max(self._now, now)
    state = self._user(user)
    self._category(state).queue.pop(user, None)
    state.turns += 1
    state.size_bytes, state.used_s = size_bytes, self._now
    self._category(state).turns += 1
    self._place(user)

  def insert(self, user: int) -> None:
    self._user(user).held = True
    self._place(user)

  def remove(self, user: int) -> None:
    self._users[user].held = False
    self._place(user)

  def pin(self, user: int) -> None:
    self._user(user).pinned = True
    self._place(user)

  def unpin(self, user: int) -> None:
    self._user(user).pinned = False
    self._place(user)

  def victim(self) -> int | None:
    """Of the least recently used ones of all categories, the one of least worth."""
    heads = [next(iter(category.queue)) for category in self._categories if category.queue]
    if not heads:
      return None
    victim = min(heads, key=self._key)
    idle_s = self._now - self._users[victim].used_s
    first = math.isinf(self._life_s)
    self._life_s = idle_s if first else (1 - _NEWEST) * self._life_s + _NEWEST * idle_s
    self.remove(victim)
    return victim

  def forget(self, user: int) -> None:
    if user in self._users:
      self._category(self._users[user]).queue.pop(user, None)
      del self._users[user]

  def _key(self, user: int) -> tuple[float, int, int]:
    state = self._users[user]
    worth = self._category(state).worth(self._now - state.used_s, self._life_s)
    return worth, -state.size_bytes, user

  def _user(self, user: int) -> _User:
    return self._users.setdefault(user, _User())

  def _category(self, state: _User) -> _Category:
    return self._categories[max(min(state.turns, CATEGORIES) - 1, 0)]

  def _place(self, user: int) -> None:
    """At the end of its queue if it may go, as used now; else out of it."""
    state = self._users[user]
    queue = self._category(state).queue
    queue.pop(user, None)
    if state.held and not state.pinned:
      queue[user] = None
      state.used_s = self._now
