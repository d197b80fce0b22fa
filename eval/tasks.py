"""Examples of every task, ready to be given to a model, and the score of an answer.

The tasks are those of `ruler`, for models that follow instructions, and those of `recall`, for the
small models that were trained on them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from eval import needle, recall, ruler
from models import Tokenizer

TASKS = (*ruler.TASKS, *recall.TASKS)
METRIC = needle.METRIC


class Example(NamedTuple):
  """One question.

  Attributes:
    task: one of `TASKS`.
    prompt_ids: the whole prompt, up to where the answer follows.
    references: what the answer must hold.
    new_tokens: most tokens of an answer.
    question_tokens: tokens from the beginning of the question to the end of the prompt.
  """

  task: str
  prompt_ids: list[int]
  references: tuple[str, ...]
  new_tokens: int
  question_tokens: int


def make_examples(
  names: Sequence[str],
  tokenizer: Tokenizer,
  text: str,
  *,
  tokens: int,
  num_samples: int,
  seed: int = 0,
) -> list[Example]:
  """The examples of some tasks, task by task.

  Each has another piece of the text, and where one place holds the answer, the places of a task's
  examples are spread evenly over the depth.

  Args:
    names: of `TASKS`.
    tokenizer: of the model that will be asked; its chat template is used if it has one.
    text: plain text to hide facts in.
    tokens: most tokens of a prompt, the answer not counted; prompts come as near as they can.
    num_samples: examples of each task.
    seed: of everything that is random.

  Raises:
    ValueError: no such task, too short a text for `tokens`, or too few of them for a question.
  """
  check_names(names)
  sentences, book = needle.split_sentences(text), recall.plain(text)
  examples = []
  for name in names:
    for index in range(num_samples):
      rng = random.Random(f"{name} {seed} {index}")
      depth = (index + 0.5) / num_samples
      if name in recall.TASKS:
        examples.append(_recall(name, tokenizer, book, tokens, rng, depth))
      else:
        examples.append(_ruler(name, tokenizer, sentences, tokens, rng, depth))
  return examples


def check_names(names: Sequence[str]) -> None:
  """Raises ValueError if there is no such task."""
  for name in names:
    if name not in TASKS:
      raise ValueError(f"unknown task {name!r}, expected some of {', '.join(TASKS)}")


def score(references: Sequence[str], output: str) -> float:
  """RULER's string_match_all: share of the references that the output holds, in either case."""
  return sum(needle.found(one, output) for one in references) / len(references)


def _ruler(
  name: str,
  tokenizer: Tokenizer,
  sentences: list[str],
  tokens: int,
  rng: random.Random,
  depth: float,
) -> Example:
  start = rng.randrange(len(sentences))
  problem = ruler.TASKS[name](rng, sentences[start:] + sentences[:start], depth)

  def prompt(size: int) -> str:
    return needle.conversation(tokenizer, problem.ask(size), problem.answer_prefix)

  ids = needle.longest_prompt(tokenizer, prompt, problem.largest, tokens)
  tail = tokenizer.decode(ids, skip_special=False).rpartition(problem.question)[2]
  question = _length(tokenizer, problem.question + tail)
  return Example(name, ids, problem.references, problem.new_tokens, question)


def _recall(
  name: str, tokenizer: Tokenizer, book: str, tokens: int, rng: random.Random, depth: float
) -> Example:
  """As many characters as tokens are allowed: the longest that fits where a token is a byte."""
  built = recall.build(name, book, tokens, rng, depth=depth)
  ids = tokenizer.encode(built.prompt)
  return Example(
    name,
    ids,
    tuple(built.answer.split(">")),
    new_tokens=_length(tokenizer, built.answer),
    question_tokens=_length(tokenizer, built.prompt.rpartition("\n")[2]),
  )


def _length(tokenizer: Tokenizer, text: str) -> int:
  """Tokens of a text in the midst of others."""
  return len(tokenizer.encode(text)) - tokenizer.add_bos
