"""What stores with a host tier count: exact numbers of what a step moved, per row of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Traffic(NamedTuple):
  """Sums over decode steps and layers, u32[B, K] each (they wrap around).

  Attributes:
    selected: tokens that were selected.
    resident: of these, those that were on the device already.
    moved: tokens brought from the host, K and V of one KV head each.
    pages_used: pages or OP blocks that served.
    pages_hit: of these, those that were on the device already.
  """

  selected: jax.Array
  resident: jax.Array
  moved: jax.Array
  pages_used: jax.Array
  pages_hit: jax.Array


def no_traffic(batch: int, heads: int) -> Traffic:
  """Nothing yet."""
  return Traffic(*(jnp.zeros((batch, heads), jnp.uint32) for _ in Traffic._fields))


def add(traffic: Traffic, **counts: jax.Array) -> Traffic:
  """With counts i32[B, K] of one layer; those not named are zero."""

  def plus(name, total):
    count = counts.get(name)
    return total if count is None else total + count.astype(jnp.uint32)

  return Traffic(*(plus(name, total) for name, total in traffic._asdict().items()))


def totals(cache: Any) -> dict[str, int] | None:
  """What a batch has moved so far, as plain numbers; None for a store without a host tier.

  Args:
    cache: `KVCache` after decode steps; None if it was not kept.

  Returns:
    The fields of `Traffic` over all rows and heads, and `moved_bytes`.
  """
  if cache is None or cache.host is None:
    return None
  counts = {name: int(np.sum(x)) for name, x in cache.store_state.traffic._asdict().items()}
  token = sum(pool.shape[2] * pool.dtype.itemsize for pool in cache.host)  # K and V of one head
  return counts | {"moved_bytes": counts["moved"] * token}
