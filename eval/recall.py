"""Synthetic recall in the pages of a book: what a model must still know of what it has read.

Every text is a piece of the book with facts strewn between its words, then questions, one a line:

    lookup   ... the earth was [QK=7301] without form ...        ?QK=7301
    chain    ... and [QK>MZ] void; and darkness [MZ>RB] was ...  ?QK>MZ>RB
    passkey  ... God saw. The passkey QK: 73014. And ...        The passkey QK: 73014

Keys are two capital letters and values digits, random and each used once, so an answer cannot be
guessed: it has to come from the keys and values of the place where the fact stands. In a chain the
next key is only known once the one before it has been answered, so what is needed changes from step
to step. A question repeats the beginning of its fact to the letter, which is what a small model of
bytes learns to look up.
"""

from __future__ import annotations

import bisect
import itertools
import random
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

HOPS = 3  # links of a chain
_FACT_EVERY = 128  # characters
_KEYS = ["".join(pair) for pair in itertools.product(string.ascii_uppercase, repeat=2)]


class Question(NamedTuple):
  """What is told and what is asked about it, before it is put into a text."""

  facts: tuple[str, ...]
  asked: str
  answer: str


class Recall(NamedTuple):
  """A text of facts, questions and answers.

  Attributes:
    task: one of `TASKS`.
    text: all of it, ASCII, answers included.
    answers: [start, stop) of each answer in the text; the first question comes first.
  """

  task: str
  text: str
  answers: tuple[tuple[int, int], ...]

  @property
  def prompt(self) -> str:
    """The text up to where the first answer follows."""
    return self.text[: self.answers[0][0]]

  @property
  def answer(self) -> str:
    """The first answer."""
    return self.text[slice(*self.answers[0])]


def plain(text: str) -> str:
  """The book as `build` wants it: ASCII, one space between words, no line breaks."""
  return " ".join(text.encode("ascii", "ignore").decode().split())


def build(
  task: str,
  book: str,
  length: int,
  rng: random.Random,
  *,
  facts: int | None = None,
  questions: int = 1,
  depth: float | None = None,
) -> Recall:
  """One text of exactly `length` characters.

  Args:
    task: "lookup", "chain" or "passkey".
    book: from `plain`; a random piece of it is used.
    length: characters of facts, book, questions and answers together.
    rng: source of everything that is random.
    facts: facts in the text, asked about or not; by default one for every 128 characters, and
      enough for all questions. A chain takes `HOPS` of them, so there it is rounded down to whole
      chains, at least one.
    questions: how many of them are asked, each about another one.
    depth: place in the book's piece of the fact that holds the first answer (the last link of a
      chain), from 0 to 1; anywhere by default. All other facts stand anywhere.

  Raises:
    ValueError: no such task, more questions than facts, or no room for them in `length`.
  """
  if task not in TASKS:
    raise ValueError(f"unknown task {task!r}, expected one of {', '.join(TASKS)}")
  told = TASKS[task](rng, max(length // _FACT_EVERY, questions * HOPS) if facts is None else facts)
  if not 1 <= questions <= len(told):
    raise ValueError(f"{questions} questions about {len(told)} facts; ask from 1 to {len(told)}")
  asked = told[:questions]
  tail = "".join(f"\n{one.asked}{one.answer}" for one in asked)
  strewn = [fact for one in told for fact in one.facts]
  room = length - len(tail) - sum(map(len, strewn))
  if not 0 <= room < len(book):
    raise ValueError(
      f"{len(strewn)} facts and {questions} questions leave {room} of {length} characters for a "
      f"book of {len(book)}; ask for another length or fewer facts"
    )
  start = rng.randrange(len(book) - room)
  context = _strew(book[start : start + room], strewn, len(asked[0].facts) - 1, depth, rng)
  return Recall(task, context + tail, tuple(_spans(asked, len(context))))


def _strew(
  piece: str, facts: list[str], chosen: int, depth: float | None, rng: random.Random
) -> str:
  """The facts between the words of a piece, fact number `chosen` nearest to `depth`."""
  gaps = [0, *(index for index, letter in enumerate(piece) if letter == " ")]
  places = rng.choices(gaps, k=len(facts))
  if depth is not None:
    places[chosen] = gaps[min(bisect.bisect_left(gaps, depth * len(piece)), len(gaps) - 1)]
  order = sorted(range(len(facts)), key=lambda index: places[index])
  cuts = [0, *(places[index] for index in order), len(piece)]
  parts = [piece[a:b] for a, b in itertools.pairwise(cuts)]
  return parts[0] + "".join(facts[i] + part for i, part in zip(order, parts[1:], strict=True))


def _spans(asked: list[Question], start: int) -> Iterator[tuple[int, int]]:
  for one in asked:
    start += 1 + len(one.asked)
    yield start, start + len(one.answer)
    start += len(one.answer)


def _lookup(rng: random.Random, facts: int) -> list[Question]:
  keys = rng.sample(_KEYS, facts)
  values = [f"{rng.randrange(10_000):04}" for _ in keys]
  return [
    Question((f" [{key}={value}]",), f"?{key}=", value)
    for key, value in zip(keys, values, strict=True)
  ]


def _chain(rng: random.Random, facts: int) -> list[Question]:
  keys = iter(rng.sample(_KEYS, max(facts // HOPS, 1) * (HOPS + 1)))
  return [
    Question(
      tuple(f" [{a}>{b}]" for a, b in itertools.pairwise(chain)),
      f"?{chain[0]}>",
      ">".join(chain[1:]),
    )
    for chain in zip(*[keys] * (HOPS + 1), strict=True)
  ]


def _passkey(rng: random.Random, facts: int) -> list[Question]:
  keys = rng.sample(_KEYS, facts)
  values = [f"{rng.randrange(100_000):05}" for _ in keys]
  return [
    Question((f" The passkey {key}: {value}.",), f"The passkey {key}: ", value)
    for key, value in zip(keys, values, strict=True)
  ]


TASKS: dict[str, Callable[[random.Random, int], list[Question]]] = {
  "lookup": _lookup,
  "chain": _chain,
  "passkey": _passkey,
}
