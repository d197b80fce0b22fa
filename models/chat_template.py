"""Chat templates: Jinja programs that come with a model, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


def render(template: str, messages: Sequence[Message], **variables: Any) -> str:
  """The prompt text that a template makes of a conversation.

  Args:
    template: Jinja source out of the model's files; untrusted, so it runs sandboxed.
    messages: each with "role" and "content".
    **variables: `add_generation_prompt`, `bos_token`, `eos_token`.

  Raises:
    ValueError: the template is broken or refuses the messages.
  """
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  environment.filters["tojson"] = _to_json
  try:
    return environment.from_string(template).render(
      messages=list(messages), raise_exception=_refuse, **variables
    )
  except jinja2.TemplateError as error:
    raise ValueError(f"the model's chat template refused the messages: {error}") from error


def _refuse(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
  # Jinja's own filter escapes for HTML, which would change the prompt.
  return json.dumps(value, ensure_ascii=False, indent=indent)
