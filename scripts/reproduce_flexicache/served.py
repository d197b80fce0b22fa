"""Requests served by a machine that is simulated, dense and under FlexiCache."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from eval.results import Row
from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.engine.serving import serve
from scripts.reproduce_flexicache import case as cases
from scripts.reproduce_flexicache.case import Case, Serving
from scripts.reproduce_flexicache.simulated import TieredBackend, Tiers


class Served(NamedTuple):
  """What became of requests.

  Attributes:
    done: in the order in which they ended.
    backend: what it counted.
    seconds: from the first arrival to the last token.
  """

  done: list[Finished]
  backend: TieredBackend
  seconds: float


def serving_of(case: Case) -> Serving:
  """The case's requests."""
  assert case.serving is not None, "items that serve are started with requests"
  return case.serving


def together(serving: Serving, output_tokens: int) -> list[Request]:
  """All requests at once, with answers of the same length."""
  rng = random.Random(serving.seed)
  sizes = [rng.randint(*serving.prompt_tokens) for _ in range(serving.requests)]
  return [Request(number, (0,) * size, output_tokens) for number, size in enumerate(sizes)]


def one_by_one(serving: Serving, rate: float) -> Iterator[Request]:
  """Requests that arrive in a Poisson process, with answers of any length."""
  rng, now = random.Random(serving.seed), 0.0
  for number in range(serving.requests):
    now += rng.expovariate(1) / rate  # the same requests at every rate, closer together
    prompt, answer = rng.randint(*serving.prompt_tokens), rng.randint(*serving.output_tokens)
    yield Request(number, (0,) * prompt, answer, arrival_s=now)


def run(case: Case, requests: Iterable[Request], tiers: Tiers | None) -> Served:
  """Serves them.

  Raises:
    ValueError: one of them is too long for model or machine.
  """
  serving, clock = serving_of(case), VirtualClock()
  backend = TieredBackend(case.config, serving.machine, serving.slots, tiers)
  done = list(serve(requests, backend, clock))
  failed = next((one for one in done if one.outcome is not Outcome.DONE), None)
  if failed is not None:
    raise ValueError(f"request {failed.request.id} of {failed.reason}; ask for shorter ones")
  return Served(done, backend, clock.now())


def tiers_of(case: Case, pages: int, *, sits_out: bool = True) -> Tiers:
  """FlexiCache as the case has it, with a budget of so many pages."""
  return Tiers(
    pages * case.page_size,
    case.page_size,
    case.fraction,
    case.period,
    serving_of(case).promoted_ratio,
    sits_out,
  )


def row_of(case: Case, item: str, tiers: Tiers | None, served: Served) -> Row:
  """The fields that items have in common.

  Beside the usual ones: `tokens_per_s`, of prompts and answers, which is what the original's
  benchmark counts; `rows_per_step`; `sat_out_ratio`, steps that rows sat out, of all that they
  could have taken part in; `token_s`, between two tokens of a row, and `reloaded_token_s` where
  the second one needed what a ranking had promoted; `reload_s`, until that was there.
  """
  backend, serving = served.backend, serving_of(case)
  prompts = [len(one.request.prompt) for one in served.done]
  made = [len(one.tokens) for one in served.done]
  sat_out = sum(one.sat_out for one in served.done)
  row = cases.row_of(case, item, tiers.budget_tokens // case.page_size if tiers else 0)
  if tiers is None:
    row |= {"policy": "dense", "budget_tokens": None}
  row |= {
    "device": serving.machine.name,
    "simulated": True,
    "batch_size": serving.slots,
    "num_examples": len(prompts),
    "prompt_tokens": max(prompts),
    "output_tokens": max(made),
    "decode_tokens_per_s": sum(made) / served.seconds,
    "tokens_per_s": (sum(prompts) + sum(made)) / served.seconds,
    "rows_per_step": backend.rows / backend.steps,
    "sat_out_ratio": sat_out / (sat_out + backend.rows),
  }
  for name in ("token_s", "reloaded_token_s", "reload_s"):
    values = getattr(backend, name.replace("_token", ""))
    row |= {f"{name}_p{q}": float(np.percentile(values, q)) if values else None for q in (50, 99)}
  return row
