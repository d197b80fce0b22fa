"""Times of decode steps of many caches, which take turns on one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from eval import replay
from eval.results import Row, percentiles, recall_fields
from eval.run_throughput import ROUND_STEPS, Lane, add_speedups, advance
from kvjax import make_policy, prepare
from kvjax.engine.generate import check_overflow
from kvjax.stores import traffic
from kvjax.types import Params
from models.panels import for_decode
from scripts.reproduce_opkv.case import Case, cache_config, policy_of, row_of

WARM_UP = 2  # steps that compile, and bring what nothing could have brought before
_NOTHING: dict[str, int] = {}


class Timed(NamedTuple):
  """A cache that decodes, and what it had moved when its first timed step began."""

  lane: Lane
  before: dict[str, int]


def time_stores(case: Case, item: str, batch_size: int, stores: Sequence[str]) -> list[Row]:
  """Rows of dense, and of each policy on each store.

  All rows of a batch read the same text, so that one prefill serves any batch; each has pages of
  its own, and a store knows nothing of what rows have in common. Beside the fields of every row:
  `recall_stall_s`, by how much a step takes longer than the median step of the same policy with
  everything on the device; `agreement_ratio`, in how many steps the likeliest next token is
  dense's.
  """
  pairs = [("dense", "resident")]
  pairs += [(policy, store) for policy in case.policies for store in ("resident", *stores)]
  params = for_decode(case.loaded.params, batch_size)
  lanes = [
    _start(case, batch_size, params, *pair)
    for pair in tqdm(pairs, desc=f"batch {batch_size}: replay, compile", leave=False)
  ]
  timed = case.following[WARM_UP:]
  for done in tqdm(range(0, len(timed), ROUND_STEPS), desc=f"batch {batch_size}", leave=False):
    tokens = timed[done : done + ROUND_STEPS]
    lanes = [one._replace(lane=_forced(one.lane, tokens)) for one in lanes]
  return add_speedups(_rows(case, item, lanes))


def _start(case: Case, batch_size: int, params: Params, spec: str, store: str) -> Timed:
  """A prefilled cache that has made its first steps."""
  policy = make_policy("dense") if spec == "dense" else policy_of(case, spec)
  runner = prepare(case.loaded.model, policy, store, cache_config(case, batch_size))
  prompts = [*case.recording.prompts] * batch_size
  recording = case.recording._replace(prompts=prompts)
  cache = replay.replayed(runner, case.loaded.params, recording)[1]
  lane = Lane(runner, params, cache, cache.lengths, 0.0, (), ())
  lane = _forced(lane, case.following[:WARM_UP])
  return Timed(lane._replace(step_s=(), made=()), traffic.totals(lane.cache) or _NOTHING)


def _forced(lane: Lane, tokens: Sequence[int]) -> Lane:
  """`advance`, given a text instead of what the model says."""
  for token in tokens:
    given = jax.device_put(jnp.full_like(lane.tokens, token), lane.cache.lengths.sharding)
    lane = advance(lane._replace(tokens=given), 1)
  return lane


def _rows(case: Case, item: str, lanes: Sequence[Timed]) -> list[Row]:
  dense = np.array(lanes[0].lane.made)
  resident = {
    lane.runner.policy.name: np.median(lane.step_s)
    for lane, _ in lanes
    if lane.runner.store.name == "resident"
  }
  rows = []
  for lane, before in lanes:
    check_overflow(lane.runner, lane.cache)
    seconds, batch_size = np.array(lane.step_s), len(lane.tokens)
    after = traffic.totals(lane.cache)
    fields = percentiles("tpot_s", lane.step_s)
    if after is not None:
      fields |= recall_fields({name: after[name] - before[name] for name in after}, len(seconds))
      stall = np.maximum(seconds - resident[lane.runner.policy.name], 0).tolist()
      fields |= percentiles("recall_stall_s", stall, (50, 99))
    rows.append(
      row_of(case, lane.runner, item)
      | fields
      | {
        "output_tokens": len(seconds),
        "decode_tokens_per_s": batch_size * len(seconds) / float(seconds.sum()),
        "agreement_ratio": float(np.mean(np.array(lane.made) == dense)),
      }
    )
  return rows


def of_store(rows: Sequence[Row], policy: str, batch_size: int, store: str) -> Row | None:
  """The row of this combination, if there is one."""
  wanted = policy, batch_size, store
  found = [row for row in rows if (row["policy"], row["batch_size"], row["store"]) == wanted]
  return found[0] if found else None


def batches(rows: Sequence[Row], policy: str) -> list[int]:
  """Batch sizes at which a policy was timed."""
  return sorted({row["batch_size"] for row in rows if row["policy"] == policy})


def policies(rows: Sequence[Row]) -> list[str]:
  """The policies of rows but dense, in order."""
  return [name for name in dict.fromkeys(row["policy"] for row in rows) if name != "dense"]
