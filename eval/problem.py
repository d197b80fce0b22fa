"""What a question about a long text is, and the seeded inventions of which its facts are made."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import NamedTuple

ENDLESS = 1 << 30  # `Problem.largest` of a haystack that is invented and has no end


class Problem(NamedTuple):
  """A text with a question.

  Attributes:
    instruction: what stands before the haystack.
    haystack: `haystack(size)`, the text with all facts; longer for a larger size.
    largest: the size that takes all of the text; `ENDLESS` where there is always more.
    question: what stands behind it.
    answer_prefix: the beginning of the answer.
    references: what the answer must hold, in the order in which it is asked for.
    new_tokens: most tokens of an answer.
  """

  instruction: str
  haystack: Callable[[int], str]
  largest: int
  question: str
  answer_prefix: str
  references: tuple[str, ...]
  new_tokens: int

  def ask(self, size: int) -> str:
    """Instruction, haystack and question."""
    return f"{self.instruction}\n{self.haystack(size)}\n{self.question}"


def random_uuid(rng: random.Random) -> str:
  """A UUID of version 4. Its 122 random bits never come twice."""
  return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def random_names(rng: random.Random, count: int, letters: str, length: int) -> list[str]:
  """Different names of so many letters."""
  names: dict[str, None] = {}
  while len(names) < count:
    names["".join(rng.choices(letters, k=length))] = None
  return list(names)
