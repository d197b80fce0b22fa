"""Prompts out of texts: chat templates, and cuts on token ids that never touch a template."""

from __future__ import annotations

import bisect

from models import Tokenizer


def conversation(
  tokenizer: Tokenizer, question: str, system: str = "", answer_prefix: str = ""
) -> str:
  """The text of a prompt, in the model's chat template if it has one.

  Templates that refuse a system message or leave it out get it at the head of the question, and so
  do models without a template.

  Args:
    tokenizer: of the model.
    question: what the user says.
    system: what a system message says; "" for none.
    answer_prefix: with what the answer is begun.
  """
  merged = f"{system}\n\n{question}" if system else question
  if tokenizer.chat_template is None:
    return merged + answer_prefix
  user = {"role": "user", "content": question}
  if system:
    try:
      text = tokenizer.chat([{"role": "system", "content": system}, user])
    except ValueError:
      text = ""
    if system.strip() in text:
      return text + answer_prefix
  return tokenizer.chat([user | {"content": merged}]) + answer_prefix


def cut_middle(tokenizer: Tokenizer, text: str, body: str, most: int) -> list[int]:
  """Ids of a text, short enough: of its body the first and the last tokens stay, as many of each.

  The text is encoded once, as a whole; what surrounds the body (a chat template, the token that
  starts a text) is kept, and nothing is decoded or encoded again.

  Args:
    tokenizer: of the model.
    text: the whole prompt.
    body: the part of it that may lose its middle.
    most: tokens of the whole prompt.

  Raises:
    ValueError: `most` has no room for two tokens of the body, or the template changed the body.
  """
  ids = tokenizer.encode(text)
  if len(ids) <= most:
    return ids
  if body not in text:
    body = body.strip()  # as some templates do
  begin = text.find(body)
  if begin < 0:
    raise ValueError("the model's chat template changes the text of messages; it cannot be cut")
  spans = tokenizer.backend.encode(text, add_special_tokens=False).offsets
  added = len(ids) - len(spans)  # the token that starts a text
  first = added + bisect.bisect_left(spans, begin, key=lambda span: span[0])
  last = added + bisect.bisect_right(spans, begin + len(body), key=lambda span: span[1])
  half = (most - first - (len(ids) - last)) // 2
  if half < 1:
    raise ValueError(
      f"{most} tokens have no room for the model's chat template and a question; ask for more "
      "--prompt_tokens"
    )
  return ids[: first + half] + ids[last - half :]


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
  """Tokens of a text in the midst of others."""
  return len(tokenizer.encode(text)) - tokenizer.add_bos


def room(model: str, max_tokens: int, prompt_tokens: int | None, new_tokens: int) -> int:
  """Most tokens of a prompt: as asked for, or what the model's context leaves.

  Args:
    model: its name.
    max_tokens: of its context.
    prompt_tokens: what was asked for; None for as many as there is room for.
    new_tokens: of an answer.

  Raises:
    ValueError: there is no room for so many.
  """
  most = max_tokens - new_tokens
  if most < 1:
    raise ValueError(
      f"answers of {new_tokens} tokens leave no room in the {max_tokens} tokens of {model}; choose "
      "another task or model"
    )
  if prompt_tokens is not None and prompt_tokens > most:
    raise ValueError(
      f"--prompt_tokens={prompt_tokens} and answers of {new_tokens} tokens exceed the {max_tokens} "
      f"that {model} was trained for; ask for at most {most}"
    )
  return most if prompt_tokens is None else prompt_tokens
