"""What a policy that selects tokens is shown, and what it chooses, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import KVCache, Runner
from kvjax.engine import steps
from kvjax.types import Model
from tests.models import naive


class Shown(NamedTuple):
  """One decode step.

  Attributes:
    q: for each layer that the policy sees f[B, K, G, D], after the position rule.
    next_q: what the layer above would ask with, made of the input of this one.
    keys: f[B, K, T, D].
    positions: i32[B, K, T], of the slots; negative where there is no token.
    chosen: for each selecting layer, row and head the set of positions.
    logits: f32[B, V].
    cache: after the step.
  """

  q: dict[int, np.ndarray]
  next_q: dict[int, np.ndarray]
  keys: dict[int, np.ndarray]
  positions: dict[int, np.ndarray]
  chosen: dict[int, list[list[set[int]]]]
  logits: np.ndarray
  cache: KVCache


def decode(runner: Runner, params, cache: KVCache, tokens: Sequence[int]) -> Shown:
  """A decode step of tokens, one a row; the cache that it was given may be used again."""
  logits, shown, chosen, cache = _decode(runner, params, cache, np.array(tokens, np.int32))
  size = runner.decode_config.page_size
  sets = {layer: _sets(selection, size) for layer, selection in chosen.items()}
  fields = [{layer: np.asarray(x[i]) for layer, x in shown.items()} for i in range(4)]
  return Shown(*fields, sets, np.asarray(logits), cache)


def queries_and_keys(model: Model, params, row: Sequence[int]) -> list[list[np.ndarray]]:
  """For each layer f[S, H, D] and f[S, K, D] of a plain pass over one row, as they attend."""
  padded = jnp.asarray([[*row, *[0] * (-len(row) % 192)]])  # so that few shapes are compiled
  return [[np.asarray(x)[0, : len(row)] for x in layer] for layer in _plain(model, params, padded)]


@partial(jax.jit, static_argnums=0)
def _plain(model, params, tokens):
  seen, inner = [], naive.attend_with(model.rotate)
  positions = jnp.arange(tokens.shape[1])[None]

  def attend(layer, q, k, *rest):
    seen.append([model.rotate(x, positions) for x in (q, k)])
    return inner(layer, q, k, *rest)

  model.forward(params, tokens, positions, naive.empty_cache(model.config, 1), attend)
  return seen


@partial(jax.jit, static_argnums=0)
def _decode(runner, params, cache, tokens):
  shown, chosen = {}, {}
  last = runner.model.config.num_layers - 1

  def spy(state, inputs):
    b, k = inputs.slot_positions.shape[:2]
    ahead = inputs.project(min(inputs.layer + 1, last))
    q, ahead = (x.reshape(b, k, -1, x.shape[-1]) for x in (inputs.q, ahead))
    shown[inputs.layer] = (q, ahead, inputs.keys(), inputs.slot_positions)
    return runner.policy.preprocess(state, inputs)

  spied = runner._replace(policy=runner.policy._replace(preprocess=spy))
  logits, cache = steps._decode(spied, params, cache, tokens, watch=chosen.__setitem__)
  return logits, shown, chosen, cache


def _sets(selection, page_size):
  positions = np.asarray(selection.pages) * page_size + np.asarray(selection.slots)
  mask = np.asarray(selection.mask)[..., 0]
  for head, kept in zip(positions.reshape(-1, mask.shape[-1]), mask.reshape(-1, mask.shape[-1]),
                        strict=True):  # fmt: skip
    assert len(set(head[kept].tolist())) == kept.sum(), "a token was chosen twice"
  return [
    [set(p[m].tolist()) for p, m in zip(*row, strict=True)]
    for row in zip(positions, mask, strict=True)
  ]
