"""What the simulator says of a run that was served for real, from three numbers of that run.

    predicted_row(case, measured_machine(case, served))

The numbers are the mean seconds of a start, of a step, and of a byte that is read from disk. The
machine that is made of them computes at one rate and has a time of every layer, such that all
starts and all steps of the run together take as long as they did; everything else takes no time.
Who is served, read and evicted when, and so how long turns wait, is the simulator's own: the same
turns in virtual time, with the scheduler, placement and eviction that ran.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from eval.results import Row
from eval.serving import EVICTIONS, Case, Served
from eval.serving_rows import MEANS, case_row
from kvjax.bidaw import DualQueue
from kvjax.engine.conversing import stamp_of
from kvjax.engine.requests import Request
from kvjax.sim import Machine, costs
from kvjax.sim.systems import Design, Setup, System

_NO_TIME = 1e18  # a rate at which nothing takes time, and a memory without end


def measured_machine(case: Case, served: Served) -> Machine:
  """The machine of a run, or the nearest where none takes exactly as long; without reads its disk
  takes no time."""
  config = case.loaded.model.config
  head = costs.head_numbers(config)
  weights = config.num_layers * costs.layer_numbers(config)
  read = sum(one.lost + one.prompt for one in served.starts.values())
  rows = sum(step.amount for step in served.steps)
  starts, steps = len(served.starts), len(served.steps)
  flops = 2 * np.array([weights * read + head * starts, (weights + head) * rows])
  layers = config.num_layers * np.array([starts, steps])
  took_s = np.array(
    [
      sum(one.span.seconds for one in served.starts.values()),
      sum(step.seconds for step in served.steps),
    ]
  )
  (flop_s, layer_s), _ = nnls(np.stack([flops, layers], axis=1), took_s)
  reading_s = sum(one.seconds for one in served.reads)
  return Machine(
    name="measured",
    source="eval.predicting",
    product_flops_per_s=float(1 / max(flop_s, 1 / _NO_TIME)),
    attention_flops_per_s=_NO_TIME,
    read_bytes_per_s=_NO_TIME,
    few_rows_bytes_per_s=_NO_TIME,
    link_bytes_per_s=_NO_TIME,
    host_bytes_per_s=_NO_TIME,
    disk_bytes_per_s=sum(one.amount for one in served.reads) / reading_s if reading_s else _NO_TIME,
    device_bytes=_NO_TIME,
    host_bytes=_NO_TIME,
    item_bytes=stamp_of(case.runner).numpy_dtype.itemsize,
    layer_s=float(layer_s),
    transfer_s=0.0,
  )


def predicted_row(case: Case, machine: Machine, measured: Row) -> Row:
  """The simulated row of a case, with the ratio of each mean to that of the measured row."""
  slots = case.runner.decode_config.batch_size
  setup = Setup(case.loaded.model.config, machine, case.host_bytes, slots)
  system = System(Design(DualQueue[Request], EVICTIONS[case.eviction]), setup)
  finished = list(system.serve(case.turns))
  placement = system.placement
  row = case_row(case, finished) | {
    "simulated": True,
    "miss_ratio": placement.misses / max(1, placement.hits + placement.misses),
    "disk_read_bytes": system.disk.read_bytes,
    "disk_written_bytes": system.written_bytes,
    "machine": machine._asdict(),
  }
  ratios = {f"{name[5:-2]}_ratio": row[name] / measured[name] for name in MEANS if measured[name]}
  return row | ratios
