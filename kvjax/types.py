"""Axis letters and contracts. Imports nothing of kvjax but `config`.

Every comment, docstring and einsum of this code base uses these letters only:

    B  batch rows                 H  query heads            N  pages in a pool
    S  tokens of this call        K  KV heads               P  pages of a row (table width)
    T  key slots                  G  query heads a KV head  C  slots of a page
    L  layers                     D  head size              M  selected pages
    E  model width                F  feed-forward width     V  vocabulary

A dtype comes before its shape: `i32[B, P]`; `f` is the dtype of the model or of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from kvjax.config import ModelConfig

Params = Any  # a pytree of arrays
State = Any  # a pytree of arrays


class Rotate(Protocol):
  """The position rule of a model, applied to queries and keys alike.

  `rotate(x, positions)`: x f[B, S, heads, D], positions i32[B, S] -> f[B, S, heads, D]. Models
  whose positions are not in the attention (OPT) return x.
  """

  def __call__(self, x: jax.Array, positions: jax.Array, /) -> jax.Array: ...


class Attend(Protocol):
  """The one function by which a model attends; the engine builds it (`kvjax.engine.attend`).

  `attend(layer, q, k, v, cache, hidden)`: layer is a static int, q f[B, S, H, D], k and v
  f[B, S, K, D], all three before `Rotate`, hidden f[B, S, E] the input of the layer's
  projections. Returns f[B, S, H, D] and the cache that now holds k and v.
  """

  def __call__(
    self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: State, hidden: jax.Array, /
  ) -> tuple[jax.Array, State]: ...


class Model(NamedTuple):
  """What is computed: static config and pure functions.

  Attributes:
    config: the static shape.
    init: `init(key, dtype) -> params`, random weights.
    forward: `forward(params, tokens i32[B, S], positions i32[B, S], cache, attend)
      -> f[B, S, E], cache`: embeddings, layers and the final norm, without the head.
    unembed: `unembed(params, x f[B, E]) -> f32[B, V]`, the head.
    rotate: the position rule.
  """

  config: ModelConfig
  init: Callable[..., Params]
  forward: Callable[..., tuple[jax.Array, State]]
  unembed: Callable[[Params, jax.Array], jax.Array]
  rotate: Rotate
