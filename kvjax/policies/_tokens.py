"""What policies share that choose single tokens and lose none of the others."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvjax.cache.segments import Segments
from kvjax.policies._best import best_places
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
) -> tuple[jax.Array, jax.Array]:
  """The tokens with the largest scores, those that are forced before all others.

  Args:
    scores: f32[B, X, T], of X lists; anything where no token is seen.
    forced: bool[B, 1, T], chosen whatever their scores, if they are seen.
    seen: bool[B, 1, T].
    width: most tokens of a list.
    count: i32[B, 1, 1], most tokens of the lists of a row, at most width; None for width.

  Returns:
    Places i32[B, X, M] along T, ascending, of equal scores the first, and which of them are chosen,
    bool[B, X, M]. M is width, or T where that is less.
  """
  ranked = jnp.where(seen, jnp.where(forced, jnp.inf, scores), -jnp.inf)
  width = min(width, scores.shape[-1])
  return best_places(ranked, width if count is None else count, width)


def select_tokens(positions: jax.Array, chosen: jax.Array, page_size: int) -> Selection:
  """The selection of tokens by position i32[B, X, M] where chosen bool[B, X, M].

  For stores that lose nothing: there a token's slot is its position.
  """
  return Selection(positions // page_size, chosen[..., None], positions % page_size)


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
