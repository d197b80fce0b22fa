"""The prompts of L-Eval.

The wording is that of Baselines/llama2-chat-test.py and LEval_config.py of
github.com/OpenLMLab/LEval (commit cd34b05), spelling included, since it is part of the benchmark.
Open tasks say how many words the reference has, which the authors call
length-instruction-enhanced. Answers have at most 512 tokens.

Departures: all that a user says goes through the model's chat template, as the authors do for some
models; a document is cut until the whole prompt fits, not the document alone; below 250 words by
halves.
"""

from __future__ import annotations

from collections.abc import Iterator

from eval import exam, leval, prompts
from eval.jsonl import Record
from eval.tasks import Example
from models import Tokenizer

NEW_TOKENS = 512
_STEP = 250  # words by which a document gets shorter until it fits

_DOCUMENT = "Now you are given a very long document. "
_OPEN = (
  "Please follow the instruction after this document. These instructions may include summarizing a "
  "document, answering questions based on the document, or writing a required paragraph. "
)
_OPTIONS = (
  "Please follow the instruction based on this document. For multi-choice questions, there {} "
  "Please only provide the letter corresponding to the answer (like A or {}) when answering. "
)
_ONE = _OPTIONS.format("is only a sinlge correct option.", "B")
_SEVERAL = _OPTIONS.format("could be a sinlge correct option or multiple correct options.", "AB")
_ELSE = "For other questions, please directly give the concise and accurate answer. "
_SYSTEM = {  # spelled as the authors do
  "gsm100": (
    "Given several question answer pairs, you need to follow a similar format to answer the last "
    "question. Make sure the response is end with The answer is _ . "
  ),
  "topic_retrieval_longchat": (
    "Below is a record of our previous conversation on many different topics. You are the "
    "ASSISTANT, and I am the USER. At the beginning of each topic, the USER will say 'I would like "
    "to discuss the topic of <TOPIC>'. Memorize each <TOPIC>. At the end of the record, I will ask "
    "you to retrieve the first/second/third topic names. Now the record start. "
  ),
  "codeU": (
    "Now you are given a code base consisting of a large amount of functions and the corresponding "
    "comments. In the end, I will call some functions defined in the code base. Please carefully "
    "read these codes and comments and answer the question."
  ),
  "sci_fi": (
    "Now you are given a scientific fiction. I will ask you some questions and the answer should "
    'be "True" or "False". Notice that you should answer the question based on the evidence in the '
    "document instead of your background knowledge."
  ),
  "coursera": _DOCUMENT + _SEVERAL,
}
_IN_THE_STORY = "based on the world described in the document."
_IN_THE_WORLD = "based on the real-world knowledge and facts up until your last training"


def questions(
  tokenizer: Tokenizer, name: str, index: str, record: Record, prompt_tokens: int
) -> Iterator[list[Example]]:
  """The questions of a document, one example each, or two of sci_fi; none if a judge is needed.

  Args:
    tokenizer: of the model. Without a chat template every prompt is plain text.
    name: the task.
    index: of the line in the task's file.
    record: the line, with `leval.FIELDS`.
    prompt_tokens: most tokens of a prompt.

  Raises:
    ValueError: no such task, a document without a question, with a blank one or with more or fewer
      answers than questions, or too few tokens for a prompt.
  """
  leval.task_of(name)
  if record["evaluation"] not in leval.METRICS:
    return
  pairs, document = _pairs(f"{name}, record {index}", record), record["input"]
  # All questions of a document get the same part of it: what the longest has room for.
  longest = max(pairs, key=lambda pair: len(pair[0]))
  document = _cut(tokenizer, name, document, longest, prompt_tokens)
  for number, pair in enumerate(pairs):
    part = _cut(tokenizer, name, document, pair, prompt_tokens)
    text, tail = _prompt(tokenizer, name, part, *pair)
    place = f"{index}-{number}"
    if name != "sci_fi":
      yield [_example(tokenizer, name, place, text, tail, pair[1])]
      continue
    story, fact = exam.halves(pair[1])
    first = _example(tokenizer, name, place, text, tail, story)
    text, tail = _fact_prompt(tokenizer, pair[0])
    yield [first, _example(tokenizer, name, f"{place}-fact", text, tail, fact or "")]


def _pairs(place: str, record: Record) -> list[tuple[str, str]]:
  """Questions with their answers."""
  asked, expected = record["instructions"], record["outputs"]
  if len(asked) != len(expected):
    raise ValueError(
      f"{place}: {len(asked)} instructions and {len(expected)} outputs, expected an answer for each"
    )
  if not asked:
    raise ValueError(f"{place} has no instructions, expected at least one; leave the record out")
  for number, question in enumerate(asked):
    if not question.strip():
      raise ValueError(f"{place}: instruction {number} is blank, expected a question")
  return list(zip(asked, expected, strict=True))


def _example(
  tokenizer: Tokenizer, name: str, index: str, text: str, tail: str, reference: str
) -> Example:
  return Example(
    task=name,
    id=index,
    prompt_ids=tokenizer.encode(text),
    references=(reference,),
    new_tokens=NEW_TOKENS,
    question_tokens=prompts.num_tokens(tokenizer, tail + text.rpartition(tail)[2]),
    chat=tokenizer.chat_template is not None,
  )


def _prompt(
  tokenizer: Tokenizer, name: str, document: str, question: str, reference: str
) -> tuple[str, str]:
  """The text of a prompt, and what its user says behind the document."""
  wording, prefix = leval.TASKS[name].wording, ""
  if wording == "continue":
    head, tail = "", f"\n\n{question}"
  elif wording == "exam":
    head, prefix = "Document is as follows. ", "\nAnswer:"
    tail = (
      f" \nQuestion: {question}.  Please directly give the answer without any additional output or "
      "explanation "
    )
  else:
    head, words = "Document is as follows. ", len(reference.split())
    tail = f" Instruction: {question} \nAnswer this question with {words} words."
  system = _SYSTEM.get(name, _DOCUMENT + (_ONE + _ELSE if wording == "exam" else _OPEN))
  text = prompts.conversation(tokenizer, head + document + tail, system, prefix)
  return text, tail.strip()


def _fact_prompt(tokenizer: Tokenizer, question: str) -> tuple[str, str]:
  """sci_fi's second question, without the story."""
  asked = question.replace(_IN_THE_STORY, _IN_THE_WORLD)
  asked += "Please directly answer without any additional output or explanation. "
  text = prompts.conversation(tokenizer, asked, answer_prefix="\nAnswer:")
  return text, asked.strip()


def _cut(tokenizer: Tokenizer, name: str, document: str, pair: tuple[str, str], most: int) -> str:
  """The document, cut by words until the prompt fits: its end goes, or the beginning of code."""
  words, kept = document.split(" "), most
  while len(tokenizer.encode(_prompt(tokenizer, name, document, *pair)[0])) > most:
    while kept >= len(words):  # such a cut would leave all of it
      kept = _fewer(kept)
    if not kept:
      raise ValueError(
        f"a prompt of {most} tokens has no room for a question of {name} alone; ask for more "
        "--prompt_tokens"
      )
    document = " ".join(words[-kept:] if name == "codeU" else words[:kept])
    kept = _fewer(kept)
  return document


def _fewer(words: int) -> int:
  return words - _STEP if words > _STEP else words // 2
