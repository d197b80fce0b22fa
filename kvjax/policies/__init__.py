"""Policies, one a file; `POLICIES` is the one registry, and every file of this folder is in it.

A file `name.py` defines a function `name(budget_tokens, page_size, *, ...) -> Policy`; files whose
name begins with an underscore hold what several of them share. A policy of one's own needs no place
here: `make_policy("path/to/name.py")` reads it from its file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import numbers
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path

from kvjax.policies._aliases import KVPRESS
from kvjax.policies._spec import split_spec, values_of
from kvjax.types import Policy

_COMMON = ("budget_tokens", "page_size")

POLICIES: dict[str, Callable[..., Policy]] = {
  name: getattr(importlib.import_module(f"{__name__}.{name}"), name)
  for _, name, _ in pkgutil.iter_modules(__path__)
  if not name.startswith("_")
}


def make_policy(spec: str, /, **options) -> Policy:
  """The policy of this name with these options, e.g. `make_policy("quest", budget_tokens=2048)`.

  Options may stand behind the name too, as they do on command lines: "quest:score=mean" or
  "omnikv:profile=filters.npz". All of them but `budget_tokens` and `page_size` are then part of the
  policy's name, by which results are told apart.

  `budget_tokens` and `page_size` may be given to any policy; those that read everything have no
  use for them.

  Args:
    spec: a key of `POLICIES`, kvpress' name for one of them, or the path of a Python file that
      defines a policy function of the file's own name; then, each behind a colon, option=value. A
      value is a literal of Python or a text, and has no colon in it.
    **options: arguments of that function.

  Raises:
    ValueError: no such policy, no such option, or an option outside its range.
  """
  name, texts = split_spec(spec)
  make = _from_file(Path(name)) if name.endswith(".py") else POLICIES.get(name)
  if make is None:
    raise ValueError(
      f"unknown policy {name!r}; expected one of {', '.join(POLICIES)}, kvpress' name of one "
      f"({', '.join(KVPRESS)}), or the path of a .py file"
    )
  known = inspect.signature(make).parameters
  unknown = {*options, *texts} - {*known, *_COMMON}
  if unknown:
    raise ValueError(
      f"policy {name!r} has no option {', '.join(sorted(unknown))}; "
      f"it has {', '.join(known) or 'none'}"
    )
  twice = sorted({*options} & {*texts})
  if twice:
    raise ValueError(
      f"policy {spec!r}: {twice[0]} is given apart from it too, on command lines by a flag of its "
      "own; leave it out here"
    )
  options |= values_of(spec, texts, make)
  for option in _COMMON:
    value = options.get(option, 1)
    if not isinstance(value, numbers.Integral) or value < 1:
      raise ValueError(f"policy {spec!r}: {option} {value} must be a positive whole number")
  try:
    policy = make(**{key: value for key, value in options.items() if key in known})
  except ValueError as error:
    message = str(error)
    if message.startswith("policy"):
      raise
    raise ValueError(f"policy {spec!r}: {message}") from error
  said = [f"{option}={text}" for option, text in texts.items() if option not in _COMMON]
  return policy._replace(
    name=":".join([policy.name, *said]), asked_tokens=_asked_tokens(known, options)
  )


def _asked_tokens(known: Mapping[str, inspect.Parameter], options: Mapping) -> int | None:
  """The budget that a policy with these parameters was given, or its default."""
  if "budget_tokens" not in known:
    return None
  return options.get("budget_tokens", known["budget_tokens"].default)


def _from_file(path: Path) -> Callable[..., Policy]:
  """The policy function in a file of the user's own."""
  if not path.is_file():
    raise ValueError(f"no policy file {path}; expected a Python file that defines {path.stem}()")
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  make = getattr(module, path.stem, None)
  if make is None:
    raise ValueError(f"{path} defines no function {path.stem}(); a policy is named as its file")
  return make


__all__ = ["KVPRESS", "POLICIES", "make_policy", "split_spec", "values_of"]
