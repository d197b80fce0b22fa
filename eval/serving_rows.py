"""Rows of served turns, measured or simulated; `eval.run_serving` has their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from eval.results import Row, percentiles, runner_row
from eval.serving import Case, Served, Span
from kvjax.engine.conversing import stamp_of
from kvjax.engine.requests import Finished, Outcome

TIERS = ("host", "disk", "recomputed", "new")
MEANS = ("mean_ttft_s", "mean_tpot_s", "mean_queueing_s", "mean_latency_s")


def measured_row(case: Case, served: Served) -> Row:
  """The row of a run, simulated or not, that has these beside the usual fields.

  * `mean_latency_s`: from arrival to the last token; means are over turns that were answered.
  * `host_turns`, `disk_turns`, `recomputed_turns`, `new_turns`: where histories were when their
    turns started; see `Start.tier`. `miss_ratio`: of the turns with a history, those that found it
    on disk when they arrived.
  * `read_overlap_ratio`: share of the seconds of reads in which the device computed.
  * `ready_wait_s`: longest sleep of the loop while a turn was ready. Besides sleeping, the loop
    could wait for a read only inside of a call of the disk: `disk_call_s` is the longest of them.
  """
  tiers = Counter(start.tier for start in served.starts.values())
  return case_row(case, served.finished) | {
    **{f"{tier}_turns": tiers[tier] for tier in TIERS},
    "miss_ratio": served.misses / max(1, served.hits + served.misses),
    "disk_read_bytes": sum(read.amount for read in served.reads),
    "disk_written_bytes": served.written_bytes,
    "read_overlap_ratio": overlap_ratio(served.reads, computed(served)),
    "ready_wait_s": max((sleep.seconds for sleep in served.sleeps), default=0.0),
    "disk_call_s": served.disk_call_s,
    "disk_faults": len(served.faults),
  }


def case_row(case: Case, finished: Sequence[Finished]) -> Row:
  """What is known of measured and simulated runs alike.

  `slot_busy_ratio` is the share of the seconds of all slots in which they had a turn.

  Raises:
    ValueError: no turn was answered.
  """
  done = [one for one in finished if one.outcome is Outcome.DONE]
  ttft_s, tpot_s, queueing_s = (
    [value for one in done if (value := getattr(one, name)) is not None]
    for name in ("ttft_s", "tpot_s", "queueing_s")
  )
  if not tpot_s:
    raise ValueError("no turn has an answer of two tokens; give more users")
  latency_s = [one.ended_s - one.request.arrival_s for one in done]
  served_s = [one.ended_s - one.started_s for one in done if one.started_s is not None]
  seconds = max(one.ended_s for one in finished)
  means = map(np.mean, (ttft_s, tpot_s, queueing_s, latency_s))
  return runner_row(case.runner, model=case.loaded.name, task="serving") | {
    "eviction": case.eviction,
    "host_bytes": case.host_bytes,
    "tensors": stamp_of(case.runner).tensors,
    "turns": len(done),
    "failed_turns": len(finished) - len(done),
    "seconds": seconds,
    "slot_busy_ratio": sum(served_s) / (seconds * case.runner.decode_config.batch_size),
    **dict(zip(MEANS, map(float, means), strict=True)),
    **percentiles("ttft_s", ttft_s),
    **percentiles("tpot_s", tpot_s),
  }


def turn_line(one: Finished, served: Served) -> Row:
  """The line of a turn: when, from where, and its answer."""
  start = served.starts.get(one.request.id)
  return {
    "id": one.request.id,
    "user": one.request.user,
    "outcome": str(one.outcome),
    "reason": one.reason,
    "tier": start and start.tier,
    "history_tokens": start and start.past,
    "prompt_tokens": len(one.request.prompt),
    "arrival_s": one.request.arrival_s,
    "started_s": one.started_s,
    "first_token_s": one.first_token_s,
    "ended_s": one.ended_s,
    "tokens": list(one.tokens),
  }


def computed(served: Served) -> list[Span]:
  """All spans in which the device computed, which do not overlap, by time."""
  return sorted([*(start.span for start in served.starts.values()), *served.steps])


def overlap_ratio(reads: Sequence[Span], busy: Sequence[Span]) -> float | None:
  """Share of the seconds of reads in which something was busy; None without reads.

  Args:
    reads: in any order.
    busy: that do not overlap, by time.
  """
  total = sum(read.seconds for read in reads)
  return float(overlap_s(reads, busy).sum()) / total if total else None


def overlap_s(spans: Sequence[Span], busy: Sequence[Span]) -> np.ndarray:
  """Seconds f[n] of each span in which something was busy.

  Args:
    spans: n, in any order.
    busy: that do not overlap, by time.
  """
  if not spans or not busy:
    return np.zeros(len(spans))
  begins, ends = (np.array([span[n] for span in busy]) for n in (0, 1))
  before = np.concatenate([[0.0], np.cumsum(ends - begins)])  # busy seconds before each span

  def busy_until(then: np.ndarray) -> np.ndarray:
    last = np.searchsorted(begins, then) - 1  # that had begun; -1 for none
    in_last = np.minimum(then, ends[last]) - begins[last]
    return np.where(last < 0, 0.0, before[last] + in_last)

  begun, ended = (busy_until(np.array([span[n] for span in spans])) for n in (0, 1))
  return ended - begun
