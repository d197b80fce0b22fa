"""What policies share that choose single tokens and lose none of the others."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvjax.cache.counting import places
from kvjax.cache.segments import Segments
from kvjax.policies._best import best
from kvjax.types import Inputs, Selection
from pallas_kernels.control import run_if

GROUPS = ("max", "none")


def token_scores(q: jax.Array, keys: Segments, longest: jax.Array) -> jax.Array:
  """Products of queries with keys that a policy keeps in segments, of Z channels each.

  Args:
    q: f[B, K, G, Z].
    keys: f[B, K, Z, Ti] each; what holds no token may be anything.
    longest: i32[], tokens of the longest row; segments beyond are not read on a CPU.

  Returns:
    f32[B, K, G, T], T the sum of the Ti; places that a row does not have must be masked.
  """
  args = (q.astype(keys[0].dtype), tuple(keys), longest)
  return jax.lax.platform_dependent(*args, cpu=_of_reached_segments, default=_of_all_segments)


def check_group(group: str) -> None:
  """Raises ValueError for a group that `combine` does not know."""
  if group not in GROUPS:
    raise ValueError(f"unknown group {group!r}; expected one of {', '.join(GROUPS)}")


def combine(scores: jax.Array, group: str) -> jax.Array:
  """Lists of f32[B, K, G, T] scores: f32[B, K, T], the largest of a group ("max"), or f32[B, H, T],
  one for each query head ("none")."""
  b, k, g, t = scores.shape
  return scores.max(axis=2) if group == "max" else scores.reshape(b, k * g, t)


def tokens_seen(positions: jax.Array, inputs: Inputs) -> jax.Array:
  """bool of the shape of positions i32[B, 1, T]: tokens that the newest one sees, itself too."""
  first, lengths = (x[:, None, None] for x in (inputs.first, inputs.lengths))
  return (positions >= jnp.maximum(first, 0)) & (positions < lengths)


def newest_generated(
  positions: jax.Array, prompt: jax.Array, inputs: Inputs, width: int
) -> jax.Array:
  """bool of the shape of positions i32[B, 1, T]: generated tokens that always have a place.

  They are all that follow the prompt of i32[B] tokens, as long as they fill no more than half of
  the width; beyond that the newest ones.
  """
  first = jnp.maximum(prompt, inputs.lengths - max(1, width // 2))
  return positions >= first[:, None, None]


def best_tokens(
  scores: jax.Array,
  forced: jax.Array,
  seen: jax.Array,
  width: int,
  count: jax.Array | None = None,
) -> jax.Array:
  """The tokens with the largest scores, those that are forced before all others.

  Args:
    scores: f32[B, X, T], of X lists; anything where no token is seen.
    forced: bool[B, 1, T], chosen whatever their scores, if they are seen.
    seen: bool[B, 1, T].
    width: most tokens of a list.
    count: i32[B, 1, 1], most tokens of the lists of a row, at most width; None for width.

  Returns:
    bool[B, X, T], those that are chosen; of equal scores the first.
  """
  ranked = jnp.where(seen, jnp.where(forced, jnp.inf, scores), -jnp.inf)
  return best(ranked, width if count is None else count)


def by_position(chosen: jax.Array, positions: jax.Array, capacity: int) -> jax.Array:
  """bool[B, X, capacity] of slots chosen bool[B, X, T] that hold positions i32[B, X, T]."""
  b, x, _ = chosen.shape
  at = jnp.where(chosen, positions, capacity)
  lists = jnp.arange(b)[:, None, None], jnp.arange(x)[None, :, None]
  return jnp.zeros((b, x, capacity), bool).at[(*lists, at)].set(True, mode="drop")


def select_tokens(chosen: jax.Array, width: int, page_size: int) -> Selection:
  """The selection of tokens bool[B, X, T] by position, at most width of a list, in order.

  For stores that lose nothing: there a token's slot is its position.
  """
  total = chosen.shape[-1]
  found = places(chosen, min(width, total))
  there, at = found < total, jnp.minimum(found, total - 1)
  return Selection(at // page_size, there[..., None], at % page_size, tokens=chosen)


def _of_reached_segments(q, keys, longest):
  scores, offset = [_products(q, keys[0])], keys[0].shape[-1]
  for segment in keys[1:]:
    unread = jnp.zeros((*q.shape[:3], segment.shape[-1]), jnp.float32)
    read = partial(_products, q, segment)
    scores.append(run_if(longest > offset, lambda _, read=read: read(), unread))
    offset += segment.shape[-1]
  return jnp.concatenate(scores, axis=-1)


def _of_all_segments(q, keys, longest):
  """No branch, which would cost a GPU a round trip to the host."""
  del longest
  return jnp.concatenate([_products(q, segment) for segment in keys], axis=-1)


def _products(q, segment):
  return jnp.einsum("bkgz,bkzt->bkgt", q, segment, preferred_element_type=jnp.float32)
