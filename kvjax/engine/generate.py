"""Text in, text out: chunked prefill, then one jitted step a token, for a ragged batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import TOO_SMALL, KVCache
from kvjax.engine import sharded, steps
from kvjax.engine.preparing import Runner
from kvjax.engine.sampling import Sampling
from kvjax.engine.sharded import to_host
from kvjax.types import Params

Progress = Callable[[str, int, int], None]


class Generation(NamedTuple):
  """What came out.

  Attributes:
    tokens: new tokens of each row, without the stop token.
    stopped: whether each row met a stop token.
    ttft_s: wall seconds from the prompt to the first token.
    step_s: wall seconds of each decode step; a step makes one token of every row.
    cache: final device state.
  """

  tokens: list[list[int]]
  stopped: list[bool]
  ttft_s: float
  step_s: list[float]
  cache: KVCache


def generate(
  runner: Runner,
  params: Params,
  prompts: Sequence[Sequence[int]],
  *,
  max_new_tokens: int = 64,
  stop_ids: Collection[int] = (),
  sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
  seed: int = 0,
  progress: Progress | None = None,
) -> Generation:
  """Continues every prompt.

  The first call of a runner compiles; a prompt of any other length, and every further step,
  compiles nothing.

  Args:
    runner: from `prepare`.
    params: weights of its model.
    prompts: token ids, one list a row; lengths may differ.
    max_new_tokens: most new tokens of a row, at least 1.
    stop_ids: tokens that end a row.
    sampling: how tokens are chosen.
    seed: of the sampling; row and batch mates do not enter.
    progress: called with ("prefill" or "decode", done, total), in tokens of the longest row.

  Raises:
    ValueError: an empty prompt, one that is too long, or not one prompt a row.
    RuntimeError: a row outgrew its cache, which the checks before should have prevented.
  """
  check_request(runner, prompts, max_new_tokens)
  check_placed(runner, params)
  progress = progress or (lambda phase, done, total: None)
  begin = time.perf_counter()
  last, cache = prefill(runner, params, prompts, progress)
  prefill_s = time.perf_counter() - begin
  result = decode(
    runner,
    params,
    last,
    cache,
    max_new_tokens=max_new_tokens,
    stop_ids=stop_ids,
    sampling=sampling,
    seed=seed,
    progress=progress,
  )
  return result._replace(ttft_s=prefill_s + result.ttft_s)


def decode(
  runner: Runner,
  params: Params,
  last: jax.Array,
  cache: KVCache,
  *,
  max_new_tokens: int,
  stop_ids: Collection[int] = (),
  sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
  seed: int = 0,
  progress: Progress = lambda phase, done, total: None,
) -> Generation:
  """`generate` from what `prefill` gave, of which the cache is donated; ttft_s counts from here."""
  key = jnp.broadcast_to(jax.random.key(seed), cache.lengths.shape)
  begin = time.perf_counter()
  tokens = steps.first_token(runner, sampling, params, last, key, cache.lengths)
  made = [to_host(tokens)]
  ttft_s = time.perf_counter() - begin
  step_s: list[float] = []
  stop = np.array(sorted(stop_ids), np.int32)
  ended = np.isin(made[0], stop)
  while len(made) < max_new_tokens and not ended.all():
    progress("decode", len(made), max_new_tokens)
    begin = time.perf_counter()
    tokens, cache = steps.next_token(runner, sampling, params, cache, tokens, key)
    made.append(to_host(tokens))
    step_s.append(time.perf_counter() - begin)
    ended |= np.isin(made[-1], stop)
  progress("decode", max_new_tokens, max_new_tokens)
  check_overflow(runner, cache)
  rows = [_cut(row, stop) for row in np.stack(made, axis=1)]
  return Generation(rows, ended.tolist(), ttft_s, step_s, cache)


def prefill(
  runner: Runner,
  params: Params,
  prompts: Sequence[Sequence[int]],
  progress: Progress = lambda phase, done, total: None,
) -> tuple[jax.Array, KVCache]:
  """Fills a cache with the prompts.

  Returns:
    f[B, E], the hidden state of each row's last token, and the sealed cache.
  """
  last, cache = fill(runner, params, prompts, progress)
  return last, steps.sealed(runner, cache)


def fill(
  runner: Runner,
  params: Params,
  prompts: Sequence[Sequence[int]],
  progress: Progress = lambda phase, done, total: None,
) -> tuple[jax.Array, KVCache]:
  """`prefill` without the seal."""
  chunk, lengths = runner.chunk_tokens, np.array([len(prompt) for prompt in prompts])
  longest = int(lengths.max())
  padded = np.zeros((len(prompts), -(-longest // chunk) * chunk), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  cache = steps.empty_cache(runner)
  dtype = jax.tree.leaves(params)[0].dtype  # what a model's weights have, its activations have
  shape = (len(prompts), runner.model.config.embed_dim)
  where = sharded.rows(runner.mesh)
  if runner.store.on_host:  # beside host memory all results of a step are bound to their device,
    where = cache.lengths.sharding  # and a second step must not look like another kind of step
  last = jnp.zeros(shape, dtype, device=where)
  for start in range(0, longest, chunk):
    counts = np.clip(lengths - start, 0, chunk).astype(np.int32)
    last, cache = steps.prefill_chunk(
      runner, params, cache, last, padded[:, start : start + chunk], counts, np.int32(start)
    )
    jax.block_until_ready(last)
    progress("prefill", min(start + chunk, longest), longest)
  return last, cache


def check_request(runner: Runner, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
  """Raises ValueError, in one line, for prompts that this runner cannot serve."""
  batch = runner.prefill_config.batch_size
  if len(prompts) != batch:
    raise ValueError(f"{len(prompts)} prompts for a cache of batch_size {batch}; give one a row")
  if max_new_tokens < 1:
    raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 1")
  capacity, context = runner.prefill_config.capacity_tokens, runner.model.config.max_tokens
  vocab = runner.model.config.vocab_size
  for row, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(f"prompt {row} is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab:
      raise ValueError(f"prompt {row} holds token ids outside [0, {vocab}); use its own tokenizer")
    total = len(prompt) + max_new_tokens
    if total > context:
      raise ValueError(
        f"prompt {row} has {len(prompt)} tokens; with {max_new_tokens} new ones that is {total}, "
        f"and the model's context is {context}; shorten the prompt or ask for fewer"
      )
    if total > capacity:
      raise ValueError(
        f"prompt {row} has {len(prompt)} tokens; with {max_new_tokens} new ones that is {total}, "
        f"and the cache holds {capacity} a row; raise capacity_tokens or shorten the prompt"
      )


def check_placed(runner: Runner, params: Params) -> None:
  """Raises ValueError for weights that lie elsewhere than on the devices of the runner."""
  if runner.mesh is None:
    return
  devices = set(runner.mesh.devices.flat)
  if any(
    not isinstance(leaf, jax.Array) or leaf.sharding.device_set != devices
    for leaf in jax.tree.leaves(params)
  ):
    raise ValueError(
      "the weights do not lie on the mesh of the runner; put them there with "
      "jax.device_put(params, param_shardings(model, mesh))"
    )


def check_overflow(runner: Runner, cache: KVCache) -> None:
  """Raises RuntimeError if any row was given tokens that it has no slot for."""
  rows = np.flatnonzero(to_host(cache.overflow))
  if not rows.size:
    return
  longest, policy = int(to_host(cache.lengths).max()), runner.policy
  if (to_host(cache.overflow) & TOO_SMALL).any():
    raise RuntimeError(
      f"store {runner.store.name!r} has too little room on the device for what one layer selects "
      f"of rows {rows.tolist()}; raise its option slack if it has one, or lower the budget"
    )
  fixed = runner.store.drops and policy.evict is None  # what is generated has its own slots
  if fixed and longest <= runner.prefill_config.capacity_tokens:
    raise RuntimeError(
      f"rows {rows.tolist()} made more tokens than policy {policy.name!r} has room for; raise its "
      "option new_tokens and run again"
    )
  raise RuntimeError(
    f"rows {rows.tolist()} outgrew the cache; allocate a larger capacity_tokens and run again"
  )


def _cut(row: np.ndarray, stop: np.ndarray) -> list[int]:
  """The tokens before the first stop token."""
  hits = np.flatnonzero(np.isin(row, stop))
  return row[: hits[0] if hits.size else None].tolist()
