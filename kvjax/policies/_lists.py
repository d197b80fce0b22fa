"""Lists of pages that outlive a step: what policies share that do not rank at every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _kept
from kvjax.policies._digests import Digest
from kvjax.policies._pages import replaced
from kvjax.types import Inputs


class Listed(NamedTuple):
  """State of a policy all of whose layers select.

  Attributes:
    digests: what each layer keeps of its pages.
    lists: i32[B, heads, M] of each layer, best page first; P where there is none.
    prompt: i32[B], tokens of the prompt. A row's decode step is its length beyond that, from 1.
  """

  digests: tuple[_kept.Kept, ...]
  lists: tuple[jax.Array, ...]
  prompt: jax.Array


def no_lists(
  digest: Digest, model: ModelConfig, cache: CacheConfig, page_size: int, heads: int, width: int
) -> Listed:
  """The state before the first token; digests are of pages of page_size tokens, and lists of width
  pages, or of all where a row has fewer."""
  b, layers = cache.batch_size, model.num_layers
  width = min(width, cache.pages_per_row)
  return Listed(
    _kept.no_digests(digest, model, cache, layers, page_size),
    tuple(jnp.zeros((b, heads, width), jnp.int32) for _ in range(layers)),
    jnp.zeros(b, jnp.int32),
  )


def with_keys(digest: Digest, state: Listed, inputs: Inputs, page_size: int) -> Listed:
  """The state after the keys of a chunk or of one token a row."""
  kept = _kept.with_keys(digest, state.digests[inputs.row], inputs, page_size)
  prompt = inputs.lengths if inputs.k.shape[1] > 1 else state.prompt
  return state._replace(digests=replaced(state.digests, inputs.row, kept), prompt=prompt)


def with_list(state: Listed, inputs: Inputs, listed: jax.Array) -> Listed:
  """The state after one token a row, with another list i32[B, heads, M] of this layer."""
  listed = jnp.where(inputs.valid[..., None], listed, state.lists[inputs.row])
  return state._replace(lists=replaced(state.lists, inputs.row, listed))


def with_born(pages: jax.Array, known: jax.Array, now: jax.Array) -> jax.Array:
  """An old list brought up to date: pages born since take the places of its worst ones.

  Args:
    pages: i32[B, heads, M], best first.
    known: i32[B, 1 or heads], pages that the row had when they were listed.
    now: i32[B], pages that it has, fewer than known + M.
  """
  born = known[..., None] + jnp.arange(pages.shape[-1])[None, None, ::-1]
  return jnp.where(born < now[:, None, None], born, pages)


def where_due[Kept](due: jax.Array, rank: Callable[[], Kept], old: Kept) -> Kept:
  """Lists i32[B, heads, M], or a tree of what is kept of heads: rank() where due, else old.

  A CPU does not rank where nothing is due; on a GPU a branch costs more than the ranking.

  Args:
    due: bool[B] or bool[B, heads].
    rank: makes the new ones.
    old: the others.
  """

  def chosen(new, old):
    return jnp.where(due.reshape(*due.shape, *(1,) * (old.ndim - due.ndim)), new, old)

  def renew(old):
    return jax.tree.map(chosen, rank(), old)

  def if_any(old):
    return jax.lax.cond(due.any(), renew, lambda old: old, old)

  return jax.lax.platform_dependent(old, cpu=if_any, default=renew)


def promised(scores: jax.Array, there: jax.Array, head_dim: int) -> jax.Array:
  """f32[B, K, P]: share of attention that scores f32[B, K, G, P] of q . k promise to each page of
  there bool[B, 1, P], the mean over the G query heads."""
  scaled = jnp.where(there[:, :, None], scores * head_dim**-0.5, -jnp.inf)
  return jax.nn.softmax(scaled, axis=-1).mean(axis=2)


def on(shares: jax.Array, pages: jax.Array) -> jax.Array:
  """f32[B, K]: the sum of shares f32[B, K, P] over pages i32[B, K, M]; P is none."""
  return jnp.take_along_axis(shares, pages, axis=-1, mode="fill", fill_value=0).sum(axis=-1)


def heads_of(pairs: Collection[Sequence[int]]) -> frozenset[tuple[int, int]]:
  """Pairs (layer, KV head) as tuples, whether they came as lists, as an array or as they are."""
  return frozenset((int(layer), int(head)) for layer, head in pairs)


def heads_in_layer(heads: frozenset[tuple[int, int]], layer: int, num_heads: int) -> np.ndarray:
  """bool[K], static: which KV heads of a layer are among these pairs."""
  return np.isin(np.arange(num_heads), [head for of, head in heads if of == layer])


def heads_by_layer(
  heads: frozenset[tuple[int, int]], num_layers: int
) -> tuple[tuple[int, ...], ...]:
  """Of each layer, ascending, the KV heads that are among these pairs."""
  return tuple(
    tuple(sorted(head for of, head in heads if of == layer)) for layer in range(num_layers)
  )


def check_heads(
  policy: str, option: str, heads: frozenset[tuple[int, int]], model: ModelConfig
) -> None:
  """Raises ValueError for a pair (layer, KV head) in an option of a policy that the model lacks."""
  for layer, head in sorted(heads):
    if not (0 <= layer < model.num_layers and 0 <= head < model.num_kv_heads):
      raise ValueError(
        f"policy {policy!r}: {option} names KV head {head} of layer {layer}; the model has "
        f"{model.num_layers} layers of {model.num_kv_heads} KV heads"
      )
