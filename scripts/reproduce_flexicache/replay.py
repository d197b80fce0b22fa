"""Rules of when to rank, played over a trace: what each head would have attended to and moved.

A trace says what every head would choose at every step, so that a rule is played without the model.
Two things differ from the policies: queries are those of dense attention, whatever a rule would
have left out before; and pages born since a list was made come on top of it, as a trace does not
say which page of a list is its worst.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.policies.flexicache_adaptive import next_period
from scripts.page_traces import Trace

Missing = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


class Replay(NamedTuple):
  """What a rule does in the S steps of a trace.

  Attributes:
    used: bool[S, L, K, P], the pages that each head attends to.
    ranked: bool[S, L, K], where it is ranked.
  """

  used: np.ndarray
  ranked: np.ndarray


def fixed(trace: Trace, pages: int, period: int) -> Replay:
  """`flexicache`: at step 1 and every period-th, the list used from the next step on. With a period
  of 1 at once, which is also what an unstable head does."""
  chosen, steps = trace.chosen[pages], 1 + np.arange(len(trace.mass))
  made = steps if period == 1 else np.maximum((steps - 1) // period * period, 1)
  used = chosen[made - 1] | _born(trace.pages[made - 1], trace.pages, chosen.shape[-1])
  ranked = (steps == 1) | (steps % period == 0)
  return Replay(used, np.broadcast_to(ranked[:, None, None], chosen.shape[:3]))


def adaptive(
  trace: Trace, pages: int, missing: Missing, bound: float, shortest: int = 1, longest: int = 64
) -> Replay:
  """`flexicache_adaptive`.

  Args:
    trace: what heads choose.
    pages: K.
    missing: `missing(step, fresh, older) -> f64[L, K]`, what the older lists, bool[L, K, P], are
      held to lack beside the fresh ones; `promised` is the policy's own.
    bound: how much of it they may lack.
    shortest: steps between two rankings, at least.
    longest: at most.
  """
  chosen = trace.chosen[pages]
  place, listed = np.arange(chosen.shape[-1]), np.zeros_like(chosen[0])
  known, period, length = (np.zeros(chosen.shape[1:3], int) for _ in range(3))
  used, ranked = [], []
  for step, there in enumerate(trace.pages):
    tokens = trace.about["prompt_tokens"] + step + 1
    older = listed | ((place >= known[..., None]) & (place < there))
    due = tokens % np.maximum(period, 1) == 0
    good = missing(step, chosen[step], older) <= bound
    last = jnp.asarray(period), jnp.asarray(tokens - length), jnp.asarray(good)
    found = np.asarray(next_period(*last, shortest, longest))
    listed = np.where(due[..., None], chosen[step], listed)
    used.append(np.where(due[..., None], chosen[step], older))
    ranked.append(due)
    period, length = np.where(due, found, period), np.where(due, tokens, length)
    known = np.where(due, there, known)
  return Replay(np.stack(used), np.stack(ranked))


def of_shares(shares: np.ndarray) -> Missing:
  """By shares f16[S, L, K, P]: those that page scores promise, or the attention itself."""
  return lambda step, fresh, older: on(shares[step], fresh) - on(shares[step], older)


def of_pages(trace: Trace) -> Missing:
  """By the number of pages: 1 less the overlap beyond chance."""

  def missing(step: int, fresh: np.ndarray, older: np.ndarray) -> np.ndarray:
    count = fresh.sum(axis=-1)
    chance = count / trace.pages[step]
    return 1 - ((fresh & older).sum(axis=-1) / count - chance) / (1 - chance)

  return missing


class Counts(NamedTuple):
  """What a rule costs each head.

  Attributes:
    missed: f64[L, K], attention on what is left out, the mean over steps.
    agreement: f64[L, K], pages of a fresh list that are attended to, of K, the mean over steps.
    promoted: f64[L, K], pages brought to the device in a step, of K, if what is not attended to is
      away; not those that are born.
    ranked: bool[S, L, K].
  """

  missed: np.ndarray
  agreement: np.ndarray
  promoted: np.ndarray
  ranked: np.ndarray


def count(trace: Trace, pages: int, replay: Replay) -> Counts:
  """Counts a replay of K pages; its first step moves nothing, as it follows the prompt."""
  used = replay.used
  missed = 1 - on(trace.mass, used).mean(axis=0)
  agreement = (used & trace.chosen[pages]).sum(axis=-1).mean(axis=0) / pages
  there = np.arange(used.shape[-1]) < trace.pages[:-1, None, None, None]
  promoted = (used[1:] & ~used[:-1] & there).sum(axis=-1) / pages
  return Counts(missed, agreement, promoted.sum(axis=0) / len(used), replay.ranked)


def on(shares: np.ndarray, pages: np.ndarray) -> np.ndarray:
  """f64[...]: the sum of shares[..., P] over pages bool[..., P]."""
  return np.where(pages, shares, 0).sum(axis=-1, dtype=np.float64)


def _born(known: np.ndarray, now: np.ndarray, total: int) -> np.ndarray:
  """bool[S, 1, 1, P]: pages from known i[S] on, under now i[S]."""
  place = np.arange(total)
  born = (place >= known[:, None]) & (place < now[:, None])
  return born[:, None, None]
