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
from collections.abc import Sequence
from typing import NamedTuple

from models import Tokenizer

TASK, METRIC = "niah_single", "string_match_all"
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_INSTRUCTION = (
  "A special magic number is hidden within the following text. Make sure to memorize it. "
  "I will quiz you about the number afterwards.\n{haystack}\n"
  "What is the special magic number for {key} mentioned in the provided text?"
)
_ANSWER_PREFIX = "The special magic number for {key} mentioned in the provided text is"
_ADJECTIVES = "amber brisk crimson distant eager frozen gentle hollow ivory lively mellow quiet"
_NOUNS = "anchor beacon canyon engine falcon garden harbor lantern meadow orchard pebble violin"

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
  sentences = _SENTENCE.findall(" ".join(text.split()))
  rng = random.Random(seed)
  cases = list(itertools.product(digits, depths))
  keys = rng.sample([f"{a}-{n}" for a in _ADJECTIVES.split() for n in _NOUNS.split()], len(cases))
  needles = []
  for key, (length, depth) in zip(keys, cases, strict=True):
    answer = str(rng.randrange(10 ** (length - 1), 10**length))
    ids = _longest_prompt(tokenizer, sentences, tokens, depth, key, answer)
    needles.append(Needle(ids, answer, key, depth, length, len(ids)))
  return needles


def found(answer: str, output: str) -> bool:
  """RULER's string_match_all for one reference: the text holds it."""
  return answer.lower() in output.lower()


def _longest_prompt(
  tokenizer: Tokenizer, sentences: Sequence[str], tokens: int, depth: float, key: str, answer: str
) -> list[int]:
  def prompt(count: int) -> list[int]:
    place = round(count * depth)
    needle = _NEEDLE.format(key=key, value=answer)
    before, after = "".join(sentences[:place]), "".join(sentences[place:count])
    haystack = " ".join(part.strip() for part in (before, needle, after) if part)
    return tokenizer.encode(_conversation(tokenizer, haystack, key))

  shortest = len(prompt(0))
  if shortest > tokens:
    raise ValueError(
      f"a prompt of {tokens} tokens has no room for the question alone, which takes {shortest}; "
      "ask for more --prompt_tokens"
    )
  most = 64
  while most < len(sentences) and len(prompt(most)) <= tokens:
    most *= 2
  most = min(most, len(sentences))
  whole = prompt(most)
  if len(whole) < tokens and most == len(sentences):
    raise ValueError(
      f"the text is too short: a prompt of all of it has {len(whole)} tokens, expected {tokens}; "
      "give a longer --text_file or ask for fewer --prompt_tokens"
    )
  # The length grows with the number of sentences.
  count = bisect.bisect_right(range(most + 1), tokens, key=lambda count: len(prompt(count))) - 1
  return prompt(count)


def _conversation(tokenizer: Tokenizer, haystack: str, key: str) -> str:
  question = _INSTRUCTION.format(haystack=haystack, key=key)
  answer = _ANSWER_PREFIX.format(key=key)
  if tokenizer.chat_template is None:
    return f"{question} {answer}"
  return tokenizer.chat([{"role": "user", "content": question}]) + answer
