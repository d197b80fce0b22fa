"""Computes batches of what lm-evaluation-harness asks, into lines with answers and times.

A line here lacks what all lines of one model have in common (`eval.lines`). Its `answer` is a text,
or a log-likelihood and whether no other continuation was more likely token by token.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval import scoring
from eval.lines import Line
from eval.lm_requests import Rules, Span, Text, Tokens
from kvjax import KVCache, Runner, Sampling
from kvjax.engine import steps
from kvjax.engine.generate import check_overflow
from models import Loaded
from models.tokenizer import Tokenizer

_copy = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache))


class Machine(NamedTuple):
  """A model on a runner.

  Attributes:
    loaded: the model.
    runner: with room for all that is asked.
    compile_s: seconds that were taken to compile what makes texts with a sampling, or what scores
      (None); filled as needed.
  """

  loaded: Loaded
  runner: Runner
  compile_s: dict[Sampling | None, float]

  @property
  def batch_size(self) -> int:
    """Rows that are computed together."""
    return self.runner.prefill_config.batch_size


def scored(
  machine: Machine, batch: Sequence[Sequence[Span]], known: Collection[str]
) -> Iterator[list[Line]]:
  """Yields the lines of spans, those that were computed together in one list.

  First comes the first span of each prompt, then the second of those that have one, and so on.
  The prefill counts for the first.

  Args:
    machine: what computes.
    batch: the spans of each prompt; as many prompts as rows, or fewer.
    known: ids of spans; where there are no others in a round, it is left out.
  """
  rounds = [list(filter(None, spans)) for spans in itertools.zip_longest(*batch)]
  left = [place for place, spans in enumerate(rounds) if _missing(spans, known)]
  if not left:
    return
  _compile(machine, None)
  prompts = [spans[0].prompt for spans in batch]
  last, cache, prefill_s = _prefill(machine, prompts)
  for place in left:
    rests = {span.prompt: span.rest for span in rounds[place]}
    rows = [rests.get(prompt, ()) for prompt in prompts]
    rows += [()] * (machine.batch_size - len(rows))
    kept = cache if place == left[-1] else jax.block_until_ready(_copy(cache))
    scores = scoring.follow(machine.runner, machine.loaded.params, last, kept, rows)
    found = dict(zip(prompts, zip(scores.log_probs, scores.greedy, strict=True), strict=False))
    ttft_s = None if place else prefill_s + scores.first_s
    yield [
      _line(span, _likelihood(*found[span.prompt], span.wanted), len(span.rest))
      | _times(rounds[place], ttft_s, scores.step_s)
      for span in rounds[place]
    ]


def generated(
  machine: Machine, batch: Sequence[Text], known: Collection[str]
) -> Iterator[list[Line]]:
  """Yields the lines of texts, all in one list.

  Args:
    machine: what computes.
    batch: of one kind of rules; as many texts as rows, or fewer.
    known: ids of texts; nothing is yielded where there are no others.
  """
  if not _missing(batch, known):
    return
  rules, tokenizer = batch[0].rules, machine.loaded.tokenizer
  assert tokenizer is not None
  _compile(machine, rules.sampling)
  made: list[list[int]] = [[] for _ in batch]
  stopped = [False] * len(batch)
  going = set(range(len(batch)))
  seconds: list[float] = []
  for tokens, second in _tokens(machine, batch, rules.sampling):
    seconds.append(second)
    for row in list(going):
      made[row].append(int(tokens[row]))
      stopped[row] = _ended(made[row], rules, tokenizer)
      if stopped[row] or len(made[row]) == rules.new_tokens:
        going.remove(row)
    if not going:
      break
  ttft_s, *step_s = seconds
  yield [
    _line(text, _said(ids, rules, tokenizer), len(ids) - ended, stopped=ended)
    | _times(batch, ttft_s, step_s)
    for text, ids, ended in zip(batch, made, stopped, strict=True)
  ]


def _tokens(
  machine: Machine, batch: Sequence[Text], sampling: Sampling
) -> Iterator[tuple[np.ndarray, float]]:
  """Without end: the next token of every row, i32[B], and its wall seconds; the first with those of
  the prefill."""
  runner, params = machine.runner, machine.loaded.params
  last, cache, prefill_s = _prefill(machine, [text.prompt for text in batch])
  begin = time.perf_counter() - prefill_s
  seeds = [text.seed for text in batch]
  filled = np.array([*seeds, *[0] * (machine.batch_size - len(seeds))], np.uint32)
  key = jax.vmap(jax.random.key)(filled)
  tokens = steps.first_token(runner, sampling, params, last, key, cache.lengths)
  while True:
    made = jax.device_get(tokens)
    check_overflow(runner, cache)
    yield made, time.perf_counter() - begin
    begin = time.perf_counter()
    tokens, cache = steps.next_token(runner, sampling, params, cache, tokens, key)


def _compile(machine: Machine, sampling: Sampling | None) -> None:
  """Compiles what makes texts with a sampling, or what scores, unless it was before."""
  if sampling in machine.compile_s:
    return
  begin = time.perf_counter()
  if sampling is None:
    scoring.warm_up(machine.runner, machine.loaded.params)
  else:
    for _ in itertools.islice(_tokens(machine, [], sampling), 2):
      pass
  machine.compile_s[sampling] = time.perf_counter() - begin


def _prefill(machine: Machine, prompts: Sequence[Tokens]) -> tuple[jax.Array, KVCache, float]:
  """Prefills a batch, with rows of one token where it is not full; see `scoring.start`."""
  rows = [*prompts, *[(0,)] * (machine.batch_size - len(prompts))]
  return scoring.start(machine.runner, machine.loaded.params, rows)


def _likelihood(log_probs: np.ndarray, greedy: np.ndarray, wanted: int) -> list[float | bool]:
  """Of the last tokens, as many as are wanted."""
  start = len(log_probs) - wanted
  found = float(log_probs[start:].sum(dtype=np.float64))
  if not math.isfinite(found):
    raise ValueError("the policy gave logits that are not finite")
  return [found, bool(greedy[start:].all())]


def _ended(ids: Sequence[int], rules: Rules, tokenizer: Tokenizer) -> bool:
  text = tokenizer.decode(ids) if rules.until else ""
  return ids[-1] in rules.stop_ids or any(one in text for one in rules.until)


def _said(ids: Sequence[int], rules: Rules, tokenizer: Tokenizer) -> str:
  text = tokenizer.decode(ids[:-1] if ids[-1] in rules.stop_ids else ids)
  for one in rules.until:
    text = text.partition(one)[0]
  return text


def _line(asked: Span | Text, answer: Any, output_tokens: int, *, stopped: bool = False) -> Line:
  return {
    "id": asked.id,
    "answer": answer,
    "stopped": stopped,
    "prompt_tokens": len(asked.prompt),
    "output_tokens": output_tokens,
  }


def _times(batch: Sequence[Span | Text], ttft_s: float | None, step_s: Sequence[float]) -> Line:
  """What lines share that were computed together."""
  return {
    "ttft_s": ttft_s,
    "step_s": [round(second, 6) for second in step_s],
    "batch": batch[0].id,
  }


def _missing(asked: Iterable[Span | Text], known: Collection[str]) -> bool:
  return any(one.id not in known for one in asked)
