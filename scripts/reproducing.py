"""What a paper and its figures are to `scripts.reproduce`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from eval.results import Row
from models import Loaded

SMALL_MODEL = Path(__file__).resolve().parents[1] / "models" / "small" / "small-llama"


class Comparison(NamedTuple):
  """A number of the paper beside ours.

  Attributes:
    figure: where the paper has it.
    what: what it is.
    paper: the paper's.
    ours: ours.
    reason: why they differ.
  """

  figure: str
  what: str
  paper: str
  ours: str
  reason: str


class Item(NamedTuple):
  """A figure of a paper.

  Attributes:
    run: `run(case) -> rows`, what was measured, each kept as soon as it is there; the case is the
      paper's own.
    plot: `plot(rows, title, path)`, a PNG of it.
    compare: `compare(rows)`, with the paper's numbers.
    columns: fields of the rows that a table shows.
    timed: it takes times; otherwise it counts, and the machine does not matter.
  """

  run: Callable[[Any], Iterable[Row]]
  plot: Callable[[Sequence[Row], str, Path], None]
  compare: Callable[[Sequence[Row]], list[Comparison]]
  columns: tuple[str, ...]
  timed: bool = False


class Started(NamedTuple):
  """An item whose flags were checked, and which has said what it will do.

  Attributes:
    loaded: the model; None where none runs.
    data: name -> sha256 of what is read.
    title: of the plot.
    measure: makes the rows.
  """

  loaded: Loaded | None
  data: Mapping[str, str]
  title: str
  measure: Callable[[], Iterable[Row]]


class Paper(NamedTuple):
  """A paper.

  Attributes:
    items: its figures by name.
    define_flags: flags that it has for itself.
    start: `start(flags, name) -> Started`; what the user gave wrong is a ValueError.
  """

  items: Mapping[str, Item]
  define_flags: Callable[[], None]
  start: Callable[[flags.FlagValues, str], Started]
