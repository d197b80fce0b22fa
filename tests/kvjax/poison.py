"""A cache in which every slot that holds no token holds something that would be seen."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.page_panels import num_pages
from kvjax.opkv.op_block import OpBlockState, in_pool, ordered_pages
from kvjax.opkv.token_slots import SlotState
from kvjax.policies._attention import ring_positions
from kvjax.policies._kept import WithNewest
from kvjax.stores.head_tiered import TieredState
from tests.kvjax.matrix import PAGE, filled


def held(runner, cache, row: int, total: int):
  """bool[B, K, total]: positions whose token a layer still holds."""
  positions = runner.store.slot_positions(cache, row, cache.lengths)
  b, k, _ = positions.shape
  at = jnp.arange(b)[:, None, None], jnp.arange(k)[None, :, None]
  nothing = jnp.zeros((b, k, total), bool)
  return nothing.at[(*at, jnp.where(positions < 0, total, positions))].set(True, mode="drop")


@partial(jax.jit, static_argnums=0)
def poison(runner, cache, value):
  """The cache with value in every slot and every bound that holds no token."""
  lengths = cache.lengths

  def beyond(x, axis, first):  # every place from the length on
    places = first + jnp.arange(x.shape[axis])
    unused = places[None] >= lengths[:, None]
    unused = unused.reshape(*unused.shape[:1], *(-1 if i == axis else 1 for i in range(1, x.ndim)))
    return jnp.where(unused, value, x)

  def segments(arrays, axis):
    starts = np.cumsum([0, *(x.shape[axis] for x in arrays)])
    return tuple(beyond(x, axis, int(at)) for x, at in zip(arrays, starts, strict=False))

  contiguous = tuple(
    layer and layer._replace(keys=segments(layer.keys, 3), values=segments(layer.values, 2))
    for layer in cache.contiguous
  )
  pools = cache.pools
  for row in range(len(runner.plan.select_layers) if pools else 0):
    unused = runner.store.slot_positions(cache, row, lengths) < 0
    unused = unused.reshape(*unused.shape[:2], -1, PAGE)
    pages = cache.table[row][..., : unused.shape[2]]  # a layer may have fewer than the table has
    pools = pools._replace(
      keys=pools.keys.at[pages].set(jnp.where(unused[..., None], value, pools.keys[pages])),
      values=pools.values.at[pages].set(jnp.where(unused[..., None], value, pools.values[pages])),
    )

  def kept(layer):  # what a layer keeps of its pages
    if isinstance(layer, WithNewest):
      started = jnp.arange(PAGE)[None] < lengths[:, None] % PAGE
      newest = jnp.where(started[:, None, :, None], layer.newest, value)
      return WithNewest(kept(layer.digests), newest)
    unit = cache.table.shape[-1] * PAGE // sum(map(num_pages, layer))
    poisoned, first = [], 0
    for panels in layer:
      places = first + jnp.arange(num_pages(panels)).reshape(panels.shape[2], 1, -1)
      unused = places[None, None] >= -(-lengths // unit)[:, None, None, None, None]
      poisoned.append(jnp.where(unused, value, panels))
      first += num_pages(panels)
    return tuple(poisoned)

  state = cache.policy_state
  if runner.policy.name in ("quest", "arkvale"):
    state = tuple(map(kept, state))
  elif runner.policy.name in ("flexicache", "flexicache_adaptive", "lserve"):
    state = state._replace(digests=tuple(map(kept, state.digests)))
  elif runner.policy.name == "h2o":
    state = tuple(
      jnp.where(held(runner, cache, row, sums.shape[-1]), sums, value)
      for row, sums in enumerate(state)
    )
  elif runner.policy.name == "infinigen":
    layers = (layer._replace(keys=segments(layer.keys, 3)) for layer in state.partial)
    state = state._replace(partial=tuple(layers))
  elif runner.policy.name == "omnikv":
    none = {i: ring_positions(ring, lengths) < 0 for i, ring in state.rings.items()}
    rings = {
      layer: jnp.where(none[layer][:, None, :, None, None], value, ring)
      for layer, ring in state.rings.items()
    }
    state = state.replace(rings=rings)
  elif runner.policy.name == "morphkv":
    none = [ring_positions(layer.ring, lengths)[:, None, :, None, None] < 0 for layer in state]
    state = tuple(
      layer._replace(ring=jnp.where(unused, value, layer.ring))
      for layer, unused in zip(state, none, strict=True)
    )
  elif runner.policy.name not in ("tova", "clusterkv"):
    # tova keeps one position, which a full row alone looks at; clusterkv, from its first decode
    # step on, labels and centroids that are all finite
    assert not jax.tree.leaves(state), "say here what of this policy's state is unused"
  cache = cache.replace(contiguous=contiguous, pools=pools, policy_state=state)
  return poison_recalled(cache, value) if runner.store.on_host else cache


def poison_recalled(cache, value):
  """Of a store with a host tier: what no later step may read."""
  state = cache.store_state
  if isinstance(state, TieredState):
    return cache.replace(store_state=_poison_slots(state, cache.lengths, value))
  if not isinstance(state, OpBlockState | SlotState):  # whole pages come anew at every step
    return cache.replace(store_state=state.replace(areas=filled(state.areas, value)))
  started = jnp.arange(PAGE)[None] < cache.lengths[:, None] % PAGE  # slots of the newest page
  ordered, pools = jnp.repeat(started, cache.table.shape[2], axis=0), []
  for group, pool in zip(state.group, state.pools, strict=True):
    if isinstance(state, SlotState):
      slots = state.slots[group].tokens >= 0
      used = jnp.concatenate([slots, ordered], axis=1).reshape(-1, PAGE)
    else:
      tokens = state.blocks[group].tokens
      place = in_pool(state, jnp.arange(tokens.size))
      used = jnp.zeros(pool.keys.shape[0] * PAGE, bool).at[place].set(tokens.reshape(-1) >= 0)
      used = used.reshape(-1, PAGE).at[ordered_pages(state)].set(ordered)
    pools.append(jax.tree.map(lambda x, used=used: jnp.where(used[..., None], x, value), pool))
  state = state.replace(pools=tuple(pools))
  if isinstance(state, OpBlockState) and state.partition is not None:
    state = state.replace(partition=_poison_partition(state.partition, state.group, value))
  return cache.replace(store_state=state)


def _poison_partition(partition, group, value):
  """Slots on the host of which no block says that it has a token there."""
  on_host, device = jax.memory.Space.Host, jax.memory.Space.Device

  def poisoned(pool, used):
    pool = jnp.where(used[..., None], jax.device_put(pool, device), value)
    return jax.device_put(pool, on_host)

  pools = tuple(
    jax.tree.map(lambda pool, i=i: poisoned(pool, partition.blocks[i].tokens >= 0), layer)
    for i, layer in zip(group, partition.pools, strict=True)
  )
  return partition._replace(pools=pools)


def _poison_slots(state, lengths, value):
  """Pages that no place of a table leads to, and slots behind the end of a row."""
  pools = []
  for table, layer in zip(state.tables, state.pools, strict=True):
    positions = jnp.arange(table.shape[2] * PAGE).reshape(1, 1, -1, PAGE)
    used = jnp.broadcast_to(positions < lengths[:, None, None, None], (*table.shape, PAGE))
    used = jnp.zeros(layer.keys.shape[:2], bool).at[table].set(used, mode="drop")
    pools.append(jax.tree.map(lambda x, used=used: jnp.where(used[..., None], x, value), layer))
  return state.replace(pools=tuple(pools))
