"""The prompts of LongBench.

The protocol is that of pred.py of github.com/THUDM/LongBench, version 1 (commit 2e00731).
`longbench_prompts.json` is its config/dataset2prompt.json, typos included, since they are part of
the benchmark; it is under the MIT licence in `LICENSE.longbench_prompts`.

Departures: where a prompt is too long, the official code decodes both halves, joins the texts and
encodes them again, within the chat template and beyond the length that was asked for. Here the ids
are cut, and template and question together have that length.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

from eval import longbench, prompts
from eval.jsonl import Record
from eval.tasks import Example
from models import Tokenizer


def questions(
  tokenizer: Tokenizer, name: str, index: str, record: Record, prompt_tokens: int
) -> Iterator[list[Example]]:
  """The question of a record, as one example.

  Args:
    tokenizer: of the model. Without a chat template every prompt is plain text.
    name: the task.
    index: of the line in the task's file.
    record: the line, with `longbench.FIELDS`.
    prompt_tokens: most tokens of a prompt.

  Raises:
    ValueError: no such task, or too few tokens for a prompt.
  """
  task, template = longbench.task_of(name), _templates()[longbench.plain(name)]
  body = template.format(context=record["context"], input=record["input"])
  chat = task.chat and tokenizer.chat_template is not None
  text = prompts.conversation(tokenizer, body) if chat else body
  asked = template.partition("{context}")[2].format(input=record["input"]).strip()
  behind = text.rpartition(asked)[2] if asked else ""  # some templates end with the input alone
  example = Example(
    task=name,
    id=index,
    prompt_ids=prompts.cut_middle(tokenizer, text, body, prompt_tokens),
    references=tuple(record["answers"]),
    new_tokens=task.new_tokens,
    question_tokens=prompts.num_tokens(tokenizer, asked + behind),
    classes=tuple(record["all_classes"] or ()),
    stop_ids=_newline(tokenizer) if longbench.plain(name) == "samsum" else (),
    length=record["length"],
    chat=chat,
  )
  yield [example]


def _newline(tokenizer: Tokenizer) -> tuple[int, ...]:
  """Ends an answer of samsum, where models go on with dialogues of their own."""
  return (tokenizer.encode("\n")[-1],)


@functools.cache
def _templates() -> dict[str, str]:
  path = Path(__file__).with_name("longbench_prompts.json")
  return json.loads(path.read_text(encoding="utf-8"))
