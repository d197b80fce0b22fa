"""The one `attend` that a model calls, built from a policy, a store and what this call is about.

Each layer's role is static, so every layer becomes straight-line code. Within a layer what is new
is written before anything is read: the other order copies whole pools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import contiguous, paged
from kvjax.cache.kv_cache import KVCache
from kvjax.config import CacheConfig
from kvjax.stores import resident
from kvjax.types import Attend, Inputs, LayerPlan, Policy, Rotate, Selection, Store
from pallas_kernels.contiguous_decode_attention import contiguous_decode_attention
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.selected_decode_attention import selected_decode_attention

Watch = Callable[[int, Selection], None]


class Call(NamedTuple):
  """What one forward pass is about.

  Attributes:
    positions: i32[B, S], true positions of its tokens.
    valid: bool[B, S], False for padding.
    lengths: i32[B], tokens of each row including those of this call.
  """

  positions: jax.Array
  valid: jax.Array
  lengths: jax.Array


def prefill_attend(
  policy: Policy, plan: LayerPlan, rotate: Rotate, config: CacheConfig, call: Call
) -> Attend:
  """Dense causal attention over a chunk and all before it; what is new goes into the cache.

  All rows of a chunk begin at the same position, a multiple of the chunk's length. There is no
  store here: prefill always runs on resident pages (see `Store.seal`).
  """
  start, window = call.positions[0, 0], config.window_tokens
  dense = partial(prefill_attention, start=start, window=window)

  def attend(layer, q, k, v, cache: KVCache, hidden):
    turned_q, turned_k = rotate(q, call.positions), rotate(k, call.positions)
    block = q.shape[1]
    kept = cache.contiguous[layer]
    if kept is not None:
      kept = contiguous.append_chunk(kept, turned_k, v, config.slot(start), call.valid)
      past = contiguous.past_blocks(kept, start, block, window)
      return dense(turned_q, turned_k, v, past), _with_layer(cache, layer, kept)
    row = plan.select_layers.index(layer)
    stored = turned_k if policy.cache_positions is None else k
    pools = paged.append_chunk(cache.pools, cache.table[row], stored, v, start, call.valid)
    past = paged.past_blocks(pools, cache.table[row], start, block, window)
    if policy.cache_positions is not None:
      past = _turn_past(past, rotate, block)
    out = dense(turned_q, turned_k, v, [past])
    cache = cache.replace(pools=pools)
    slot_positions = resident.slot_positions(cache, row, call.lengths)
    inputs = _inputs(layer, row, config, call, slot_positions, turned_q, stored, v, hidden)
    return out, cache.replace(policy_state=policy.preprocess(cache.policy_state, inputs))

  return attend


def decode_attend(
  policy: Policy,
  store: Store,
  plan: LayerPlan,
  rotate: Rotate,
  config: CacheConfig,
  call: Call,
  watch: Watch | None = None,
) -> Attend:
  """Attention of one token a row to what the policy selects.

  watch, if given, is shown the `Selection` of each layer that selects while it is traced.
  """

  def attend(layer, q, k, v, cache: KVCache, hidden):
    kept = cache.contiguous[layer]
    if kept is not None:
      k, q = rotate(k, call.positions), rotate(q, call.positions)
      kept = contiguous.append_token(kept, k[:, 0], v[:, 0], config.slot(call.positions[:, 0]))
      q_heads = _grouped(q, k.shape[2])
      out = contiguous_decode_attention(q_heads, *kept, call.lengths, window=config.window_tokens)
      return out.reshape(q.shape), _with_layer(cache, layer, kept)
    return select_and_attend(layer, q, k, v, cache, hidden)

  def select_and_attend(layer, q, k, v, cache: KVCache, hidden):
    row = plan.select_layers.index(layer)
    q, k, turn = _by_position_rule(policy, rotate, call, q, k)

    def inputs(cache):
      slot_positions = store.slot_positions(cache, row, call.lengths)
      return _inputs(layer, row, config, call, slot_positions, q, k, v, hidden)

    def victims():
      assert policy.evict is not None, f"{store.name} asked {policy.name} what to drop"
      return policy.evict(cache.policy_state, inputs(cache))

    position = call.positions[:, 0]
    slots = store.place(cache, row, position, victims)
    cache = store.append(cache, row, k[:, 0], v[:, 0], position, slots)
    state = policy.preprocess(cache.policy_state, inputs(cache))
    selection, state = policy.select(state, inputs(cache))
    if watch is not None:
      watch(layer, selection)
    cache = cache.replace(policy_state=state)
    ticket, cache = (policy.fetch or store.fetch)(cache, row, selection)
    recalled, cache = (policy.recall or store.recall)(cache, row, ticket, call.lengths)
    out = selected_decode_attention(
      _grouped(q, recalled.pages.shape[1]),
      cache.pools.keys,
      cache.pools.values,
      recalled.pages,
      recalled.mask & _in_window(policy, config, call, recalled.positions),
      turn=None if turn is None else lambda keys: turn(keys, recalled.positions),
    )
    return out.reshape(q.shape), cache

  return attend


def _inputs(layer, row, config: CacheConfig, call: Call, slot_positions, q, k, v, hidden) -> Inputs:
  return Inputs(
    layer=layer,
    row=row,
    lengths=call.lengths,
    first=config.first_seen(call.lengths),
    slot_positions=slot_positions,
    q=q,
    k=k,
    v=v,
    positions=call.positions,
    valid=call.valid,
    hidden=hidden,
  )


def _in_window(policy: Policy, config: CacheConfig, call: Call, positions: jax.Array):
  """What the newest token sees of keys at positions i32[B, K, M, C]: bool of that shape.

  Distances are those that the attention sees: inside the cache, where the policy says so.
  """
  if config.window_tokens is None:
    return True
  lengths = call.lengths[:, None, None, None]
  rule = policy.cache_positions or (lambda positions, lengths: positions)
  return rule(lengths - 1, lengths) - rule(positions, lengths) < config.window_tokens


def _by_position_rule(policy: Policy, rotate: Rotate, call: Call, q, k):
  """q as it attends, k as it is kept, and how kept keys are turned when they are read."""
  rule = policy.cache_positions
  if rule is None:
    return rotate(q, call.positions), rotate(k, call.positions), None
  q = rotate(q, rule(call.positions, call.lengths[:, None]))

  def turn(keys, positions):  # f[B, K, M, D, C], i32[B, K, M, C]
    inside = rule(positions, call.lengths[:, None, None, None])
    return _turn(rotate, keys, inside)

  return q, k, turn


def _turn(rotate: Rotate, keys, positions):
  """f[..., D, C] keys turned by positions i32[..., C]."""
  *lead, d, c = keys.shape
  keys = keys.swapaxes(-1, -2).reshape(-1, c, 1, d)
  positions = jnp.broadcast_to(positions, (*lead, c)).reshape(-1, c)
  return rotate(keys, positions).reshape(*lead, c, d).swapaxes(-1, -2)


def _turn_past(past, rotate: Rotate, block: int):
  """Blocks of a cache that keeps keys unrotated; in prefill nothing is dropped yet, so positions
  inside the cache are the true ones."""

  def read(i):
    keys, values = past.read(i)
    positions = jnp.broadcast_to(i * block + jnp.arange(block), (keys.shape[0], 1, block))
    return _turn(rotate, keys, positions), values

  return past._replace(read=read)


def _grouped(q: jax.Array, heads: int) -> jax.Array:
  """f[B, 1, H, D] -> f[B, heads, H/heads, D]."""
  return q.reshape(q.shape[0], heads, -1, q.shape[-1])


def _with_layer(cache: KVCache, layer: int, kept) -> KVCache:
  return cache.replace(contiguous=(*cache.contiguous[:layer], kept, *cache.contiguous[layer + 1 :]))
