"""What the simulator says of a run that was served for real, told what its operations cost.

    predicted_row(case, measured_setup(case, served), measured)

What is told is seconds of operations: of a start with its chunks and restored blocks, of a step
with its rows and tokens, of storing a turn, of a read with its bytes. Each comes from the times of
those operations alone, by least squares, such that all of a kind together take as long as they did.
How long turns wait, for a slot, for the disk and for each other, and with it every latency, is the
simulator's own: the same turns in virtual time, with the scheduler, placement and eviction that
ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from eval.results import Row
from eval.serving import EVICTIONS, Case, Served
from eval.serving_rows import MEANS, case_row
from kvjax.bidaw import DualQueue
from kvjax.engine.conversing import stamp_of
from kvjax.engine.kept import keeps_activations
from kvjax.engine.requests import Request
from kvjax.sim import Machine
from kvjax.sim.engine_costs import EngineCosts, start_parts
from kvjax.sim.systems import Design, Setup, System

_NO_TIME = 1e18  # a rate at which nothing takes time, and a memory without end


def measured_setup(case: Case, served: Served) -> Setup:
  """The engine and the disk of a run; without reads the disk takes no time."""
  slots = case.runner.decode_config.batch_size
  machine, engine = _measured_disk(case, served), _measured_engine(case, served)
  return Setup(case.loaded.model.config, machine, case.host_bytes, slots, engine)


def _measured_engine(case: Case, served: Served) -> EngineCosts:
  chunk_tokens, starts = case.runner.chunk_tokens, list(served.starts.values())
  parts = [start_parts(chunk_tokens, one.kept, one.past + one.prompt) for one in starts]
  start_s, chunk_s, restore_s = _fitted(parts, [one.span.seconds for one in starts])
  rows = [step.amount for step in served.steps]
  step_s, row_s, token_s = _fitted(
    list(zip(rows, served.attended, strict=True)), [step.seconds for step in served.steps]
  )
  return EngineCosts(
    chunk_tokens=chunk_tokens,
    start_s=start_s,
    chunk_s=chunk_s,
    restore_s=restore_s,
    step_s=step_s + served.loop_s / len(rows),
    row_s=row_s,
    token_s=token_s,
    store_s=served.stored_s / len(starts),
  )


def _measured_disk(case: Case, served: Served) -> Machine:
  """A machine of which only the disk takes time."""
  amounts, read_s, byte_s = [(read.amount,) for read in served.reads], 0.0, 0.0
  if amounts:
    read_s, byte_s = _fitted(amounts, [read.seconds for read in served.reads])
  return Machine(
    name="measured",
    source="eval.predicting",
    product_flops_per_s=_NO_TIME,
    attention_flops_per_s=_NO_TIME,
    read_bytes_per_s=_NO_TIME,
    few_rows_bytes_per_s=_NO_TIME,
    link_bytes_per_s=_NO_TIME,
    host_bytes_per_s=_NO_TIME,
    disk_bytes_per_s=1 / max(byte_s, 1 / _NO_TIME),
    device_bytes=_NO_TIME,
    host_bytes=_NO_TIME,
    item_bytes=stamp_of(case.runner).numpy_dtype.itemsize,
    layer_s=0.0,
    transfer_s=read_s,
  )


def _fitted(amounts: Sequence[tuple[int, ...]], seconds: Sequence[float]) -> list[float]:
  """Seconds of an operation and of each of its amounts, none below 0; their sum is as measured.

  Args:
    amounts: of each operation, the same number of them.
    seconds: that it took.
  """
  columns = np.column_stack([np.ones(len(seconds)), np.array(amounts, float)])
  scale = np.maximum(columns.max(axis=0), 1.0)
  found, _ = nnls(columns / scale, np.array(seconds))
  found = found / scale
  return (found * (np.sum(seconds) / np.sum(columns @ found))).tolist()


def predicted_row(case: Case, setup: Setup, measured: Row) -> Row:
  """The simulated row of a case, with the ratio of each mean to that of the measured row."""
  activations, machine, engine = keeps_activations(case.runner), setup.machine, setup.engine
  assert engine is not None
  design = Design(DualQueue[Request], EVICTIONS[case.eviction], as_activations=activations)
  system = System(design, setup)
  finished = list(system.serve(case.turns))
  placement = system.placement
  row = case_row(case, finished) | {
    "simulated": True,
    "miss_ratio": placement.misses / max(1, placement.hits + placement.misses),
    "disk_read_bytes": system.disk.read_bytes,
    "disk_written_bytes": system.written_bytes,
    "costs": engine._asdict()
    | {"read_s": machine.transfer_s, "read_bytes_per_s": machine.disk_bytes_per_s},
  }
  ratios = {f"{name[5:-2]}_ratio": row[name] / measured[name] for name in MEANS if measured[name]}
  return row | ratios
