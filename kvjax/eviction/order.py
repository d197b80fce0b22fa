"""What every eviction order does, and what those that are one queue share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

Allowed = Callable[[Hashable], bool]


class Order(Protocol):
  """Keys in the order in which they are given up. Keys are distinct, hashable, and not None.

  * `insert(key)` takes in a key that is not held; KeyError if it is.
  * `touch(key)` says that a held key was used again; KeyError if it is not held.
  * `remove(key)` forgets a held key that was not given up; KeyError if it is not held.
  * `victim(allowed)` gives up a key and returns it: the first in the order for which allowed(key),
    where it is given, holds. LookupError if there is none.
  """

  def __len__(self) -> int: ...

  def __contains__(self, key: Hashable) -> bool: ...

  def insert(self, key: Hashable) -> None: ...

  def touch(self, key: Hashable) -> None: ...

  def remove(self, key: Hashable) -> None: ...

  def victim(self, allowed: Allowed | None = None) -> Hashable: ...


def first_allowed(keys: Iterable[Hashable], allowed: Allowed | None) -> Hashable | None:
  """The first key that may be given up, None if there is none."""
  return next((key for key in keys if allowed is None or allowed(key)), None)


def check_new(key: Hashable, held) -> None:
  """Raises KeyError for a key that is held already."""
  if key in held:
    raise KeyError(f"{key!r} is held already; touch it instead")


def no_victim(num_keys: int) -> LookupError:
  """The error of `Order.victim` where nothing may be given up."""
  return LookupError(f"none of {num_keys} keys may be given up; allow one, or cache less")
