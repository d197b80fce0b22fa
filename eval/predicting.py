"""What the simulator says of a run that was served for real, told what its operations cost.

    predicted_row(case, measured_setup(case, served), measured)

What is told is seconds of operations: of a start with its chunks and the blocks that it puts back
and attends to, of a step with its rows, its segments and how cold it is, of storing a turn, of a
read with its bytes; by how much computing is slower beside a read, how late the loop wakes, and how
the pace of the machine changes. Each comes from the times of those operations alone, by least
squares, such that all of a kind together take as long as they did.
How long turns wait, for a slot, for the disk and for each other, and with it every latency, is the
simulator's own: the same turns in virtual time, with the scheduler, placement and eviction that
ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from eval.results import Row
from eval.serving import EVICTIONS, Case, Served, Span
from eval.serving_rows import MEANS, case_row, overlap_s
from kvjax.bidaw import DualQueue
from kvjax.cache.contiguous import slot_segments
from kvjax.engine.conversing import stamp_of
from kvjax.engine.kept import keeps_activations
from kvjax.engine.requests import Request
from kvjax.sim import Machine
from kvjax.sim.engine_costs import PACE_S, EngineCosts, coldness, reached_tokens, start_parts
from kvjax.sim.systems import Design, Setup, System

_MOST_LOST = 0.9  # of what is computed beside a read, should few operations say more
_LEAST_TOLD_S = 1e-9  # of a period: less of it is no operation but the rounding of sums
_NO_TIME = 1e18  # a rate at which nothing takes time, and a memory without end


def measured_setup(case: Case, served: Served) -> Setup:
  """The engine and the disk of a run; without reads the disk takes no time."""
  slots = case.runner.decode_config.batch_size
  machine, engine = _measured_disk(case, served), _measured_engine(case, served)
  return Setup(case.loaded.model.config, machine, case.host_bytes, slots, engine)


def at_even_pace(setup: Setup) -> Setup:
  """A setup whose machine is always as fast as in the mean of the run."""
  assert setup.engine is not None
  return setup._replace(engine=setup.engine._replace(pace=()))


class _Operations(NamedTuple):
  """All of one kind.

  Attributes:
    amounts: f[n, m], of what each was.
    begin_s: f[n], of the run.
    seconds: f[n], that each took.
    beside_s: f[n], of them, those beside a read.
  """

  amounts: np.ndarray
  begin_s: np.ndarray
  seconds: np.ndarray
  beside_s: np.ndarray

  def alone_s(self, lost: float) -> np.ndarray:
    """Seconds f[n] that each would have taken without reads."""
    return self.seconds - lost * self.beside_s


def _measured_engine(case: Case, served: Served) -> EngineCosts:
  starts, steps = _starts(case, served), _steps(case, served)
  lost = _lost_beside_read((starts, steps))
  of_start, of_step = (_fitted(kind.amounts, kind.alone_s(lost)) for kind in (starts, steps))
  start_s, chunk_s, restore_s, attend_s = of_start
  step_s, row_s, token_s, cold_s = of_step
  return EngineCosts(
    chunk_tokens=case.runner.chunk_tokens,
    segments=slot_segments(case.runner.decode_config),
    start_s=start_s,
    chunk_s=chunk_s,
    restore_s=restore_s,
    attend_s=attend_s,
    step_s=step_s + served.loop_s / len(served.steps),
    row_s=row_s,
    token_s=token_s,
    cold_s=cold_s,
    store_s=served.stored_s / len(served.starts),
    lost_beside_read=lost,
    wake_s=float(np.mean(served.late_s)) if served.late_s else 0.0,
    pace=_pace((starts, steps), (of_start, of_step), lost),
  )


def _starts(case: Case, served: Served) -> _Operations:
  starts, size = served.starts.values(), case.runner.chunk_tokens
  amounts = [start_parts(size, one.kept, one.past + one.prompt) for one in starts]
  return _operations(served, amounts, [one.span for one in starts])


def _steps(case: Case, served: Served) -> _Operations:
  segments = slot_segments(case.runner.decode_config)
  watched = zip(served.steps, served.longest, served.since, strict=True)
  amounts = [
    (step.amount, reached_tokens(segments, longest), coldness(since))
    for step, longest, since in watched
  ]
  return _operations(served, amounts, served.steps)


def _operations(
  served: Served, amounts: Sequence[tuple[float, ...]], spans: Sequence[Span]
) -> _Operations:
  begin_s, seconds = (
    np.array([getattr(span, name) for span in spans]) for name in ("begin_s", "seconds")
  )
  beside_s = overlap_s(spans, sorted(served.reads))
  return _Operations(np.array(amounts, float), begin_s - served.began_s, seconds, beside_s)


def _lost_beside_read(kinds: Sequence[_Operations]) -> float:
  """Share of the seconds beside reads by which operations took longer than those that were alone.

  It is a ratio of sums, so that all together take as long as they did, however a read that lies
  beside a part of an operation is shared out.
  """
  lost_s = beside_s = 0.0
  for amounts, _, seconds, beside in kinds:
    alone = beside == 0
    if alone.all() or not alone.any():
      continue
    expected_s = _columns(amounts) @ _fitted(amounts[alone], seconds[alone])
    lost_s += np.sum(seconds[~alone] - expected_s[~alone])
    beside_s += np.sum(beside)
  return float(np.clip(lost_s / beside_s, 0.0, _MOST_LOST)) if beside_s else 0.0


def _pace(
  kinds: Sequence[_Operations], fitted: Sequence[list[float]], lost: float
) -> tuple[float, ...]:
  """`EngineCosts.pace`: what operations of each period took, over what is told of them."""
  end_s = max(kind.begin_s[-1] + kind.seconds[-1] for kind in kinds)
  edges = np.arange(0.0, end_s + PACE_S, PACE_S)
  took, told = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
  for kind, costs in zip(kinds, fitted, strict=True):
    took += _in_periods(kind, kind.alone_s(lost), edges)
    told += _in_periods(kind, _columns(kind.amounts) @ costs, edges)
  return tuple(np.divide(took, told, out=np.ones_like(took), where=told > _LEAST_TOLD_S).tolist())


def _in_periods(kind: _Operations, amounts: np.ndarray, edges: np.ndarray) -> np.ndarray:
  """Amounts f[n] by periods f[p] between edges; an operation does as much in every moment."""
  times = np.stack([kind.begin_s, kind.begin_s + kind.seconds], axis=1)
  after = np.cumsum(amounts)
  known = np.stack([after - amounts, after], axis=1)
  return np.diff(np.interp(edges, times.ravel(), known.ravel()))


def _measured_disk(case: Case, served: Served) -> Machine:
  """A machine of which only the disk takes time."""
  reads, read_s, byte_s = served.reads, 0.0, 0.0
  if reads:
    amounts, seconds = ([getattr(read, name) for read in reads] for name in ("amount", "seconds"))
    read_s, byte_s = _fitted(np.array(amounts, float)[:, None], np.array(seconds))
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


def _fitted(amounts: np.ndarray, seconds: np.ndarray) -> list[float]:
  """Seconds of an operation and of each of its amounts, none below 0; their sum is as measured.

  Args:
    amounts: f[n, m], of each operation.
    seconds: f[n], that it took.
  """
  columns = _columns(amounts)
  scale = np.maximum(columns.max(axis=0), 1.0)
  found, _ = nnls(columns / scale, seconds)
  found = found / scale
  return (found * (np.sum(seconds) / np.sum(columns @ found))).tolist()


def _columns(amounts: np.ndarray) -> np.ndarray:
  return np.column_stack([np.ones(len(amounts)), amounts])


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
    "even_pace": not engine.pace,
    "miss_ratio": placement.misses / max(1, placement.hits + placement.misses),
    "disk_read_bytes": system.disk.read_bytes,
    "disk_written_bytes": system.written_bytes,
    "costs": engine._asdict()
    | {"read_s": machine.transfer_s, "read_bytes_per_s": machine.disk_bytes_per_s},
  }
  ratios = {f"{name[5:-2]}_ratio": row[name] / measured[name] for name in MEANS if measured[name]}
  return row | ratios
