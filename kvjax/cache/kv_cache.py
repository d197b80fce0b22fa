"""`KVCache`: all device state of a batch, one frozen pytree; steps take it and return the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import host
from kvjax.cache.contiguous import Contiguous, zeros
from kvjax.cache.paged import Pools
from kvjax.config import CacheConfig, ModelConfig
from kvjax.types import DENSE, LayerPlan, State

# Bits of `KVCache.overflow`.
OVERFLOW = 1  # a row was given a token that it has no slot for
TOO_SMALL = 2  # the pool of recalled pages could not hold what a layer selected


class KVCache(flax.struct.PyTreeNode):
  """Keys, values and what policies and stores remember of them.

  Every step takes a cache, must own it (it is donated) and returns the next one.

  Attributes:
    contiguous: for each of the L layers its `Contiguous`, or None where the layer selects.
    pools: pages of all layers that select; None when there are none.
    table: i32[rows, B, K, P], page ids of each selecting layer; None when there are none.
    lengths: i32[B], tokens that each row has seen; also the position of the next one.
    overflow: u32[B], bits that say what did not fit; whoever drives the steps must look.
    policy_state: whatever the policy keeps.
    store_state: whatever the store keeps.
    host: `Pools` in pinned host memory with the pages of the layers that select, for stores that
      want it; the table's page ids are theirs too, but those of heads that stay on the device
      (`Store.tiers_heads`), which lie behind their end.
  """

  contiguous: tuple[Contiguous | None, ...]
  pools: Any  # Pools | None: whoever asks for pages knows that there are some
  table: Any  # jax.Array | None
  lengths: jax.Array
  overflow: jax.Array
  policy_state: State
  store_state: State
  host: Any = None  # Pools | None


def allocate(
  model: ModelConfig,
  cache: CacheConfig,
  plan: LayerPlan,
  policy_state: State = (),
  *,
  on_host: bool = False,
  stay: Sequence[Sequence[int]] = (),
) -> KVCache:
  """An empty cache in which every row owns all the pages that it can ever need at once.

  Not for use inside a step: shapes are chosen here. `jax.eval_shape` of it gives the shapes alone.

  Args:
    model: shape of the model.
    cache: shape of the cache.
    plan: which layers are contiguous and which are paged.
    policy_state: what `Policy.register` gave.
    on_host: the pages of selecting layers exist in host memory too.
    stay: of each selecting layer, KV heads whose pages do not; () for none.
  """
  rows = len(plan.select_layers)
  b, k, p = cache.batch_size, model.num_kv_heads, cache.pages_per_row
  c, d = cache.page_size, model.head_dim
  owned = -(-cache.slots_per_row // c)  # pages of a row, fewer than P where they form a ring
  num_pages = rows * b * k * owned
  order, away = _order(rows, b, k, stay)
  firsts = jnp.asarray(order * owned, jnp.int32)[..., None]
  shape = num_pages, c, d
  pools = Pools(*(jnp.zeros(shape, cache.dtype) for _ in range(2)))
  return KVCache(
    contiguous=tuple(zeros(model, cache) if role == DENSE else None for role in plan.roles),
    pools=pools if rows else None,
    table=firsts + jnp.arange(p, dtype=jnp.int32)[None, None, None] % owned if rows else None,
    lengths=jnp.zeros(b, jnp.int32),
    overflow=jnp.zeros(b, jnp.uint32),
    policy_state=policy_state,
    store_state=(),
    # One page at least, as a copy of no page at all must have one that it could name.
    host=host.empty((max(1, away * owned), c, d), cache.dtype) if rows and on_host else None,
  )


def _order(rows: int, b: int, k: int, stay: Sequence[Sequence[int]]) -> tuple[np.ndarray, int]:
  """i[rows, B, K], the place of each list among all of them, those that stay behind the others; and
  how many those are. So an id that is no page of the host pools is one of a list that stays."""
  stays = np.zeros((rows, b, k), bool)
  for row, heads in enumerate(stay):
    stays[row, :, list(heads)] = True
  place = np.argsort(np.argsort(stays, axis=None, kind="stable"), kind="stable")
  return place.reshape(stays.shape), int((~stays).sum())
