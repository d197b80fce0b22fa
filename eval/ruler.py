"""Problems in the style of RULER, made of a plain text and seeded inventions.

    niah_single        one number is hidden, and asked for
    niah_multikey      four numbers for four keys; one key is asked for
    niah_multivalue    four numbers for one key; all are asked for
    niah_multiquery    four numbers for four keys; all are asked for
    variable_tracking  X1 = 12345, X2 = X1, ...: all names of that value
    common_words       a numbered list of words: the ten that come most often
    frequent_words     coded words: the three that come most often
    pointer_chain      a number for a number for a number: each that the one before it leads to

and without a text, in `ruler_lines`, niah_single_1, niah_multikey_2, niah_multikey_3, kv_retrieval.

The wording and the sizes are those of RULER's tasks niah_single_2, niah_multikey_1,
niah_multivalue, niah_multiquery, vt, cwe and fwe, and of those of the same name (see `needle` for
the source), over our own text, names and words. RULER's niah_single_3 and its two tasks over
downloaded questions are not here. Departures: new tokens are limited to what an answer takes with
some room, not to 128; an assignment ends with a full stop, as it stands in running text; a list
that is too short for 30 repetitions of the common words has fewer; vt and cwe are asked without a
solved example before them, from which small models copy names instead of reading the text;
niah_multikey says that some numbers are hidden, where RULER says one; fwe has as many words as its
law gives, which RULER's vocabulary of a fiftieth of the tokens never cuts, and a line break before
its text.

pointer_chain is ours, for methods that drop: it asks for a long answer, and each number must be
looked up where only the answer so far says. Facts of successive hops are never neighbours, so what
is needed moves through the whole text from hop to hop, long after the prompt was read. As in RULER
the share of numbers found counts, in any order.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Sequence

from eval import needle
from eval.problem import Problem, random_names
from eval.ruler_lines import kv_retrieval, niah_multikey_2, niah_multikey_3, niah_single_1
from eval.ruler_words import common_words, frequent_words

NEEDLES = 4
HOPS, GIVEN = 8, 2  # of a pointer chain: asked for, and answered in the prompt to show the form
_NUMBER_DIGITS, _SHORT_DIGITS = 7, 5
_DEPTHS = 40
_VARIABLES = 5  # names of one value: four hops

_ALL_INSTRUCTION = (
  "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
  "I will quiz you about the numbers afterwards."
)
_ALL_QUESTION = "What are all the special magic numbers for {key} mentioned in the provided text?"
_ALL_PREFIX = "The special magic numbers for {key} mentioned in the provided text are"
_TRACKING_INSTRUCTION = (
  "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
)
_TRACKING_QUESTION = (
  "Question: Find all variables that are assigned the value {value} in the text above."
)
_TRACKING_PREFIX = (
  "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
  "are assigned the value {value}, they are:"
)
CHAIN_FACT = "The special magic number for {key} is: {next}."
_CHAIN_QUESTION = (
  "Start at {key}. What is the special magic number for it, what is the special magic number for "
  "that number, and so on, as mentioned in the provided text?"
)
_CHAIN_PREFIX = "The special magic number for {key} is:"


def niah_single(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """One key, one number."""
  return _one_of(rng, sentences, depth, keys=1)


def niah_multikey(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """Several keys with a number each; one of them is asked for."""
  return _one_of(rng, sentences, depth, keys=NEEDLES)


def niah_multivalue(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """Several numbers for one key."""
  (key,) = _keys(rng, 1)
  return _all_of(rng, sentences, depth, [key] * NEEDLES, key)


def niah_multiquery(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """Several keys with a number each; all are asked for."""
  keys = _keys(rng, NEEDLES)
  return _all_of(rng, sentences, depth, keys, f"{', '.join(keys[:-1])}, and {keys[-1]}")


def variable_tracking(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """One chain of assignments; the names of all variables of one value."""
  del depth  # its five facts lie all over the text
  value = needle.random_number(rng, _SHORT_DIGITS)
  names = random_names(rng, _VARIABLES, string.ascii_uppercase, 5)
  sources = [value, *(f"VAR {name}" for name in names[:-1])]
  facts = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)]
  depths = sorted(rng.sample(range(_DEPTHS), _VARIABLES))  # a name is assigned before it is used
  return Problem(
    _TRACKING_INSTRUCTION,
    _haystack(sentences, facts, [place / _DEPTHS for place in depths]),
    len(sentences),
    _TRACKING_QUESTION.format(value=value),
    _TRACKING_PREFIX.format(value=value, count=_VARIABLES),
    tuple(names),
    new_tokens=48,
  )


def pointer_chain(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """Numbers that lead from one to the next."""
  del depth  # its facts lie all over the text
  keys = _numbers(rng, GIVEN + HOPS + 1)
  facts = [CHAIN_FACT.format(key=a, next=b) for a, b in itertools.pairwise(keys)]
  begun = [*facts[:GIVEN], _CHAIN_PREFIX.format(key=keys[GIVEN])]
  return Problem(
    _ALL_INSTRUCTION,
    _haystack(sentences, facts, _apart(rng, len(facts))),
    len(sentences),
    _CHAIN_QUESTION.format(key=keys[0]),
    "\n".join(begun),
    tuple(keys[GIVEN + 1 :]),
    new_tokens=24 * HOPS,
  )


TASKS: dict[str, Callable[[random.Random, Sequence[str], float], Problem]] = {
  make.__name__: make
  for make in (
    *(niah_single, niah_multikey, niah_multivalue, niah_multiquery),
    *(variable_tracking, common_words, frequent_words, pointer_chain),
    *(niah_single_1, niah_multikey_2, niah_multikey_3, kv_retrieval),
  )
}


def _one_of(rng: random.Random, sentences: Sequence[str], depth: float, keys: int) -> Problem:
  names = _keys(rng, keys)
  values = [needle.random_number(rng, _NUMBER_DIGITS) for _ in names]
  return Problem(
    needle.INSTRUCTION if keys == 1 else _ALL_INSTRUCTION,
    _haystack(sentences, _facts(names, values), _depths(rng, depth, keys)),
    len(sentences),
    needle.QUESTION.format(key=names[0]),
    needle.ANSWER_PREFIX.format(key=names[0]),
    (values[0],),
    new_tokens=32,
  )


def _all_of(
  rng: random.Random, sentences: Sequence[str], depth: float, keys: Sequence[str], asked: str
) -> Problem:
  values = [needle.random_number(rng, _NUMBER_DIGITS) for _ in keys]
  return Problem(
    _ALL_INSTRUCTION,
    _haystack(sentences, _facts(keys, values), _depths(rng, depth, len(keys))),
    len(sentences),
    _ALL_QUESTION.format(key=asked),
    _ALL_PREFIX.format(key=asked),
    tuple(values),
    new_tokens=64,
  )


def _keys(rng: random.Random, count: int) -> list[str]:
  """Keys, each an adjective and a noun; no word comes twice, as it hardly does in RULER's many."""
  words = (rng.sample(some.split(), count) for some in (needle.ADJECTIVES, needle.NOUNS))
  return ["-".join(pair) for pair in zip(*words, strict=True)]


def _numbers(rng: random.Random, count: int) -> list[str]:
  """Different short numbers."""
  return [
    str(one) for one in rng.sample(range(10 ** (_SHORT_DIGITS - 1), 10**_SHORT_DIGITS), count)
  ]


def _facts(keys: Sequence[str], values: Sequence[str]) -> list[str]:
  return [needle.NEEDLE.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]


def _haystack(
  sentences: Sequence[str], facts: Sequence[str], depths: Sequence[float]
) -> Callable[[int], str]:
  return lambda size: needle.strew(sentences[:size], facts, depths)


def _depths(rng: random.Random, first: float, count: int) -> list[float]:
  """The first as given, the others anywhere."""
  return [first, *(place / _DEPTHS for place in rng.sample(range(_DEPTHS + 1), count - 1))]


def _apart(rng: random.Random, count: int) -> list[float]:
  """Evenly spaced depths in an order in which neighbours of the text never follow each other."""
  order = list(range(count))
  while any(abs(a - b) == 1 for a, b in itertools.pairwise(order)):
    rng.shuffle(order)
  return [(place + 0.5) / count for place in order]
