"""Jitted steps of a batch whose rows come and go: a row is admitted into a slot, and released.

A batch of one prefills as every other does. `admit` seals it and moves it into a slot of the batch
that decodes: pages by the tables, and of all else that part of each array that is the row's. Where
that lies is found, not written down: arrays of a batch of one and of a batch of two differ in one
axis, and rows follow each other there. So no policy knows, and only stores whose rows share
something do (`Store.insert`, `Store.free`).

The batch that prefills has no host pools: its pages are on the device until the row is sealed, and
go from there to the host pools of the batch.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache import KVCache
from kvjax.cache.contiguous import Contiguous
from kvjax.cache.counting import places
from kvjax.cache.paged import Pools
from kvjax.engine import steps
from kvjax.engine.preparing import Runner
from kvjax.engine.sampling import Sampling
from kvjax.stores.traffic import Traffic
from kvjax.types import Params
from pallas_kernels.control import run_if
from pallas_kernels.recall_pages import offload_pages, recall_pages
from pallas_kernels.scatter_pages import scatter_pages


def with_batch(runner: Runner, batch: int) -> Runner:
  """The same runner for a batch of this size, which keeps no pages on the host."""
  prefill, decode = (
    dataclasses.replace(config, batch_size=batch)
    for config in (runner.prefill_config, runner.decode_config)
  )
  store = runner.store._replace(on_host=False)
  return runner._replace(store=store, prefill_config=prefill, decode_config=decode)


def _empty_batch(runner: Runner) -> KVCache:
  return steps.seal(runner, steps.empty_cache(runner))


def _admit(
  runner: Runner,
  sampling: Sampling,
  params: Params,
  cache: KVCache,
  one: KVCache,
  last: jax.Array,
  key: jax.Array,
  slot: jax.Array,
) -> tuple[jax.Array, KVCache]:
  alone = with_batch(runner, 1)
  token = steps.first_token(alone, sampling, params, last, key, one.lengths)
  row = steps.seal(alone, one)
  # On the host a page is where prefill would have put it, whatever the store keeps on the device.
  pages, table = (one.pools, one.table) if runner.store.on_host else (row.pools, row.table)
  if cache.table is not None:
    cache = _with_pages(runner, cache, pages, table, one.lengths[0], slot)
  return token, _with_rest(runner, cache, row, slot)


def _with_pages(runner: Runner, cache: KVCache, pages: Pools, table, length, slot) -> KVCache:
  """Copies the pages that hold a token; the others may hold anything."""
  c = pages.page_size
  place, used = jnp.arange(table.shape[3])[None, None], -(-length // c)
  there = (place < used) & (table[:, 0] < pages.num_pages)
  if runner.decode_config.ring_tokens is not None and not runner.store.drops:
    there &= place >= used - runner.decode_config.slots_per_row // c
  theirs = lax.dynamic_index_in_dim(cache.table, slot, axis=1, keepdims=False)
  if cache.host is not None:  # which has no pages of heads that stay on the device
    there &= theirs < cache.host.num_pages
  order, count = places(there.reshape(-1), there.size), there.sum(dtype=jnp.int32)
  source, target = (ids.reshape(-1).at[order].get(mode="clip") for ids in (table[:, 0], theirs))
  moves = source, target, count
  if cache.host is None:
    args = tuple(pages), tuple(cache.pools), *moves
    pools = lax.platform_dependent(*args, cpu=_copied_one_by_one, default=_copied_at_once)
    return cache.replace(pools=Pools(*pools))
  host = offload_pages(tuple(pages), tuple(cache.host), *moves)
  return cache.replace(host=Pools(*host))


def _copied_one_by_one(pages, pools, source, target, count):
  """As many steps as there are pages to copy, the fastest form on a CPU."""
  return recall_pages(pages, pools, source, target, count, implementation="xla")


def _copied_at_once(pages, pools, source, target, count):
  """One kernel a pool on a GPU, where steps are launches."""
  ids = jnp.where(jnp.arange(target.shape[0]) < count, target, pools[0].shape[0])
  keys, values = (pool.at[source].get(mode="clip") for pool in pages)
  return scatter_pages(pools, ids, (keys, values))


def _with_rest(runner: Runner, cache: KVCache, row: KVCache, slot: jax.Array) -> KVCache:
  """All but pages and tables; a page's id is its slot's for ever."""
  two = jax.eval_shape(partial(_empty_batch, with_batch(runner, 2)))

  def put(part: str) -> Any:
    trees = getattr(cache, part), getattr(row, part), getattr(two, part)
    return jax.tree.map(partial(_put, slot), *trees, is_leaf=lambda x: isinstance(x, Traffic))

  insert = runner.store.insert
  kept = None if insert is None else insert(cache.store_state, row.store_state, slot)
  return cache.replace(
    contiguous=_with_layers(cache.contiguous, row, slot),
    lengths=put("lengths"),
    overflow=put("overflow"),
    policy_state=put("policy_state"),
    store_state=put("store_state") if insert is None else kept,
  )


def _put(slot: jax.Array, array: Any, one: Any, two: Any) -> Any:
  """The array of a batch with one's numbers in a slot; as it was if it is the same for all."""
  if isinstance(array, Traffic):  # sums over all that a slot has served
    return array
  axes = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
  if not axes:
    return array
  return lax.dynamic_update_slice_in_dim(array, one, slot * one.shape[axes[0]], axes[0])


def _with_layers(layers: tuple[Contiguous | None, ...], row: KVCache, slot: jax.Array):
  """Contiguous layers; of their segments those that the row has reached."""

  def put(kept: Contiguous | None, new: Contiguous | None) -> Contiguous | None:
    if kept is None or new is None:
      return None
    offset, pairs = 0, []
    for pair in zip(kept.keys, new.keys, kept.values, new.values, strict=True):
      reached = row.lengths[0] > offset
      pairs.append(run_if(reached, partial(_put_pair, new=pair[1::2], slot=slot), pair[::2]))
      offset += pair[2].shape[2]
    return Contiguous(*zip(*pairs, strict=True))

  return tuple(map(put, layers, row.contiguous))


def _put_pair(pair, new, slot):
  return tuple(
    lax.dynamic_update_slice_in_dim(x, y, slot, axis=0) for x, y in zip(pair, new, strict=True)
  )


def _release(runner: Runner, cache: KVCache, ended: jax.Array) -> KVCache:
  free = runner.store.free
  return cache.replace(
    lengths=jnp.where(ended, 0, cache.lengths),
    overflow=jnp.where(ended, 0, cache.overflow).astype(cache.overflow.dtype),
    store_state=free(cache.store_state, ended) if free else cache.store_state,
  )


empty_batch = jax.jit(_empty_batch, static_argnums=0)
"""`empty_batch(runner) -> cache`: the cache that decodes, in which no slot is used yet."""

admit = jax.jit(_admit, static_argnums=(0, 1), donate_argnums=3)
"""`admit(runner, sampling, params, cache, one, last f[1, E], key key[1], slot i32[]) -> i32[1],
cache`: the first token of a row, and the cache with it in a slot. one and last are what
`kvjax.engine.generate.fill` gave for `with_batch(runner, 1)`; the cache is donated."""

release = jax.jit(_release, static_argnums=0, donate_argnums=1)
"""`release(runner, cache, ended bool[B]) -> cache`: rows that ended have length 0 and hold nothing
that others could use; the cache is donated."""
