"""Conversations as they arrive: who asks when, how long the question and the answer are.

A workload has no text. It is read from a trace (`traces`), or made (`generator`), and becomes the
requests of a serving loop; `trace_statistics` says what it is like.

    workload = generate(INTERACTIVE, users=1000, users_per_minute=20, seed=0)
    for finished in serve(requests(workload, max_tokens=2048), backend, VirtualClock()):
      ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kvjax.engine.requests import Request


class Turn(NamedTuple):
  """One question of a conversation, and how long its answer is.

  Attributes:
    user: whose conversation it is; one user has one conversation.
    arrival_s: when it is asked, in seconds from the beginning of the workload.
    query_tokens: new tokens to read, at least 1.
    answer_tokens: new tokens that are made.
    history_tokens: of the conversation before it, whose keys and values could have been kept.
  """

  user: int
  arrival_s: float
  query_tokens: int
  answer_tokens: int
  history_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
  """Turns in the order in which they arrive, as columns of the same length R.

  Attributes:
    name: what it is.
    user: i64[R].
    arrival_s: f64[R], never less than the one before.
    query_tokens: i64[R], at least 1.
    answer_tokens: i64[R].
    history_tokens: i64[R].
    backwards: turns whose time in the trace lies before that of one above them. They keep their
      place, and arrive when the turn above them did.
  """

  name: str
  user: np.ndarray
  arrival_s: np.ndarray
  query_tokens: np.ndarray
  answer_tokens: np.ndarray
  history_tokens: np.ndarray
  backwards: int = dataclasses.field(default=0, kw_only=True)

  def __len__(self) -> int:
    return len(self.user)

  def __iter__(self) -> Iterator[Turn]:
    return map(Turn, *(column.tolist() for column in self.columns))

  @property
  def columns(self) -> tuple[np.ndarray, ...]:
    """In the order of a `Turn`."""
    return (
      self.user,
      self.arrival_s,
      self.query_tokens,
      self.answer_tokens,
      self.history_tokens,
    )

  @functools.cached_property
  def previous(self) -> np.ndarray:
    """i64[R], the turn before this one in its conversation; -1 for the first."""
    order = np.argsort(self.user, kind="stable")
    same = self.user[order][1:] == self.user[order][:-1]
    previous = np.full(len(self), -1)
    previous[order[1:][same]] = order[:-1][same]
    return previous

  @functools.cached_property
  def total_tokens(self) -> np.ndarray:
    """i64[R], of the conversation when the turn has been answered."""
    return self.history_tokens + self.query_tokens + self.answer_tokens


def from_turns(name: str, turns: Iterable[Turn]) -> Workload:
  """A workload of turns in the order of their trace.

  Raises:
    ValueError: no turns at all.
  """
  columns = tuple(zip(*turns, strict=True))
  if not columns:
    raise ValueError(f"{name} has no requests; expected at least one")
  user, times, query, answer, history = columns
  seen = np.array(times, np.float64)
  counts = (np.array(column, np.int64) for column in (query, answer, history))
  arrival_s = np.maximum.accumulate(seen)
  backwards = int(np.count_nonzero(seen < arrival_s))
  return Workload(name, np.array(user, np.int64), arrival_s, *counts, backwards=backwards)


def users_per_minute(workload: Workload) -> float | None:
  """How many conversations begin in a minute; None if all begin at once."""
  begins = workload.arrival_s[workload.previous < 0]
  span = begins[-1] - begins[0]
  return float(60 * (len(begins) - 1) / span) if span > 0 else None


def sample_users(workload: Workload, wanted_per_minute: float, seed: int) -> Workload:
  """Some of the users, with all of their turns: a lower rate of the same conversations.

  So the paper varies its rate; time is not stretched, since think times would be.

  Args:
    workload: to choose from.
    wanted_per_minute: conversations that are to begin in a minute.
    seed: of the choice.

  Raises:
    ValueError: the workload has not so many, or too few would be left.
  """
  rate = users_per_minute(workload)
  if rate is None or wanted_per_minute > rate:
    has = "all begin at once" if rate is None else f"{rate:.4g} begin in a minute"
    raise ValueError(
      f"{wanted_per_minute:g} users a minute are wanted, and of {workload.name} {has}; "
      "expected a rate that is not higher"
    )
  users = np.unique(workload.user)
  count = round(len(users) * wanted_per_minute / rate)
  if count < 2:
    raise ValueError(
      f"{wanted_per_minute:g} users a minute leave {count} of {len(users)} conversations of "
      f"{workload.name}; expected a rate that leaves two or more"
    )
  chosen = np.random.default_rng(seed).choice(users, count, replace=False)
  kept = np.isin(workload.user, chosen)
  return Workload(workload.name, *(column[kept] for column in workload.columns))


def requests(workload: Workload, max_tokens: int | None = None) -> Iterator[Request]:
  """The requests of a workload, each made when it is asked for.

  A prompt is the question alone, of tokens that mean nothing: what the conversation has before it
  is the affair of whoever keeps histories.

  Args:
    workload: conversations.
    max_tokens: longest context of the model. A question longer than that less its answer, and an
      answer longer than half of it, are cut; None cuts nothing.
  """
  for number, turn in enumerate(workload):
    query, answer = turn.query_tokens, max(1, turn.answer_tokens)
    if max_tokens is not None:
      answer = min(answer, max_tokens // 2)
      query = min(query, max_tokens - answer)
    yield Request(number, (0,) * query, answer, user=turn.user, arrival_s=turn.arrival_s)
