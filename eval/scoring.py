"""How likely a model finds a text, when a policy decides what every step attends to.

The beginning of the text is prefilled, densely, as it is before generation. Every token after it is
then given to the model one by one, and the logits of each step are asked for the token that really
follows. The steps run in blocks inside one jitted function, so that the host does not wait for
every one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import KVCache, Runner, decode_step
from kvjax.engine.generate import Progress, check_overflow, prefill
from kvjax.types import Params

BLOCK = 64  # steps of one call


class Scores(NamedTuple):
  """What the tokens of each row got.

  Attributes:
    log_probs: natural logarithms, f32[tokens] a row.
    greedy: bool[tokens] a row, whether no other token was more likely.
    step_s: wall seconds of each decode step, those of a block being equal.
    first_s: wall seconds of the first token, behind the prefill.
  """

  log_probs: list[np.ndarray]
  greedy: list[np.ndarray]
  step_s: list[float]
  first_s: float


def start(
  runner: Runner,
  params: Params,
  prompts: Sequence[Sequence[int]],
  progress: Progress = lambda phase, done, total: None,
) -> tuple[jax.Array, KVCache, float]:
  """What `kvjax.engine.generate.prefill` gives, all of it computed, and its wall seconds."""
  begin = time.perf_counter()
  made = jax.block_until_ready(prefill(runner, params, prompts, progress))
  return *made, time.perf_counter() - begin


def warm_up(runner: Runner, params: Params) -> float:
  """Seconds that it takes to compile a runner and to prefill one chunk."""
  begin = time.perf_counter()
  batch = runner.prefill_config.batch_size
  last, cache, _ = start(runner, params, [[0]] * batch)
  jax.block_until_ready(_first(runner, params, last, np.zeros(batch, np.int32)))
  jax.block_until_ready(_block(runner, params, cache, _tokens([[0]] * batch, 1 + BLOCK), 0))
  return time.perf_counter() - begin


def follow(
  runner: Runner,
  params: Params,
  last: jax.Array,
  cache: KVCache,
  rows: Sequence[Sequence[int]],
  progress: Callable[[int], None] = lambda done: None,
) -> Scores:
  """Scores what follows a prompt.

  The first token of a row is scored by the prefill's own logits; the policy has a say from the
  second on. Rows that are shorter than the longest go on with tokens that nobody asks about.

  Args:
    runner: with room for the prompt and the longest row.
    params: weights.
    last: f[B, E], as the cache from `start`.
    cache: is donated.
    rows: token ids, one list a row of the batch, which may be empty.
    progress: is given the number of steps done after each block.

  Raises:
    ValueError: the policy or the cache has no room for so many tokens.
  """
  steps = max(map(len, rows)) - 1
  tokens = _tokens(rows, 1 + max(-(-steps // BLOCK), 0) * BLOCK)
  begin = time.perf_counter()
  found = [jax.device_get(_first(runner, params, last, tokens[:, 0]))]
  first_s = time.perf_counter() - begin
  step_s: list[float] = []
  for start in range(0, steps, BLOCK):
    count, begin = min(BLOCK, steps - start), time.perf_counter()
    *scored, cache = _block(runner, params, cache, tokens[:, start : start + BLOCK + 1], count)
    found.append(jax.device_get(scored))
    step_s += [(time.perf_counter() - begin) / count] * count
    progress(start + count)
  try:
    check_overflow(runner, cache)
  except RuntimeError as error:  # here it is the user who asked for so many
    raise ValueError(str(error)) from error
  log_probs, greedy = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
  return Scores(_cut(log_probs, rows), _cut(greedy, rows), step_s, first_s)


def _tokens(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
  """i32[B, width]: the rows, filled up with zeros."""
  tokens = np.zeros((len(rows), width), np.int32)
  for place, row in enumerate(rows):
    tokens[place, : len(row)] = row
  return tokens


def _cut(found: np.ndarray, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
  return [one[: len(row)] for one, row in zip(found, rows, strict=True)]


@partial(jax.jit, static_argnums=0)
def _first(
  runner: Runner, params: Params, last: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """f32[B, 1] and bool[B, 1] of the first token after a prompt."""
  log_probs, greedy = _score(runner.model.unembed(params, last), wanted)
  return log_probs[:, None], greedy[:, None]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _block(
  runner: Runner, params: Params, cache: KVCache, tokens: jax.Array, steps: jax.Array
) -> tuple[jax.Array, jax.Array, KVCache]:
  """The first so many steps of a block: each is given token i and scores token i + 1.

  Args:
    runner: static.
    params: weights.
    cache: is donated.
    tokens: i32[B, BLOCK + 1].
    steps: i32[], at most BLOCK. Not static, so that a block of any length is compiled once.

  Returns:
    Log-probabilities f32[B, BLOCK], greedy bool[B, BLOCK], and the cache.
  """

  def step(index, carried):
    log_probs, greedy, cache = carried
    logits, cache = decode_step(runner, params, cache, tokens[:, index])
    scored = _score(logits, tokens[:, index + 1])
    return log_probs.at[:, index].set(scored[0]), greedy.at[:, index].set(scored[1]), cache

  shape = (tokens.shape[0], BLOCK)
  nothing = (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool), cache)
  return jax.lax.fori_loop(0, steps, step, nothing)


def _score(logits: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Of logits f32[B, V], the log-probability of token wanted i32[B], and whether it is the best."""
  log_probs = jax.nn.log_softmax(logits)
  found = jnp.take_along_axis(log_probs, wanted[:, None], axis=-1)[:, 0]
  return found, found >= log_probs.max(axis=-1)
