"""What a check is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Setting(NamedTuple):
  """How checks run.

  Attributes:
    interpret: tiny shapes, with kernels interpreted on a CPU: tries the checks, measures nothing.
  """

  interpret: bool


class Case(NamedTuple):
  """One thing that is checked.

  Attributes:
    name: unique within its file.
    run: gives numbers by name. `ok`, if there, says whether they are good; raising says that they
      are not. `seconds`, `floor_seconds` and `ratio` are shown in the table.
  """

  name: str
  run: Callable[[], dict[str, Any]]


class LeftOut(Exception):
  """A case cannot run here, for the reason it carries, which is no failure."""
