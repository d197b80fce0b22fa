"""What an item of the paper is run on: conversations, at one rate or several, and a shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from eval.results import Row, device_kind, make_row
from kvjax.config import ModelConfig
from kvjax.sim import Machine, kv_bytes, trace_statistics
from kvjax.sim.workloads import Workload, users_per_minute


class Case(NamedTuple):
  """Conversations, a shape of model, and memory for histories.

  Attributes:
    model: name of the shape.
    config: the shape.
    workloads: the same conversations or their like at each rate; none where an item needs none.
    host_bytes: memory for histories.
    machine: for times of transfers.
    conversations: how many there are at once, for what is measured by that.
  """

  model: str
  config: ModelConfig
  workloads: tuple[Workload, ...]
  host_bytes: float
  machine: Machine
  conversations: tuple[int, ...] = ()

  @property
  def token_bytes(self) -> int:
    """Keys and values of one token."""
    return kv_bytes(self.config, 1, self.machine.item_bytes)


def distances_of(case: Case, workload: Workload) -> np.ndarray:
  """f64[R], weighted reuse distance of each turn in bytes; nan for first turns."""
  return trace_statistics.reuse_distances(workload, case.config.max_tokens) * case.token_bytes


def row_of(case: Case, item: str, workload: Workload, **more: Any) -> Row:
  """The fields of a row that say what was run, and more of the item's own."""
  row = make_row(
    model=case.model,
    policy="bidaw",
    host_kv_bytes=case.host_bytes,
    device=device_kind(),
    task=f"bidaw_{item}",
    num_examples=len(workload),
    simulated=False,
  )
  return row | {"trace": workload.name, "users_per_minute": users_per_minute(workload)} | more


def label_of(row: Row) -> str:
  """The trace and its rate, for a legend."""
  rate = row["users_per_minute"]
  return row["trace"] if rate is None else f"{row['trace']}, {rate:.3g} users a minute"
