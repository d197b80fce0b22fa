"""What is kept of a conversation's row between turns: keys and values, or activations.

A runner whose policy is `keeping(dense)` keeps activations (`kvjax.bidaw.tensor_cache`), half of
the bytes where query heads do not share KV heads; any other keeps keys and values. Here is all that
differs: how they are taken out of a slot, and how a row begins with them. To whoever has them
meanwhile, in host memory or on disk, both are an array with a place for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as cached
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.bidaw.tensor_cache import (
  Kept,
  Run,
  packed,
  rebuild,
  take_activations,
  unpacked,
)
from kvjax.cache import KVCache
from kvjax.engine.continuing import fill_from, fill_from_blocks, kv_of
from kvjax.engine.preparing import Runner
from kvjax.engine.sharded import to_host
from kvjax.types import Params


@cached
def keeps_activations(runner: Runner) -> bool:
  """Whether histories of this runner are activations."""
  register = partial(runner.policy.register, runner.model.config, runner.prefill_config)
  return isinstance(jax.eval_shape(lambda: register()[1]), Kept)


def taken(runner: Runner, cache: KVCache, slot: int, first: int, end: int) -> list[jax.Array]:
  """What is kept of positions [first, end) of a slot, on its way to host memory.

  Returns:
    blocks of the runner's chunk_tokens, for `on_host`; what is beyond end means nothing.
  """
  if not keeps_activations(runner):
    return kv_of(runner, cache, slot, first, end)
  size, state = runner.chunk_tokens, cache.policy_state
  starts = range(first, end, size)
  blocks: list[jax.Array] = [
    take_activations(state, np.int32(slot), np.int32(start), size) for start in starts
  ]
  for block in blocks:
    block.copy_to_host_async()
  return blocks


def on_host(runner: Runner, blocks: Sequence[jax.Array], tokens: int, read: int) -> np.ndarray:
  """What a turn has left, of `Stamp.token_shape` for each token.

  Args:
    runner: of the batch.
    blocks: from `taken`.
    tokens: of them that count.
    read: the first of those, which were read as a prompt; each other one was given to a step.
  """
  kept = np.concatenate([to_host(block) for block in blocks])[:tokens]
  if not keeps_activations(runner):
    return kept
  return packed(kept, _runs(runner, read, tokens - read))


def filled(
  runner: Runner, params: Params, tokens: Sequence[int], chunks: Sequence[np.ndarray]
) -> tuple[jax.Array, KVCache]:
  """`fill_from` of what was kept, in whichever form.

  Args:
    runner: with a batch of one.
    params: weights of its model.
    tokens: all ids, at least one more than are kept.
    chunks: of the first tokens one after another.
  """
  if not chunks or not keeps_activations(runner):
    return fill_from(runner, params, tokens, chunks)
  x, runs = unpacked(np.concatenate(chunks), runner.model.config.num_layers)
  capacity = runner.prefill_config.capacity_tokens
  keys, values = rebuild(runner.model, params, x, runs, capacity)
  blocks = _in_blocks(keys, values, runner.chunk_tokens)
  return fill_from_blocks(runner, params, tokens, blocks, x.shape[1])


def zeros(runner: Runner, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """A history of zeros that holds one token of each shape of steps, to compile what it takes.

  Args:
    runner: of the batch.
    shape: of a token.
    dtype: of its numbers.
  """
  if not keeps_activations(runner):
    return np.zeros((1, *shape), dtype)
  width = runner.model.config.num_layers * runner.model.config.embed_dim
  return packed(np.zeros((2, width), dtype), _runs(runner, 1, 1))


def _runs(runner: Runner, read: int, stepped: int) -> list[Run]:
  """Prompts are read alone, in whole chunks; a step has all slots."""
  slots = runner.decode_config.batch_size
  return [Run(read, 1, runner.chunk_tokens), Run(stepped, slots, 1)]


@partial(jax.jit, static_argnums=2)
def _in_blocks(keys: jax.Array, values: jax.Array, size: int) -> list[jax.Array]:
  """Keys and values f[L, T, K, D] as blocks f[size, L, 2, K, D], the last one with zeros."""
  kv = jnp.stack([keys, values], axis=2).swapaxes(0, 1)
  blocks = -(-kv.shape[0] // size)
  kv = jnp.pad(kv, [(0, blocks * size - kv.shape[0]), *[(0, 0)] * 4])
  return list(kv.reshape(blocks, size, *kv.shape[1:]))
