"""Examples of every task, ready to be given to a model, and the score of an answer.

The tasks are those of `ruler`, for models that follow instructions, and those of `recall`, for the
small models that were trained on them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from eval import leval, longbench, needle, prompts, recall, ruler
from models import Tokenizer

TASKS = (*ruler.TASKS, *recall.TASKS)


class Example(NamedTuple):
  """One question.

  Attributes:
    task: a name that no other suite has; `score` knows it.
    id: unique within the task, and the same each time the task is made: a run that is gone on with
      knows by it what was answered.
    prompt_ids: the whole prompt, up to where the answer follows.
    references: what the answer must hold, or answers that would be right.
    new_tokens: most tokens of an answer.
    question_tokens: tokens from the beginning of the question to the end of the prompt.
    classes: all answers to choose from, for tasks that classify.
    stop_ids: tokens that end an answer beside those of the tokenizer; no answer begins with either
      then, as LongBench has it. The same in a whole task.
    length: the data's own measure of the prompt, where it has one.
    chat: the prompt went through the model's chat template.
  """

  task: str
  id: str
  prompt_ids: list[int]
  references: tuple[str, ...]
  new_tokens: int
  question_tokens: int
  classes: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()
  length: int | None = None
  chat: bool = False


def make_examples(
  names: Sequence[str],
  tokenizer: Tokenizer,
  text: str,
  *,
  tokens: int,
  num_samples: int,
  seed: int = 0,
  limit: int | None = None,
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
    limit: only the first of them; they are the same as among all.

  Raises:
    ValueError: no such task, too short a text for `tokens`, or too few of them for a question.
  """
  check_names(names)
  sentences, book = needle.split_sentences(text), recall.plain(text)
  examples = []
  for name in names:
    for index in range(num_samples)[:limit]:
      rng = random.Random(f"{name} {seed} {index}")
      depth = (index + 0.5) / num_samples
      if name in recall.TASKS:
        example = _recall(name, tokenizer, book, tokens, rng, depth)
      else:
        example = _ruler(name, tokenizer, sentences, tokens, rng, depth)
      examples.append(example._replace(id=str(index)))
  return examples


def choose(names: Sequence[str], known: Sequence[str] = TASKS) -> list[str]:
  """What --tasks names, checked.

  Raises:
    ValueError: none, one that is unknown, or one that comes twice.
  """
  if not names:
    raise ValueError(f"--tasks is empty, expected some of {', '.join(known)}")
  if len(set(names)) != len(names):
    raise ValueError(f"--tasks={','.join(names)}: expected names, each of them once")
  check_names(names, known)
  return list(names)


def check_names(names: Sequence[str], known: Sequence[str] = TASKS) -> None:
  """Raises ValueError if there is no such task."""
  for name in names:
    if name not in known:
      raise ValueError(f"unknown task {name!r}, expected some of {', '.join(known)}")


def score(
  task: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()
) -> float:
  """How right an answer is, 0 to 1, by the metric of its task.

  `eval.longbench` and `eval.leval` have those of their tasks. The tasks of this module have RULER's
  string_match_all: share of the references that the answer holds, in either case.

  Args:
    task: name of a task of any suite.
    prediction: the answer.
    references: see `Example`.
    classes: see `Example`.

  Raises:
    ValueError: no such task.
  """
  if task in longbench.NAMES:
    return longbench.score(task, prediction, references, classes)
  if task in leval.NAMES:
    return leval.score(task, prediction, references)
  check_names([task])
  return sum(needle.found(one, prediction) for one in references) / len(references)


def metric(task: str) -> str:
  """Name of what `score` computes for a task.

  Raises:
    ValueError: no such task.
  """
  if task in longbench.NAMES:
    return longbench.task_of(task).metric
  if task in leval.NAMES:
    return leval.task_of(task).metric
  check_names([task])
  return needle.METRIC


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
  question = prompts.num_tokens(tokenizer, problem.question + tail)
  chat = tokenizer.chat_template is not None
  return Example(name, "", ids, problem.references, problem.new_tokens, question, chat=chat)


def _recall(
  name: str, tokenizer: Tokenizer, book: str, tokens: int, rng: random.Random, depth: float
) -> Example:
  """As many characters as tokens are allowed: the longest that fits where a token is a byte."""
  built = recall.build(name, book, tokens, rng, depth=depth)
  ids = tokenizer.encode(built.prompt)
  return Example(
    name,
    "",
    ids,
    tuple(built.answer.split(">")),
    new_tokens=prompts.num_tokens(tokenizer, built.answer),
    question_tokens=prompts.num_tokens(tokenizer, built.prompt.rpartition("\n")[2]),
  )
