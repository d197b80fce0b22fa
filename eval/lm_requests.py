"""What lm-evaluation-harness asks of a model, in tokens, and what tells requests apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from lm_eval.models.utils import normalize_gen_kwargs

from kvjax import Sampling
from models.tokenizer import Tokenizer

Tokens = tuple[int, ...]

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
_ONLY_SAMPLING = {"top_k", "min_p", "typical_p"}  # greedy decoding has no use for them


class Span(NamedTuple):
  """Prefilled tokens, those fed and scored after them, and how many of the last ones count."""

  prompt: Tokens
  rest: Tokens
  wanted: int

  @property
  def id(self) -> str:
    """Of its content."""
    return _digest("loglikelihood", *self)


class Rules(NamedTuple):
  """How a text is made, the same for all rows of a batch."""

  until: tuple[str, ...]
  stop_ids: frozenset[int]
  new_tokens: int
  sampling: Sampling


class Text(NamedTuple):
  """A text to be made: what it begins with, how it goes on, and the seed of its row."""

  prompt: Tokens
  rules: Rules
  seed: int

  @property
  def id(self) -> str:
    """Of its content."""
    rules = self.rules._replace(stop_ids=frozenset())
    return _digest("generate_until", self.prompt, rules, sorted(self.rules.stop_ids), self.seed)


def make_rules(asked: Mapping[str, Any], most_tokens: int, tokenizer: Tokenizer) -> Rules:
  """The rules of a request.

  Args:
    asked: what the harness says of it.
    most_tokens: new ones, where it does not say.
    tokenizer: of the model.

  Raises:
    ValueError: it asks for something that kvjax lacks.
  """
  wanted: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), most_tokens))
  greedy = not wanted["do_sample"]
  unknown = sorted(set(wanted) - _KNOWN - (_ONLY_SAMPLING if greedy else set()))
  if unknown:
    raise ValueError(
      f"generation asks for {', '.join(unknown)}, which kvjax lacks; it has "
      f"{', '.join(sorted(_KNOWN))}"
    )
  temperature = 0.0 if greedy else float(wanted.get("temperature", 1.0))
  until = tuple(one for one in wanted["until"] if one)
  special = (tokenizer.backend.token_to_id(one) for one in until)  # have no text of their own
  return Rules(
    until,
    frozenset([*tokenizer.eos_ids, *(one for one in special if one is not None)]),
    wanted["max_gen_toks"],
    Sampling(temperature, float(wanted.get("top_p", 1.0))),
  )


def _digest(*content: Any) -> str:
  return hashlib.sha256(repr(content).encode()).hexdigest()[:32]
