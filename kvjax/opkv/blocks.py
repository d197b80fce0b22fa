"""Metadata of the OP blocks of one layer; their keys and values lie elsewhere (OPKV, "blocks").

An *ordered block* is an ordinary page of C consecutive tokens. An *OP block* is a page of up to C
tokens, wherever they came from, that were copied together because they were selected together. A
layer that selects has a pool of n of them on the device, shared by its X = B*K lists: list
x = b*K + k belongs to KV head k of row b.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.opkv.eviction import Eviction
from kvjax.types import State


class Blocks(NamedTuple):
  """OP blocks of one layer.

  Attributes:
    tokens: i32[n, C], position of the token in each slot; -1 where there is none.
    owner: i32[n], the list x that a block belongs to; -1 for a free one.
    order: state of the eviction, which says what is given up first.
  """

  tokens: jax.Array
  owner: jax.Array
  order: State


def no_blocks(
  num_blocks: int, page_size: int, eviction: Eviction, num_lists: int, capacity_tokens: int
) -> Blocks:
  """A pool of n free blocks of C slots, for X lists of up to T tokens."""
  return Blocks(
    jnp.full((num_blocks, page_size), -1, jnp.int32),
    jnp.full(num_blocks, -1, jnp.int32),
    eviction.start(num_blocks, num_lists * capacity_tokens),
  )


def release(blocks: Blocks, ended: jax.Array) -> Blocks:
  """Frees the blocks of lists that ended, bool[X]: OPKV's `free(request)`.

  OP blocks are destroyed, since their tokens are on the host too.
  """
  gone = owned_by(blocks, ended)
  return blocks._replace(
    tokens=jnp.where(gone[:, None], -1, blocks.tokens), owner=jnp.where(gone, -1, blocks.owner)
  )


def owned_by(blocks: Blocks, lists: jax.Array) -> jax.Array:
  """bool[n]: blocks whose list is among lists bool[X]."""
  return of_owner(lists, blocks.owner, False)


def of_owner(values: jax.Array, owner: jax.Array, free: bool | int) -> jax.Array:
  """Each block's value of values[X], a number of its list; `free` for a block without one."""
  place = jnp.where(owner < 0, values.shape[0], owner)
  return values.at[place].get(mode="fill", fill_value=free)


def per_list(values: jax.Array, owner: jax.Array, num_lists: int) -> jax.Array:
  """i32[X]: sum of values[n] over the blocks of each list."""
  place = jnp.where(owner < 0, num_lists, owner)
  return jnp.zeros(num_lists, jnp.int32).at[place].add(values.astype(jnp.int32), mode="drop")


def flat_tokens(blocks: Blocks, num_lists: int, capacity_tokens: int) -> jax.Array:
  """i32[n, C]: x*T + t of the token in each slot; X*T where there is none."""
  flat = blocks.owner[:, None] * capacity_tokens + blocks.tokens
  return jnp.where(blocks.tokens < 0, num_lists * capacity_tokens, flat)
