"""RULER's two tasks of counting words, for which all of the text is needed at once.

`ruler` names source and departures. The list of common_words is numbered and made of words of the
text. In frequent_words all words are coded, six letters that mean nothing, and the k-th most
frequent of n comes n k^-2 / zeta(2) times (rounded down): a zeta distribution. The most frequent
one is three dots, to be ignored, and the next three are asked for.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence

from eval.problem import ENDLESS, Problem, random_names

_COMMON, _COMMON_TIMES, _RARE_TIMES = 10, 30, 3
_FREQUENT, _LETTERS = 3, 6
_FEWEST = 60  # coded words with which the third of those asked for still comes oftener than others
_ZETA_2 = math.pi**2 / 6

_COMMON_INSTRUCTION = (
  "Below is a numbered list of words. In these words, some appear more often than others. "
  "Memorize the ones that appear most often."
)
_COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
_COMMON_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
_FREQUENT_INSTRUCTION = (
  "Read the following coded text and track the frequency of each coded word. Find the three most "
  "frequently appeared coded words."
)
_FREQUENT_QUESTION = (
  "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
  "most frequently appeared words in the above coded text?"
)
_FREQUENT_PREFIX = (
  "Answer: According to the coded text above, the three most frequently appeared words are:"
)


def common_words(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """A list of words of the text, shuffled."""
  del depth  # the whole list is needed
  counts = Counter(re.findall(r"\b[a-z]{4,12}\b", " ".join(sentences)))
  words = sorted(counts)  # those of a set have no order of their own
  rng.shuffle(words)
  if len(words) <= 2 * _COMMON:
    raise ValueError(
      f"the text has {len(words)} different words for task common_words, expected more than "
      f"{2 * _COMMON}; give a longer --text_file"
    )
  common, rare, seed = words[:_COMMON], words[_COMMON:], rng.random()

  def haystack(size: int) -> str:
    """Grows by rare words, and with them by repetitions of the common ones."""
    repeats = min(max(size // _COMMON, 2 * _RARE_TIMES), _COMMON_TIMES)
    listed = common * repeats + rare[:size] * _RARE_TIMES
    random.Random(seed).shuffle(listed)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1))

  return Problem(
    _COMMON_INSTRUCTION,
    haystack,
    len(rare),
    _COMMON_QUESTION,
    _COMMON_PREFIX,
    tuple(common),
    new_tokens=96,
  )


def frequent_words(rng: random.Random, sentences: Sequence[str], depth: float) -> Problem:
  """Coded words, shuffled; the text does not enter."""
  del sentences, depth
  seed = rng.random()

  def coded(count: int) -> list[str]:
    """The first so many of an endless list, most frequent first."""
    return random_names(random.Random(seed), count, string.ascii_lowercase, _LETTERS)

  def haystack(size: int) -> str:
    times = list(_zeta_counts(_FEWEST + size))
    words = ["...", *coded(len(times) - 1)]
    text = [word for word, count in zip(words, times, strict=True) for _ in range(count)]
    random.Random(seed).shuffle(text)
    return " ".join(text)

  return Problem(
    _FREQUENT_INSTRUCTION,
    haystack,
    ENDLESS,
    _FREQUENT_QUESTION,
    _FREQUENT_PREFIX,
    tuple(coded(_FREQUENT)),
    new_tokens=48,
  )


def _zeta_counts(total: int) -> Iterator[int]:
  """How often the first, second, ... word comes in a text of about so many, while it does."""
  counts = (int(total * rank**-2 / _ZETA_2) for rank in itertools.count(1))
  return itertools.takewhile(bool, counts)
