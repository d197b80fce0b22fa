"""Jitted steps of a row that goes on from keys and values that it had before.

Prefill takes whole chunks, and a history ends anywhere. So its last tokens, those of a chunk that
is not full, go through the model once more together with what is new (the chunk has room for them
in any case), but what they had stays: their keys and values are not written again, and the new
tokens attend to those that were kept and not to those that would be made now. Turn after turn a
conversation has the bits that it would have had in one piece.

Only layers that keep everything in order can take back what they had: those of `dense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import KVCache
from kvjax.cache.contiguous import Contiguous, append_chunk
from kvjax.engine import steps
from kvjax.engine.preparing import Runner
from kvjax.types import Params


def check_continues(runner: Runner) -> None:
  """Raises ValueError, in one line, for a runner whose rows cannot go on from what they had."""
  if runner.plan.select_layers or runner.store.name != "resident":
    raise ValueError(
      f"policy {runner.policy.name!r} on store {runner.store.name!r} keeps more of a row than keys "
      "and values in order; conversations are kept with policy 'dense' on store 'resident'"
    )
  if runner.decode_config.ring_tokens is not None:
    raise ValueError(
      f"the model's window of {runner.decode_config.window_tokens} tokens overwrites what is "
      f"before it in a cache of {runner.decode_config.capacity_tokens} tokens; give it at most "
      f"{runner.decode_config.ring_tokens}"
    )


def fill_from(
  runner: Runner, params: Params, tokens: Sequence[int], chunks: Sequence[np.ndarray]
) -> tuple[jax.Array, KVCache]:
  """`kvjax.engine.generate.fill` of one row whose first tokens have keys and values already.

  Args:
    runner: with a batch of one.
    params: weights of its model.
    tokens: all ids, at least one more than have keys and values.
    chunks: f[T, L, 2, K, D] each, of the first tokens one after another.

  Returns:
    f[1, E], the hidden state of the last token, and the cache that prefilled.
  """
  blocks = _blocks(chunks, runner.chunk_tokens)
  return fill_from_blocks(runner, params, tokens, blocks, sum(map(len, chunks)))


def fill_from_blocks(
  runner: Runner,
  params: Params,
  tokens: Sequence[int],
  blocks: Sequence[np.ndarray] | Sequence[jax.Array],
  held: int,
) -> tuple[jax.Array, KVCache]:
  """`fill_from` of keys and values in blocks f[S, L, 2, K, D], S the runner's chunk_tokens.

  Of the blocks, one after another, held tokens count; those wholly beyond are not looked at.
  """
  size = runner.chunk_tokens
  cache = steps.empty_cache(runner)
  for start, block in enumerate(blocks[: -(-held // size)]):
    cache = put_kv(runner, cache, block, np.int32(start * size), np.int32(held))
  dtype = jax.tree.leaves(params)[0].dtype
  last = jnp.zeros((1, runner.model.config.embed_dim), dtype)
  for start in range(held // size * size, len(tokens), size):
    chunk = np.zeros((1, size), np.int32)
    new = tokens[start : start + size]
    chunk[0, : len(new)] = new
    args = params, cache, last, chunk, np.array([len(new)], np.int32), np.int32(start)
    last, cache = continue_chunk(runner, *args, np.int32(held))
  return last, cache


def kv_of(runner: Runner, cache: KVCache, slot: int, first: int, end: int) -> list[jax.Array]:
  """Keys and values of positions [first, end) of a slot, on their way to host memory.

  Returns:
    f[S, L, 2, K, D] each, S the runner's chunk_tokens; what is beyond end means nothing.
  """
  starts = range(first, end, runner.chunk_tokens)
  blocks: list[jax.Array] = [
    take_kv(runner, cache, np.int32(slot), np.int32(start)) for start in starts
  ]
  for block in blocks:
    block.copy_to_host_async()
  return blocks


def _blocks(chunks: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
  """The tokens of chunks in arrays of one size, the last of them filled up with zeros."""
  if not chunks:
    return []
  held, shape = sum(map(len, chunks)), chunks[0].shape[1:]
  whole = np.zeros((-(-held // size) * size, *shape), chunks[0].dtype)
  np.concatenate(chunks, out=whole[:held])
  return list(whole.reshape(-1, size, *shape))


def _layers(cache: KVCache) -> list[Contiguous]:
  """All of them: none selects, as `check_continues` has seen."""
  return [layer for layer in cache.contiguous if layer is not None]


def _read_layer(layer: Contiguous, slot: jax.Array, start: jax.Array, size: int):
  """Keys and values f[S, K, D] of size positions of a row; zeros beyond the capacity."""
  keys: Any = None
  values: Any = None
  offset = 0
  for k, v in zip(layer.keys, layer.values, strict=True):
    length = v.shape[2]
    index = start - offset + jnp.arange(size, dtype=jnp.int32)
    index = jnp.where(index < 0, length, index)  # a negative one would wrap around
    row_k, row_v = (jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for x in (k, v))
    k = jnp.take(row_k, index, axis=2, mode="fill", fill_value=0).transpose(2, 0, 1)
    v = jnp.take(row_v, index, axis=1, mode="fill", fill_value=0).swapaxes(0, 1)
    inside = (index < length)[:, None, None]
    keys = k if keys is None else jnp.where(inside, k, keys)
    values = v if values is None else jnp.where(inside, v, values)
    offset += length
  return keys, values


def _take_kv(runner: Runner, cache: KVCache, slot: jax.Array, start: jax.Array) -> jax.Array:
  layers = [_read_layer(layer, slot, start, runner.chunk_tokens) for layer in _layers(cache)]
  return jnp.stack([jnp.stack(pair, axis=1) for pair in layers], axis=1)


def _put_kv(runner: Runner, cache: KVCache, kv: jax.Array, start: jax.Array, held: jax.Array):
  del runner
  valid = (start + jnp.arange(kv.shape[0], dtype=jnp.int32) < held)[None]
  layers = tuple(
    append_chunk(layer, kv[None, :, i, 0], kv[None, :, i, 1], start, valid)
    for i, layer in enumerate(_layers(cache))
  )
  return cache.replace(contiguous=layers)


def _continue_chunk(
  runner: Runner,
  params: Params,
  cache: KVCache,
  last: jax.Array,
  tokens: jax.Array,
  counts: jax.Array,
  start: jax.Array,
  held: jax.Array,
) -> tuple[jax.Array, KVCache]:
  model, size = runner.model, tokens.shape[1]
  old = (start + jnp.arange(size, dtype=jnp.int32) < held)[None, :, None, None]

  def forward(params, tokens, positions, cache, attend):
    def attend_to_old(layer, q, k, v, cache, hidden):
      q, k = model.rotate(q, positions), model.rotate(k, positions)
      old_k, old_v = _read_layer(_layers(cache)[layer], jnp.int32(0), start, size)
      k = jnp.where(old, old_k[None].astype(k.dtype), k)
      v = jnp.where(old, old_v[None].astype(v.dtype), v)
      return attend(layer, q, k, v, cache, hidden)

    return model.forward(params, tokens, positions, cache, attend_to_old)

  turned = model._replace(forward=forward, rotate=lambda x, positions: x)
  cache = cache.replace(lengths=jnp.full_like(cache.lengths, start))
  return steps.read_chunk(runner._replace(model=turned), params, cache, last, tokens, counts, start)


take_kv = jax.jit(_take_kv, static_argnums=0)
"""`take_kv(runner, cache, slot i32[], start i32[]) -> f[S, L, 2, K, D]`: keys and values of
chunk_tokens positions of a slot; zeros beyond the capacity."""

put_kv = jax.jit(_put_kv, static_argnums=0, donate_argnums=1)
"""`put_kv(runner, cache, kv f[S, L, 2, K, D], start i32[], held i32[]) -> cache`: the inverse, into
a batch of one, of the positions before held; the cache is donated, its lengths stay."""

continue_chunk = jax.jit(_continue_chunk, static_argnums=0, donate_argnums=2)
"""`continue_chunk(runner, params, cache, last f[1, E], tokens i32[1, S], counts i32[1],
start i32[], held i32[]) -> f[1, E], cache`: `kvjax.engine.steps.prefill_chunk` of one row whose
positions before held have keys and values already."""
