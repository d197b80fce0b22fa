"""Single needles in a haystack, with the wording of RULER's niah tasks.

The templates are benchmark data of RULER (Hsieh et al. 2024, "RULER: What's the Real Context Size
of Your Long-Context Language Models?", github.com/NVIDIA/RULER, Apache-2.0), in the form for one
needle and one query. As there, the haystack's white space is collapsed, the needle stands between
two sentences, and the answer is begun for the model. Keys are our own words.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eval import prompts
from models import Tokenizer

TASK, METRIC = "niah_single", "string_match_all"
NEEDLE = "One of the special magic numbers for {key} is: {value}."
INSTRUCTION = (
  "A special magic number is hidden within the following text. Make sure to memorize it. "
  "I will quiz you about the number afterwards."
)
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
ANSWER_PREFIX = "The special magic number for {key} mentioned in the provided text is"
ADJECTIVES = "amber brisk crimson distant eager frozen gentle hollow ivory lively mellow quiet"
NOUNS = "anchor beacon canyon engine falcon garden harbor lantern meadow orchard pebble violin"

# A sentence (its closing quotes and brackets, Chinese stops) with the white space behind it; where
# none ends within 800 characters, what fits.
_SENTENCE = re.compile(
  r"(?:.{1,800}?(?:[.!?][\"'\u2019\u201d)\]]*(?=\s|$)|[\u3002\uff01\uff1f])"
  r"|.{1,800}(?=\s|$)|.{1,800})\s*"
)


class Needle(NamedTuple):
  """One question about one hidden number.

  Attributes:
    prompt_ids: the whole prompt, up to where the number follows.
    answer: the number, in decimal digits.
    key: what the number is for.
    depth: share of the haystack's sentences that stand before the needle.
    digits: length of the number.
    tokens: length of the prompt.
  """

  prompt_ids: list[int]
  answer: str
  key: str
  depth: float
  digits: int
  tokens: int


def build_prompts(
  tokenizer: Tokenizer,
  text: str,
  tokens: int = 6900,
  depths: Sequence[float] = (0.2, 0.6),
  digits: Sequence[int] = (5, 7),
  seed: int = 0,
) -> list[Needle]:
  """One prompt for each length of number and each depth, the longest of at most `tokens` tokens.

  Args:
    tokenizer: of the model that will be asked; its chat template is used if it has one.
    text: the haystack is its beginning, cut between sentences.
    tokens: most tokens of a whole prompt.
    depths: each from 0 (before the text) to 1 (behind it).
    digits: lengths of the numbers.
    seed: of keys and numbers.

  Raises:
    ValueError: the text is too short for `tokens`, or `tokens` too few for the instruction.
  """
  sentences = split_sentences(text)
  rng = random.Random(seed)
  cases = list(itertools.product(digits, depths))
  keys = rng.sample([f"{a}-{n}" for a in ADJECTIVES.split() for n in NOUNS.split()], len(cases))
  needles = []
  for key, (length, depth) in zip(keys, cases, strict=True):
    answer = random_number(rng, length)
    fact = NEEDLE.format(key=key, value=answer)

    def prompt(count: int, key: str = key, fact: str = fact, depth: float = depth) -> str:
      haystack = strew(sentences[:count], [fact], [depth])
      question = f"{INSTRUCTION}\n{haystack}\n{QUESTION.format(key=key)}"
      return conversation(tokenizer, question, ANSWER_PREFIX.format(key=key))

    ids = longest_prompt(tokenizer, prompt, len(sentences), tokens)
    needles.append(Needle(ids, answer, key, depth, length, len(ids)))
  return needles


def found(answer: str, output: str) -> bool:
  """RULER's string_match_all for one reference: the text holds it."""
  return answer.lower() in output.lower()


def random_number(rng: random.Random, digits: int) -> str:
  """A number of this many decimal digits."""
  return str(rng.randrange(10 ** (digits - 1), 10**digits))


def split_sentences(text: str) -> list[str]:
  """The text with its white space collapsed, cut behind each sentence; joined again it is whole."""
  return _SENTENCE.findall(" ".join(text.split()))


def strew(sentences: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> str:
  """A haystack: each fact behind its share of the sentences, from 0 (all behind it) to 1."""
  parts, start = [], 0
  for depth, fact in sorted(zip(depths, facts, strict=True), key=lambda pair: pair[0]):
    place = round(len(sentences) * depth)
    parts += ["".join(sentences[start:place]), fact]
    start = place
  parts.append("".join(sentences[start:]))
  return " ".join(part.strip() for part in parts if part)


def conversation(tokenizer: Tokenizer, question: str, answer_prefix: str) -> str:
  """The prompt, with the answer begun for it: behind a chat template, or a blank without one."""
  blank = " " * (tokenizer.chat_template is None)
  return prompts.conversation(tokenizer, question, answer_prefix=blank + answer_prefix)


def longest_prompt(
  tokenizer: Tokenizer, prompt: Callable[[int], str], largest: int, tokens: int
) -> list[int]:
  """Ids of the longest prompt of at most `tokens` tokens.

  Args:
    tokenizer: of the model.
    prompt: `prompt(size)`, from 0 for the question alone to `largest` for all of the text; its
      length grows with the size.
    largest: see `prompt`.
    tokens: most tokens of the whole prompt.

  Raises:
    ValueError: the text is too short for `tokens`, or `tokens` too few for the question.
  """

  def encoded(size: int) -> list[int]:
    return tokenizer.encode(prompt(size))

  shortest = len(encoded(0))
  if shortest > tokens:
    raise ValueError(
      f"a prompt of {tokens} tokens has no room for the question alone, which takes {shortest}; "
      "ask for more --prompt_tokens"
    )
  most = 64
  while most < largest and len(encoded(most)) <= tokens:
    most *= 2
  most = min(most, largest)
  whole = encoded(most)
  if len(whole) < tokens and most == largest:
    raise ValueError(
      f"the text is too short: a prompt of all of it has {len(whole)} tokens, expected {tokens}; "
      "give a longer --text_file or ask for fewer --prompt_tokens"
    )
  size = bisect.bisect_right(range(most + 1), tokens, key=lambda size: len(encoded(size))) - 1
  return encoded(size)
