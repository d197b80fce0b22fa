"""What the commands of LongBench and L-Eval share: from the files of a user to examples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from eval import grid, jsonl, prompts, tasks
from eval.jsonl import Record
from eval.tasks import Example
from models import Loaded, Tokenizer
from models.fetch import file_sha256

flags.disclaim_key_flags()


class Suite(NamedTuple):
  """A benchmark.

  Attributes:
    name: of its command.
    tasks: all names.
    default: names of the tasks that are run where none is given.
    find: folder and task -> the task's file.
    fields: of a record of such a file.
    new_tokens: task -> most tokens of an answer.
    questions: tokenizer, task, index, record and most tokens of a prompt -> the questions of that
      record: the examples of each, most often one.
    fetch: downloads the files of some tasks into a folder.
  """

  name: str
  tasks: Sequence[str]
  default: Sequence[str]
  find: Callable[[Path, str], Path]
  fields: jsonl.Fields
  new_tokens: Callable[[str], int]
  questions: Callable[[Tokenizer, str, str, Record, int], Iterator[list[Example]]]
  fetch: Callable[[Sequence[str], Path], None]


def define_flags(suite: Suite) -> None:
  """The flags of its command."""
  grid.define_flags(suite.name, ["dense", "quest", "streaming"], [1024])
  known = ", ".join(suite.tasks)
  flags.DEFINE_list("tasks", list(suite.default), f"Some of {known}.")
  flags.DEFINE_string("data_dir", None, "Folder with the data, as its authors give it.")
  flags.DEFINE_bool("download", False, "Fetch what is missing into --data_dir first.")
  flags.DEFINE_integer(
    "prompt_tokens",
    None,
    "Most tokens of a prompt; longer ones are cut. Default: all that the model has room for.",
    lower_bound=1,
  )


def main(args: flags.FlagValues, suite: Suite) -> None:
  """Reads the data, before the model; then as `grid.main`."""
  names = tasks.choose(args.tasks, suite.tasks)
  paths = files(suite, names, args.data_dir, args.download)
  records = {name: jsonl.read(path, suite.fields) for name, path in paths.items()}
  hashes = {path.name: file_sha256(path) for path in paths.values()}
  grid.main(
    args,
    lambda loaded: (make_examples(suite, loaded, records, args.prompt_tokens, args.limit), hashes),
  )


def files(
  suite: Suite, names: Sequence[str], data_dir: str | None, download: bool
) -> dict[str, Path]:
  """Task -> its file.

  Args:
    suite: the benchmark.
    names: of its tasks.
    data_dir: the folder.
    download: fetch what is not there.

  Raises:
    ValueError: no folder was given, or a file is missing or could not be fetched.
  """
  if data_dir is None:
    raise ValueError("--data_dir is needed: the folder with the data, or for it with --download")
  folder = Path(data_dir).expanduser()
  if download:
    missing = [name for name in names if not _is_there(suite, folder, name)]
    if missing:
      suite.fetch(missing, folder)
  return {name: suite.find(folder, name) for name in names}


def make_examples(
  suite: Suite,
  loaded: Loaded,
  records: Mapping[str, Sequence[Record]],
  prompt_tokens: int | None,
  limit: int | None = None,
) -> list[Example]:
  """The examples of some tasks.

  Args:
    suite: the benchmark.
    loaded: the model that will be asked, with a tokenizer.
    records: of each task.
    prompt_tokens: most tokens of a prompt; None for as many as the model has room for.
    limit: most questions of each task; None for all.

  Raises:
    ValueError: more tokens than the model has room for, or too few for a question; a task without
      an example.
  """
  assert loaded.tokenizer is not None
  if loaded.tokenizer.chat_template is None:
    print(f"note       {loaded.name} has no chat template: all its prompts are plain text")
  found: list[Example] = []
  for name, lines in records.items():
    context = loaded.model.config.max_tokens
    most = prompts.room(loaded.name, context, prompt_tokens, suite.new_tokens(name))
    some = list(examples(suite, loaded.tokenizer, name, lines, most, limit))
    if not some:
      raise ValueError(f"{name} has no question that can be scored without a judge; leave it out")
    _check_scores(some)
    _note_long_questions(name, some, most)
    found += some
  return found


def examples(
  suite: Suite,
  tokenizer: Tokenizer,
  name: str,
  records: Sequence[Record],
  prompt_tokens: int,
  limit: int | None = None,
) -> Iterator[Example]:
  """The questions of a task, record by record.

  Args:
    suite: the benchmark.
    tokenizer: of the model. Without a chat template every prompt is plain text.
    name: the task.
    records: lines of its file, with the suite's fields.
    prompt_tokens: most tokens of a prompt.
    limit: most questions; None for all. The examples of one question count as one.

  Raises:
    ValueError: no such task, a record that cannot be asked, or too few tokens for a prompt.
  """
  questions = (
    question
    for index, record in enumerate(records)
    for question in suite.questions(tokenizer, name, str(index), record, prompt_tokens)
  )
  yield from itertools.chain.from_iterable(itertools.islice(questions, limit))


def _check_scores(examples: Sequence[Example]) -> None:
  """Says now what would be said after the first answer: a package or an answer that is missing."""
  for example in examples:
    try:
      if not example.references:
        raise ValueError("it has no answers, expected at least one")
      tasks.score(example.task, "", example.references, example.classes)
    except ValueError as error:
      raise ValueError(f"{example.task}, question {example.id}: {error}") from error


def _note_long_questions(task: str, examples: Sequence[Example], most: int) -> None:
  """Says where a cut reaches into questions: LongBench cuts the middle of a whole prompt."""
  cut = [one for one in examples if len(one.prompt_ids) >= most - 1]
  long = sum(one.question_tokens > most // 2 for one in cut)
  if long:
    print(
      f"note       {task}: in {long} of {len(examples)} prompts the question, with the instruction "
      f"before it, is longer than half of {most} tokens and is cut; ask for more --prompt_tokens"
    )


def _is_there(suite: Suite, folder: Path, name: str) -> bool:
  try:
    return suite.find(folder, name).is_file()
  except ValueError:
    return False
