"""OmniKV's filter layers (Hao et al., ICLR 2025): whose choice of tokens serves the layers above.

In each decode step of a calibration text every layer chooses the tokens that it attends to most,
under the largest softmax of its heads, and every layer above says how much of its own attention,
on average over its heads, falls on them: the captured mass. The original picks layers by hand from
such a table; the greedy choice is ours.

    runner = prepare(model, watch_attention(), "resident", cache_config)
    cache = prefill(runner, params, [prompt])[1]
    for token in more: cache = decode_step(runner, params, cache, [token])[1]
    policy = make_policy("omnikv", filter_layers=choose_filters(captured(cache.policy_state), 3))
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import CacheConfig, ModelConfig
from kvjax.profiling._watching import watching
from kvjax.types import Inputs, Policy

METHOD = "filter_layers"


class _Seen(NamedTuple):
  """Tokens that each layer has chosen in this step, bool[B, L, T]; captured mass of layer l by
  each of the layers, f32[B, L], summed over steps; steps i32[B]."""

  chosen: jax.Array
  mass: tuple[jax.Array, ...]
  steps: jax.Array


def watch_attention(share: float = 0.067) -> Policy:
  """A dense policy that remembers how much of a layer's attention the choice of others captures.

  Args:
    share: of the tokens that a layer chooses, rounded up; the original's 0.067 by default.

  Raises:
    ValueError: a share outside (0, 1].
  """
  if not 0 < share <= 1:
    raise ValueError(f"share {share} must be within (0, 1]")

  def begin(model: ModelConfig, cache: CacheConfig) -> _Seen:
    b, layers = cache.batch_size, model.num_layers
    mass = tuple(jnp.zeros((b, layers), jnp.float32) for _ in range(layers))
    chosen = jnp.zeros((b, layers, cache.slots_per_row), bool)
    return _Seen(chosen, mass, jnp.zeros(b, jnp.int32))

  def watch(state: _Seen, inputs: Inputs) -> _Seen:
    if inputs.q.shape[1] > 1:  # prefill: the original counts what is generated
      return state
    layer, weights = inputs.layer, _weights(inputs)
    best = weights.max(axis=1)  # f32[B, T]
    count = jnp.ceil(share * inputs.lengths.astype(jnp.float32)).astype(jnp.int32)
    least = jnp.take_along_axis(-jnp.sort(-best, axis=-1), count[:, None] - 1, axis=-1)
    chosen = state.chosen.at[:, layer].set((best >= least) & (best > 0))
    mass = jnp.einsum("blt,bt->bl", chosen.astype(jnp.float32), weights.mean(axis=1))
    mass = (*state.mass[:layer], state.mass[layer] + mass, *state.mass[layer + 1 :])
    return _Seen(chosen, mass, state.steps + int(layer == 0))

  return watching("watch_attention", begin, watch)


def captured(state: _Seen) -> np.ndarray:
  """f32[L, L]: share of the attention of layer l (second axis) that falls on the choice of layer f.

  Zero where f is above l. The mean over rows and steps of what `watch_attention` remembers.
  """
  steps = int(np.asarray(state.steps).sum())
  if not steps:
    raise ValueError("no decode step was watched; decode some tokens after prefill")
  mass = np.stack([np.asarray(layer).sum(axis=0) for layer in state.mass], axis=1)
  return np.triu(mass / steps).astype(np.float32)


def choose_filters(
  mass: np.ndarray, count: int, *, first: int = 2, wait_layers: int = 1
) -> tuple[int, ...]:
  """Filter layers, one after the other the one that raises the captured mass most.

  Args:
    mass: f32[L, L], from `captured`.
    count: filter layers, at least 1; fewer where more would not capture more.
    first: the first of them; the layers below it stay dense.
    wait_layers: dense layers behind a filter layer; like filter layers they count as 1.

  Raises:
    ValueError: count or first outside their ranges.
  """
  layers = len(mass)
  if count < 1 or not 0 <= first < layers:
    raise ValueError(
      f"count {count} must be at least 1, and first {first} one of the model's {layers} layers"
    )

  def total(filters: tuple[int, ...]) -> float:
    owner = [max(f for f in filters if f <= layer) for layer in range(first, layers)]
    return sum(
      1.0 if layer - f <= wait_layers else float(mass[f, layer])
      for layer, f in enumerate(owner, first)
    )

  filters = (first,)
  for _ in range(count - 1):
    others = [layer for layer in range(first, layers) if layer not in filters]
    best = max(others, key=lambda layer: total((*filters, layer)), default=None)
    if best is None or total((*filters, best)) <= total(filters):
      break
    filters = (*filters, best)
  return tuple(sorted(filters))


def _weights(inputs: Inputs) -> jax.Array:
  """f32[B, H, T]: attention of the newest token of each row, zero where there is none."""
  b, k, t = inputs.slot_positions.shape
  d = inputs.q.shape[-1]
  q = inputs.q.reshape(b, k, -1, d).astype(jnp.float32) * d**-0.5
  scores = jnp.einsum("bkgd,bktd->bkgt", q, inputs.keys().astype(jnp.float32))
  seen = inputs.slot_positions >= jnp.maximum(inputs.first, 0)[:, None, None]
  scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
  return jax.nn.softmax(scores, axis=-1).reshape(b, -1, t)
