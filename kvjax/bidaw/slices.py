"""Long work in short slices, so that nobody waits for it: a generator that stops now and then."""

from __future__ import annotations

from collections.abc import Generator


def finished[T](work: Generator[None, None, T]) -> T:
  """Does it all at once; what it returns."""
  while True:
    try:
      next(work)
    except StopIteration as stop:
      return stop.value
