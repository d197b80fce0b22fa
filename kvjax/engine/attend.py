"""The one `attend` that a model calls, built from a policy, a store and what this call is about.

Each layer's role is static, so every layer becomes straight-line code. Within a layer what is new
is written before anything is read: the other order copies whole pools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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

NOWHERE = 1 << 30  # a position, and a slot, beyond all that any cache has: nothing is written there


class Call(NamedTuple):
  """What one forward pass is about.

  Attributes:
    positions: i32[B, S], true positions of its tokens.
    valid: bool[B, S], False for padding, and in decode for a row that sits the step out. Such a row
      has position NOWHERE and length 0, so that nothing of it is written, wanted or read.
    lengths: i32[B], tokens of each row including those of this call.
  """

  positions: jax.Array
  valid: jax.Array
  lengths: jax.Array


class Setting(NamedTuple):
  """What is the same for all layers and steps of a run.

  Attributes:
    policy: which KV matters.
    store: where it lives.
    plan: role of each layer.
    rotate: the position rule of the model.
    query: `query(layer, hidden f[B, S, E]) -> f[B, S, H, D]`, see `Model`, with its parameters.
    config: shape of the cache.
  """

  policy: Policy
  store: Store
  plan: LayerPlan
  rotate: Rotate
  query: Callable[[int, jax.Array], jax.Array]
  config: CacheConfig


def one_token(lengths: jax.Array, active: jax.Array | None = None) -> Call:
  """The call of a decode step after lengths i32[B] tokens; rows that are not active bool[B], if
  given, sit it out."""
  positions = lengths[:, None]
  if active is None:
    return Call(positions, jnp.ones_like(positions, bool), lengths + 1)
  positions = jnp.where(active[:, None], positions, NOWHERE)
  return Call(positions, active[:, None], jnp.where(active, lengths + 1, 0))


def prefill_attend(setting: Setting, call: Call) -> Attend:
  """Dense causal attention over a chunk and all before it; what is new goes into the cache.

  All rows of a chunk begin at the same position, a multiple of the chunk's length. There is no
  store here: prefill always runs on resident pages (see `Store.seal`).
  """
  policy, rotate, config = setting.policy, setting.rotate, setting.config
  start, window = call.positions[0, 0], config.window_tokens
  dense = partial(prefill_attention, start=start, window=window)

  def attend(layer, q, k, v, cache: KVCache, hidden):
    turned_q, turned_k = rotate(q, call.positions), rotate(k, call.positions)
    block = q.shape[1]
    kept = cache.contiguous[layer]
    if kept is not None:
      kept = contiguous.append_chunk(kept, turned_k, v, config.slot(start), call.valid)
      out = dense(turned_q, turned_k, v, contiguous.past_blocks(kept, start, block, window))
      cache = _with_layer(cache, layer, kept)
      return out, _watched(setting, call, layer, turned_q, turned_k, v, cache, hidden)
    row = setting.plan.select_layers.index(layer)
    stored = turned_k if policy.cache_positions is None else k
    pools = paged.append_chunk(cache.pools, cache.table[row], stored, v, start, call.valid)
    past = paged.past_blocks(pools, cache.table[row], start, block, window)
    if policy.cache_positions is not None:
      past = _turn_past(past, rotate, block)
    out = dense(turned_q, turned_k, v, [past])
    cache = cache.replace(pools=pools)
    if cache.host is not None:  # layer by layer, so that a copy runs while the next one computes
      on_host = paged.append_chunk(cache.host, cache.table[row], stored, v, start, call.valid)
      cache = cache.replace(host=on_host)
    slots = _page_slots(cache, row, resident.slot_positions(cache, row, call.lengths))
    inputs = _inputs(setting, call, layer, row, slots, turned_q, stored, v, hidden)
    return out, cache.replace(policy_state=policy.preprocess(cache.policy_state, inputs))

  return attend


def decode_attend(setting: Setting, call: Call, watch: Watch | None = None) -> Attend:
  """Attention of one token a row to what the policy selects.

  watch, if given, is shown the `Selection` of each layer that selects while it is traced.
  """
  policy, store, rotate, config = setting.policy, setting.store, setting.rotate, setting.config
  tickets: dict[int, Any] = {}  # by selecting layer, of recalls that have begun before it runs

  def fetch(cache: KVCache, row: int, selection: Selection) -> KVCache:
    begin = policy.fetch or store.fetch
    tickets[row], cache = begin(cache, row, selection, call.lengths)
    return cache

  def fetch_ahead(cache: KVCache, layer: int) -> KVCache:
    """Begins the recall for the next layer that selects, if it is known what that will want."""
    row = sum(other <= layer for other in setting.plan.select_layers)
    if not store.on_host or policy.ahead is None or row in tickets:
      return cache
    known = row < len(setting.plan.select_layers) and policy.ahead(cache.policy_state, row)
    return fetch(cache, row, known) if known else cache

  def attend(layer, q, k, v, cache: KVCache, hidden):
    kept = cache.contiguous[layer]
    if kept is not None:
      k, q = rotate(k, call.positions), rotate(q, call.positions)
      slot = jnp.where(call.valid, config.slot(call.positions), NOWHERE)[:, 0]
      kept = contiguous.append_token(kept, k[:, 0], v[:, 0], slot)
      cache = _with_layer(cache, layer, kept)
      cache = fetch_ahead(_watched(setting, call, layer, q, k, v, cache, hidden), layer)
      q_heads = _grouped(q, k.shape[2])
      out = contiguous_decode_attention(q_heads, *kept, call.lengths, window=config.window_tokens)
      return out.reshape(q.shape), cache
    return select_and_attend(layer, q, k, v, cache, hidden)

  def select_and_attend(layer, q, k, v, cache: KVCache, hidden):
    row = setting.plan.select_layers.index(layer)
    q, k, turn = _by_position_rule(policy, rotate, call, q, k)

    def inputs(cache):
      slots = _page_slots(cache, row, store.slot_positions(cache, row, call.lengths))
      return _inputs(setting, call, layer, row, slots, q, k, v, hidden)

    def victims():
      return None if policy.evict is None else policy.evict(cache.policy_state, inputs(cache))

    position = call.positions[:, 0]
    slots, cache = store.place(cache, row, position, victims)
    slots = jnp.where(call.valid, slots, NOWHERE)
    cache = store.append(cache, row, k[:, 0], v[:, 0], position, slots)
    state = policy.preprocess(cache.policy_state, inputs(cache))
    selection, state = policy.select(state, inputs(cache))
    if watch is not None:
      watch(layer, selection)
    cache = cache.replace(policy_state=state)
    cache = cache if row in tickets else fetch(cache, row, selection)
    recalled, cache = (policy.recall or store.recall)(cache, row, tickets.pop(row), call.lengths)
    cache = fetch_ahead(cache, layer)
    out = selected_decode_attention(
      _grouped(q, recalled.mask.shape[1]),
      recalled.pools.keys,
      recalled.pools.values,
      recalled.pages,
      recalled.mask & _in_window(policy, config, call, recalled.positions),
      slots=recalled.slots,
      turn=None if turn is None else lambda keys: turn(keys, recalled.positions),
    )
    return store.release(cache, row, out.reshape(q.shape))

  return attend


def _watched(setting: Setting, call: Call, layer: int, q, k, v, cache: KVCache, hidden) -> KVCache:
  """The cache after the policy has seen a dense layer that it watches."""
  if layer not in setting.plan.watched:
    return cache
  kept, ring = cache.contiguous[layer], setting.config.ring_tokens is not None
  assert kept is not None, "a layer that selects is no watched one"
  slots = (
    contiguous.slot_positions(kept, call.lengths, ring),
    partial(contiguous.all_keys, kept),
  )
  inputs = _inputs(setting, call, layer, -1, slots, q, k, v, hidden)
  return cache.replace(policy_state=setting.policy.preprocess(cache.policy_state, inputs))


def _page_slots(cache: KVCache, row: int, positions: jax.Array):
  """Positions i32[B, K, T] of the slots of a layer, and a function that gives their keys."""
  if cache.pools is None:
    return positions, _keys_on_host
  places = positions.shape[2] // cache.pools.page_size  # the table is as wide as the widest layer
  return positions, partial(paged.keys_of, cache.pools, cache.table[row][..., :places])


def _keys_on_host(pages=None):
  raise ValueError(
    "the keys of this layer are in host memory; choose a policy or options that "
    "do not read them, or the store resident"
  )


def _inputs(setting: Setting, call: Call, layer: int, row: int, slots, q, k, v, hidden) -> Inputs:
  """slots: positions i32[B, K, T] of the kept tokens, and a function that gives their keys."""

  def project(other: int) -> jax.Array:
    return setting.rotate(setting.query(other, hidden), call.positions)

  return Inputs(
    layer=layer,
    row=row,
    lengths=call.lengths,
    first=setting.config.first_seen(call.lengths),
    slot_positions=slots[0],
    keys=slots[1],
    q=q,
    k=k,
    v=v,
    positions=call.positions,
    valid=call.valid,
    hidden=hidden,
    project=project,
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

  def turn(keys, positions):  # f[B, K, M, C, D], i32[B, K, M, C]
    inside = rule(positions, call.lengths[:, None, None, None])
    return _turn(rotate, keys, inside)

  return q, k, turn


def _turn(rotate: Rotate, keys, positions):
  """f[..., C, D] keys turned by positions i32[..., C]."""
  *lead, c, d = keys.shape
  positions = jnp.broadcast_to(positions, (*lead, c)).reshape(-1, c)
  return rotate(keys.reshape(-1, c, 1, d), positions).reshape(keys.shape)


def _turn_past(past, rotate: Rotate, block: int):
  """Blocks of a cache that keeps keys unrotated; in prefill nothing is dropped yet, so positions
  inside the cache are the true ones."""

  def read(i):
    keys, values = past.read(i)
    positions = jnp.broadcast_to(i * block + jnp.arange(block), (keys.shape[0], 1, block))
    return _turn(rotate, keys.swapaxes(2, 3), positions).swapaxes(2, 3), values

  return past._replace(read=read)


def _grouped(q: jax.Array, heads: int) -> jax.Array:
  """f[B, 1, H, D] -> f[B, heads, H/heads, D]."""
  return q.reshape(q.shape[0], heads, -1, q.shape[-1])


def _with_layer(cache: KVCache, layer: int, kept) -> KVCache:
  return cache.replace(contiguous=(*cache.contiguous[:layer], kept, *cache.contiguous[layer + 1 :]))
