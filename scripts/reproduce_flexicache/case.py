"""What an item of the paper is run on: traces of what heads choose, or a shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eval.results import Row, device_kind, make_row
from kvjax.config import ModelConfig
from kvjax.profiling import head_stability
from kvjax.sim import Machine
from scripts.page_traces import Trace


class Serving(NamedTuple):
  """Requests to a machine that is simulated.

  Attributes:
    machine: from `kvjax.sim.hardware`.
    slots: requests that are decoded at once.
    requests: how many there are.
    prompt_tokens: least and most of a prompt, each number as likely as the others.
    output_lengths: of answers, where all requests have the same.
    output_tokens: least and most of an answer, where they differ.
    rates: requests that arrive in a second (a Poisson process).
    promoted_ratio: of a stable head's budget, what a ranking brings from the host.
    seed: of lengths and arrivals.
  """

  machine: Machine
  slots: int
  requests: int
  prompt_tokens: tuple[int, int]
  output_lengths: tuple[int, ...]
  output_tokens: tuple[int, int]
  rates: tuple[float, ...]
  promoted_ratio: float
  seed: int


class Case(NamedTuple):
  """A model, and what its heads did.

  Attributes:
    model: its name.
    config: its shape.
    traces: of several texts; none for items that need only the shape.
    budgets: numbers of pages K.
    page_size: C.
    fraction: of the heads that are unstable.
    period: steps between two rankings of the others.
    store: where KV lives, of `memory`.
    contexts: tokens of a row, of `memory`.
    serving: requests, of `throughput` and `online`.
    answered: rows of `eval.run_*`, of `accuracy`.
  """

  model: str
  config: ModelConfig
  traces: tuple[Trace, ...]
  budgets: tuple[int, ...]
  page_size: int
  fraction: float
  period: int
  store: str
  contexts: tuple[int, ...]
  serving: Serving | None = None
  answered: tuple[Row, ...] = ()

  @property
  def num_heads(self) -> int:
    """All KV heads, L * K."""
    return self.config.num_layers * self.config.num_kv_heads

  @property
  def num_unstable(self) -> int:
    """M, the fraction of them, rounded."""
    return round(self.fraction * self.num_heads)

  @property
  def texts(self) -> tuple[str, ...]:
    """Names of the texts, in order."""
    return tuple(dict.fromkeys(trace.name for trace in self.traces))


def scores_of(case: Case, pages: int, text: str | None = None) -> np.ndarray:
  """f64[windows, L*K], instability in every window, of all texts or one."""
  return np.concatenate(
    [
      head_stability.instability(trace.chosen[pages], trace.pages, case.period).reshape(
        -1, case.num_heads
      )
      for trace in case.traces
      if text in (None, trace.name)
    ]
  )


def unstable_mask(case: Case, pages: int, text: str | None = None) -> np.ndarray:
  """bool[L, K], by all texts together or one."""
  mask = np.zeros(case.num_heads, bool)
  mask[head_stability.unstable_heads(scores_of(case, pages, text), case.num_unstable)] = True
  return mask.reshape(case.config.num_layers, case.config.num_kv_heads)


def groups_of(case: Case, pages: int) -> list[tuple[str, np.ndarray]]:
  """Stable and unstable heads as masks bool[L, K], those that there are."""
  unstable = unstable_mask(case, pages)
  both = [("stable", ~unstable), ("unstable", unstable)]
  return [(name, mask) for name, mask in both if mask.any()]


def row_of(case: Case, item: str, pages: int, **more: Any) -> Row:
  """The fields of a row that say what was run, and more of the item's own."""
  lengths = [trace.about["prompt_tokens"] for trace in case.traces]
  row = make_row(
    model=case.model,
    policy="flexicache",
    budget_tokens=pages * case.page_size,
    page_size=case.page_size,
    batch_size=1,
    device=device_kind(),
    task=f"flexicache_{item}",
    prompt_tokens=max(lengths, default=None),
    output_tokens=min((len(trace.mass) for trace in case.traces), default=None),
    simulated=False,
  )
  return row | more


def mean_of(rows: Sequence[Row], name: str, **wanted: Any) -> float | None:
  """The mean of a field over the rows that have these values; None without any."""
  found = [
    row[name]
    for row in rows
    if row[name] is not None and all(row[key] == value for key, value in wanted.items())
  ]
  return float(np.mean(found)) if found else None
