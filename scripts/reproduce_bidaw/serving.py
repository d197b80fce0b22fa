"""Serves a case's workload with a system in virtual time, and makes a row of it. All simulated.

Turns arrive as the workload says, whether or not those before were answered, until no conversation
begins any more; the last 40 % of that time are measured.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from eval.results import Row
from eval.tables import human_bytes
from kvjax.engine.requests import Finished, Outcome
from kvjax.sim.generator import CONTROL, INTERACTIVE
from kvjax.sim.systems import SYSTEMS, Setup, System
from kvjax.sim.workloads import Workload, requests
from scripts.reproduce_bidaw.case import Case, row_of

MEASURED_FROM = 0.6  # of the time in which conversations begin: before, memory and queues fill
SUSTAINED_S = 5.0  # most that the mean latency of a rate that is sustained may be [ours]; `limit_s`
HOPELESS = 20  # times that limit; a system beyond it is not run where it gets harder still
PERCENTILES = (50, 90, 95, 99)
SHARES = tuple(range(0, 101, 5))  # % of turns


class Turns(NamedTuple):
  """Turns that were measured, as columns: f64[N] seconds, i64[N] users."""

  user: np.ndarray
  latency_s: np.ndarray
  ttft_s: np.ndarray
  queueing_s: np.ndarray


class Counted(NamedTuple):
  """What a system has counted at some time."""

  hits: int
  misses: int
  read_bytes: int
  written_bytes: int
  rewritten_bytes: int


def run(case: Case, workload: Workload, name: str, item: str) -> Row:
  """A row of one system on one workload; the same arguments make the same one, and once only."""
  return _run(case, workload, name) | {"task": f"bidaw_{item}"}


@functools.lru_cache(maxsize=64)
def _run(case: Case, workload: Workload, name: str) -> Row:
  end = float(workload.arrival_s[workload.previous < 0][-1])
  begin = MEASURED_FROM * end
  system = System(SYSTEMS[name], Setup(case.config, case.machine, int(case.host_bytes)))
  columns, before, after, failed = [], _count(system), _count(system), 0
  asked = requests(workload, case.config.max_tokens)
  for one in system.serve(itertools.takewhile(lambda one: one.arrival_s <= end, asked)):
    if one.ended_s <= begin:
      before = _count(system)
    if one.ended_s <= end:
      after = _count(system)
    failed += one.outcome is not Outcome.DONE
    if one.outcome is Outcome.DONE and one.request.arrival_s >= begin:
      columns.append(_times(one))
  if not columns:
    raise ValueError(f"{workload.name} is too short: no turn arrives in what is measured of it")
  turns = Turns(*map(np.array, zip(*columns, strict=True)))
  counted = Counted(*(late - early for late, early in zip(after, before, strict=True)))
  return (
    _row(case, workload, name)
    | _fields(turns)
    | {
      "failed": failed,
      "miss_ratio": counted.misses / max(1, counted.hits + counted.misses),
      "measured_s": end - begin,
      "ssd_read_bytes": counted.read_bytes,
      "ssd_written_bytes": counted.written_bytes,
      "ssd_rewriting_amplification": counted.rewritten_bytes / max(1, counted.written_bytes),
    }
  )


def _row(case: Case, workload: Workload, name: str) -> Row:
  """What was run, without what came of it."""
  return row_of(case, "serving", workload, system=name, mean_latency_s=None) | {
    "policy": f"bidaw_{name}",
    "simulated": True,
    "device": case.machine.name,
    "ssd_gb_per_second": case.machine.disk_bytes_per_s / 1e9,
  }


def _times(one: Finished) -> tuple[int, float, float, float]:
  assert one.ttft_s is not None and one.queueing_s is not None
  request = one.request
  return request.user, one.ended_s - request.arrival_s, one.ttft_s, one.queueing_s


def _count(system: System) -> Counted:
  placement = system.placement
  return Counted(
    placement.hits,
    placement.misses,
    system.disk.read_bytes,
    system.written_bytes,
    system.rewritten_bytes,
  )


def _fields(turns: Turns) -> Row:
  """Fairness is Jain's index of the users' mean latencies: 1 if all wait equally long."""
  _, place = np.unique(turns.user, return_inverse=True)
  means = np.bincount(place, turns.latency_s) / np.bincount(place)
  return {
    "measured": len(turns.user),
    "mean_latency_s": float(turns.latency_s.mean()),
    "mean_ttft_s": float(turns.ttft_s.mean()),
    "mean_queueing_s": float(turns.queueing_s.mean()),
    "p50_queueing_s": float(np.percentile(turns.queueing_s, 50)),
    "p90_queueing_s": float(np.percentile(turns.queueing_s, 90)),
    "queueing_ratio": float(turns.queueing_s.sum() / turns.latency_s.sum()),
    "fairness": float(means.sum() ** 2 / (len(means) * (means**2).sum())),
    "queueing_by_share": np.percentile(turns.queueing_s, SHARES).tolist(),
  } | {f"p{at}_latency_s": float(np.percentile(turns.latency_s, at)) for at in PERCENTILES}


def limit_s(trace: str) -> float:
  """The most that mean latency may be: 5 s; for the control's longer answers as much a token."""
  tokens = {profile.name: profile.answer_tokens for profile in (INTERACTIVE, CONTROL)}
  return SUSTAINED_S * tokens.get(trace, INTERACTIVE.answer_tokens) / INTERACTIVE.answer_tokens


