"""Haystacks of lines that all look alike, invented line by line: the text does not enter.

    niah_single_1    a number among the same five sentences over and over
    niah_multikey_2  a number among numbers for other keys
    niah_multikey_3  a UUID for a UUID, among others
    kv_retrieval     the same in JSON

Where every line could be the one, what is asked for differs from the rest by its key alone, which
is harder for a method that looks at pages from afar than one odd sentence in a book. It takes a
larger model too: SmolLM2-135M found 2 of 2 in niah_single_1 at 1,500 tokens with dense attention,
and 0 of 2 in each of the others.

The first three are RULER's tasks of these names; `ruler` names source and departures. Here there is
one more: keys of niah_multikey_2 are two pairs of our own words, since of one pair there are 144
only. kv_retrieval is the task of Liu et al. 2023, "Lost in the Middle: How Language Models Use Long
Contexts" (github.com/nelson-liu/lost-in-the-middle, MIT), with its prompt, one pair a line, and its
metric, the answer holds the value in either case. Departures: the number of pairs follows from the
tokens asked for; "Corresponding value:" begins the answer instead of ending the question; an answer
has 48 tokens, not 100.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from eval import needle
from eval.problem import ENDLESS, Problem, random_uuid

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NUMBER_DIGITS = 7
_KEYS = [f"{a}-{n}" for a in needle.ADJECTIVES.split() for n in needle.NOUNS.split()]
_JSON_INSTRUCTION = (
  "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:"
)
_JSON_QUESTION = 'Key: "{key}"'
_JSON_PREFIX = "Corresponding value:"


def niah_single_1(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """One number, among the same sentences."""
  del sentences
  key, value = rng.choice(_KEYS), needle.random_number(rng, _NUMBER_DIGITS)
  fact = needle.NEEDLE.format(key=key, value=value)
  return _hidden(fact, lambda size: [_NOISE] * size, depth, ENDLESS, key, value)


def niah_multikey_2(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """One number, among those of other keys."""
  del sentences
  keys = ["-".join(two) for two in itertools.product(_KEYS, repeat=2)]
  key, *others = rng.sample(keys, len(keys))
  value, seed = needle.random_number(rng, _NUMBER_DIGITS), rng.random()

  def lines(size: int) -> list[str]:
    values = random.Random(seed)
    return [
      needle.NEEDLE.format(key=one, value=needle.random_number(values, _NUMBER_DIGITS))
      for one in others[:size]
    ]

  fact = needle.NEEDLE.format(key=key, value=value)
  return _hidden(fact, lines, depth, len(others), key, value)


def niah_multikey_3(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """One UUID for a UUID, among others."""
  del sentences
  key, value, seed = random_uuid(rng), random_uuid(rng), rng.random()
  form = _of_uuids(needle.NEEDLE)

  def lines(size: int) -> list[str]:
    return [form.format(key=one, value=other) for one, other in _uuid_pairs(seed, size)]

  fact = form.format(key=key, value=value)
  problem = _hidden(fact, lines, depth, ENDLESS, key, value)
  return problem._replace(
    instruction=_of_uuids(problem.instruction),
    question=_of_uuids(problem.question),
    answer_prefix=_of_uuids(problem.answer_prefix),
    new_tokens=48,
  )


def kv_retrieval(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """A JSON object of UUIDs for UUIDs, one of which is asked for."""
  del sentences
  key, value, seed = random_uuid(rng), random_uuid(rng), rng.random()

  def haystack(size: int) -> str:
    pairs = _inserted(_uuid_pairs(seed, size), (key, value), depth)
    return "{" + ",\n ".join(f'"{one}": "{other}"' for one, other in pairs) + "}\n"

  return Problem(
    _JSON_INSTRUCTION,
    haystack,
    ENDLESS,
    _JSON_QUESTION.format(key=key),
    _JSON_PREFIX,
    (value,),
    new_tokens=48,
  )


def _hidden(
  fact: str,
  lines: Callable[[int], list[str]],
  depth: float,
  largest: int,
  key: str,
  value: str,
) -> Problem:
  """A fact among so many lines."""
  return Problem(
    needle.INSTRUCTION,
    lambda size: "\n".join(_inserted(lines(size), fact, depth)),
    largest,
    needle.QUESTION.format(key=key),
    needle.ANSWER_PREFIX.format(key=key),
    (value,),
    new_tokens=32,
  )


def _inserted[T](items: Sequence[T], one: T, depth: float) -> list[T]:
  """With one item behind its share of the others, from 0 (all behind it) to 1."""
  place = round(len(items) * depth)
  return [*items[:place], one, *items[place:]]


def _uuid_pairs(seed: float, count: int) -> list[tuple[str, str]]:
  """The first so many of an endless list."""
  rng = random.Random(seed)
  return [(random_uuid(rng), random_uuid(rng)) for _ in range(count)]


def _of_uuids(wording: str) -> str:
  return wording.replace("number", "uuid")
