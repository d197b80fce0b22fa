"""A policy in one word of a command line: its name, and its options behind colons.

quest
quest:score=outlier:candidates=4
omnikv:profile=filters.npz
my_policy.py:share=0.5

The name may be the one that kvpress has for the method (`KVPRESS`).
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.policies._aliases import KVPRESS


def split_spec(spec: str, kind: str = "policy") -> tuple[str, dict[str, str]]:
  """Our name of the policy (or store, as kind says), and the text of each option.

  Raises:
    ValueError: an option without a name or a value, or one that comes twice.
  """
  name, *parts = spec.split(":")
  options: dict[str, str] = {}
  for part in parts:
    option, equals, text = part.partition("=")
    if not option or not equals or not text:
      raise ValueError(
        f"{kind} {spec!r}: {part!r} is no option; write {name}:option=value:option=value"
      )
    if option in options:
      raise ValueError(f"{kind} {spec!r}: option {option} comes twice; leave one out")
    options[option] = text
  return KVPRESS.get(name, name), options


def values_of(
  spec: str, texts: Mapping[str, str], make: Callable[..., Any], kind: str = "policy"
) -> dict[str, Any]:
  """What the texts of options stand for: literals of Python, or else the texts themselves.

  Args:
    spec: what they come from, for errors.
    texts: by option.
    make: the function whose options they are; its annotations say what a value may be.
    kind: of what they are options, for errors.

  Raises:
    ValueError: a value that its option cannot take.
  """
  hints, values = _hints(make), {}
  for option, text in texts.items():
    hint = hints.get(option, Any)
    fitting = [value for value in (_literal(text), text) if _fits(value, hint)]
    if not fitting:
      wanted = inspect.formatannotation(hint)
      raise ValueError(f"{kind} {spec!r}: option {option} is {text!r}, expected {wanted}")
    values[option] = fitting[0]
  return values


def _hints(make: Callable[..., Any]) -> Mapping[str, Any]:
  """Types by option; none where a file of the user's own names some that it does not import."""
  try:
    return {"budget_tokens": int, "page_size": int} | typing.get_type_hints(make)
  except NameError:
    return {}


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, TypeError, SyntaxError):
    return text


def _fits(value: Any, hint: Any) -> bool:
  """The value is of the type, and what it holds of the types inside; types that are not classes,
  nor made of them, are not looked at."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(_fits(value, one) for one in inner)
  if hint is Any or not isinstance(origin or hint, type):
    return True
  if isinstance(value, bool) and hint is not bool:  # for Python an int
    return False
  if origin is None:
    return isinstance(value, (int, float) if hint is float else hint)
  if isinstance(value, str) or not isinstance(value, origin):
    return False
  if origin is tuple and ... not in inner:
    return len(value) == len(inner) and all(map(_fits, value, inner))
  return all(_fits(one, inner[0]) for one in value)