def curve(rows: Iterable[Row], name: str) -> tuple[list[float], list[float]]:
  """Rates and mean latencies of a system where it was run, by rate."""
  points = sorted(
    (row["users_per_minute"] or 0.0, row["mean_latency_s"])
    for row in rows
    if row["system"] == name and row["mean_latency_s"] is not None
  )
  return [rate for rate, _ in points], [seconds for _, seconds in points]


def sustained(
  rates: Sequence[float], seconds: Sequence[float], limit: float = SUSTAINED_S
) -> tuple[float, str]:
  """The rate at which mean latency reaches the limit, and in words.

  Between two rates its logarithm is taken as linear; 0 where there are none.
  """
  if not rates:
    return 0.0, "not run"
  above = next((n for n, one in enumerate(seconds) if one > limit), None)
  if above is None:
    return rates[-1], f"{rates[-1]:.3g} or more"
  if above == 0:
    return rates[0], f"under {rates[0]:.3g}"
  low, high = math.log(seconds[above - 1]), math.log(seconds[above])
  share = (math.log(limit) - low) / (high - low)
  rate = rates[above - 1] + share * (rates[above] - rates[above - 1])
  return rate, f"{rate:.3g}"


def at_rate(rates: Sequence[float], seconds: Sequence[float], rate: float) -> float:
  """Mean latency at a rate between two, linear in its logarithm; that of the end beyond it."""
  place = bisect.bisect_left(rates, rate)
  if place in (0, len(rates)):
    return seconds[min(place, len(rates) - 1)]
  share = (rate - rates[place - 1]) / (rates[place] - rates[place - 1])
  return math.exp((1 - share) * math.log(seconds[place - 1]) + share * math.log(seconds[place]))


def at_rates(case: Case) -> list[tuple[Case, Workload]]:
  """The points of a case whose workloads differ by rate."""
  return [(case, workload) for workload in case.workloads]


def at_highest_rate(rows: Sequence[Row]) -> dict[str, Row]:
  """The last row of each system, without systems that were not run there."""
  last = rows[-1]["users_per_minute"]
  return {
    row["system"]: row
    for row in rows
    if row["users_per_minute"] == last and row["mean_latency_s"] is not None
  }


def is_hopeless(row: Row) -> bool:
  """Whether a system is not to be run where it gets harder still."""
  seconds = row["mean_latency_s"]
  return seconds is None or seconds > HOPELESS * limit_s(row["trace"])


def every(
  points: Iterable[tuple[Case, Workload]],
  names: Sequence[str],
  item: str,
  hopeless: Collection[str] = (),
) -> list[Row]:
  """A row of each system at each point.

  A system whose mean latency has passed 20 times the limit has rows without a latency from there
  on: its queue grows as long as a run, and so does what it takes to serve it.

  Args:
    points: from the easiest to the hardest.
    names: of systems.
    item: of the rows.
    hopeless: systems that are not run at all.
  """
  rows, out = [], {*hopeless}
  for case, workload in points:
    for name in names:
      if name in out:
        row = _row(case, workload, name) | {"task": f"bidaw_{item}"}
      else:
        row = run(case, workload, name, item)
        if is_hopeless(row):
          out.add(name)
      _tell(row)
      rows.append(row)
  return rows


def _tell(row: Row) -> None:
  """One line, since a run takes a while."""
  seconds = row["mean_latency_s"]
  text = (
    f"not run, as its mean has passed {HOPELESS * limit_s(row['trace']):.3g} s"
    if seconds is None
    else f"{seconds:.2f} s, {row['miss_ratio']:.2f} misses"
  )
  print(
    f"{row['users_per_minute'] or 0:.3g} users a minute, {human_bytes(row['host_kv_bytes'])}, "
    f"{row['ssd_gb_per_second']:.3g} GB/s, {row['system']}: {text}",
    flush=True,
  )
