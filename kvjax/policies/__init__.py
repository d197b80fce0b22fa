"""Policies, one a file; `POLICIES` is the one registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from kvjax.policies.dense import dense
from kvjax.policies.quest import quest
from kvjax.policies.streaming import streaming
from kvjax.types import Policy

POLICIES: dict[str, Callable[..., Policy]] = {
  "dense": dense,
  "quest": quest,
  "streaming": streaming,
}


def make_policy(name: str, **options) -> Policy:
  """The policy of this name with these options, e.g. `make_policy("quest", budget_tokens=2048)`.

  `budget_tokens` and `page_size` may be given to any policy; those that read everything have no
  use for them.

  Raises:
    ValueError: no such policy, no such option, or an option outside its range.
  """
  if name not in POLICIES:
    raise ValueError(f"unknown policy {name!r}; expected one of {', '.join(POLICIES)}")
  factory = POLICIES[name]
  known = inspect.signature(factory).parameters
  unknown = set(options) - set(known) - {"budget_tokens", "page_size"}
  if unknown:
    raise ValueError(
      f"policy {name!r} has no option {', '.join(sorted(unknown))}; "
      f"it has {', '.join(known) or 'none'}"
    )
  if options.get("page_size", 1) < 1:
    raise ValueError(f"page_size {options['page_size']} must be positive")
  return factory(**{key: value for key, value in options.items() if key in known})


__all__ = ["POLICIES", "make_policy"]
