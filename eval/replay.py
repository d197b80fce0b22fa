"""Prompts that are prefilled once and decoded under any number of policies.

Prefill is dense under every policy, so that all of them are given the same queries, keys and values
in it. `record` runs it once and notes what each layer projects; `replayed` gives a runner's policy
and store these notes instead of a model, which leaves the cache that the runner's own prefill would
have made, without a product of weights or an attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache as cached
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import CacheConfig, KVCache, ModelConfig, Runner, decode_step, prepare
from kvjax.engine.generate import prefill
from kvjax.types import DENSE, LayerPlan, Model, Params, Policy, Selection, State


class Projected(NamedTuple):
  """What a layer projects of a prompt, before the position rule; S the prompt in whole chunks.

  Attributes:
    q: f[B, S, H, D].
    k: f[B, S, K, D].
    v: f[B, S, K, D].
    hidden: f[B, S, E], what they are made of.
  """

  q: Any
  k: Any
  v: Any
  hidden: Any


class Recording(NamedTuple):
  """The prompts of a batch.

  Attributes:
    prompts: the tokens of each row.
    last: f[B, E], the hidden state of the last of them.
    layers: what each of the L layers made.
  """

  prompts: Sequence[Sequence[int]]
  last: jax.Array
  layers: tuple[Projected, ...]


def recorder(model: Model, cache_config: CacheConfig) -> Runner:
  """A dense runner for `record`, which notes in the dtype of the cache."""
  return prepare(_recording(model), _notes(), "resident", cache_config)


def record(
  runner: Runner,
  params: Params,
  prompts: Sequence[Sequence[int]],
  progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Recording:
  """Prefills with a `recorder`; progress as in `generate`."""
  last, cache = prefill(runner, params, prompts, progress)
  return Recording(prompts, last, cache.policy_state)


def replayed(runner: Runner, params: Params, recording: Recording) -> tuple[jax.Array, KVCache]:
  """What `prefill(runner, params, recording.prompts)` gives.

  A recording of one prompt serves a batch of its copies: `recording._replace(prompts=prompts * b)`.
  Then only the cache is that of the batch.
  """
  source = runner._replace(model=_replaying(runner.model))
  return recording.last, prefill(source, (params, recording.layers), recording.prompts)[1]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def replayed_step(
  runner: Runner, attended: bool, params: Params, layers: tuple[Projected, ...], cache: KVCache
) -> tuple[list[Selection], jax.Array, KVCache]:
  """A decode step of a recorded token, the one behind what the cache holds, without the model.

  The token is kept, and the policy looks at it and selects.

  Args:
    runner: of batch size 1.
    attended: attention over what was selected is computed too.
    params: weights, for policies that make queries of another layer.
    layers: of a recording that is longer than what the cache holds.
    cache: is donated.

  Returns:
    What each selecting layer selected, what attention gave (summed up), and the cache.
  """
  chosen = []

  def select(state, inputs):
    selection, state = runner.policy.select(state, inputs)
    chosen.append(selection)
    return selection, state

  source = runner._replace(
    model=_step_model(runner.model, attended, chosen), policy=runner.policy._replace(select=select)
  )
  token = jnp.zeros_like(cache.lengths)  # nobody looks at it
  total, cache = inspect.unwrap(decode_step)(source, (params, layers), cache, token)
  return chosen, total, cache


def _notes() -> Policy:
  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    # A whole chunk is written even where the prompt ends within it; the longest has 1,024 tokens.
    tokens = -(-cache.capacity_tokens // 1024) * 1024

    def zeros(*shape: int) -> jax.Array:
      return jnp.zeros((cache.batch_size, tokens, *shape), cache.dtype)

    h, k, d = model.num_heads, model.num_kv_heads, model.head_dim
    layers = tuple(
      Projected(zeros(h, d), zeros(k, d), zeros(k, d), zeros(model.embed_dim))
      for _ in range(model.num_layers)
    )
    return LayerPlan((DENSE,) * model.num_layers), layers

  def select(state: State, inputs):
    raise AssertionError(f"layer {inputs.layer} of a dense policy was asked to select")

  return Policy("notes", None, ("resident",), register, lambda state, inputs: state, select)


@cached  # one object, so that what is compiled for it is found again
def _recording(model: Model) -> Model:
  def forward(params, tokens, positions, cache, attend):
    def noting(layer, q, k, v, cache, hidden):
      out, cache = attend(layer, q, k, v, cache, hidden)
      layers, start = cache.policy_state, positions[0, 0]

      def write(whole, part):
        return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, axis=1)

      noted = jax.tree.map(write, layers[layer], Projected(q, k, v, hidden))
      return out, cache.replace(policy_state=(*layers[:layer], noted, *layers[layer + 1 :]))

    return model.forward(params, tokens, positions, cache, noting)

  return model._replace(forward=forward)


@cached
def _replaying(model: Model) -> Model:
  """A model that gives back what was recorded, whatever attention gives: it is not computed."""

  def forward(params, tokens, positions, cache, attend):
    layers = params[1]
    for layer, whole in enumerate(layers):
      part = _part(whole, positions[0, 0], tokens.shape)
      _, cache = attend(layer, part.q, part.k, part.v, cache, part.hidden)
    return jnp.zeros_like(layers[0].hidden, shape=(*tokens.shape, model.config.embed_dim)), cache

  return _of_recording(model, forward)


def _step_model(model: Model, attended: bool, chosen: list[Selection]) -> Model:
  """As `_replaying`, for one token, and adds up what attention gives if that is asked for.

  A layer waits for what the one before selected and attended to, as in a model: XLA copies pools
  where it may write a layer's token before all is read.
  """

  def forward(params, tokens, positions, cache, attend):
    layers = params[1]
    x = jnp.zeros_like(layers[0].hidden, shape=(*tokens.shape, model.config.embed_dim))
    for layer, whole in enumerate(layers):
      part = _part(whole, positions[0, 0], tokens.shape)
      part, x, chosen[-1:] = jax.lax.optimization_barrier((part, x, chosen[-1:]))
      out, cache = attend(layer, part.q, part.k, part.v, cache, part.hidden)
      x = x + out.sum() if attended else x
    return x, cache

  return _of_recording(model, forward)


def _part(whole: Projected, start: jax.Array, shape: tuple[int, ...]) -> Projected:
  """Of the rows and tokens of a call; all rows are the recorded one where there is one."""

  def cut(a: jax.Array) -> jax.Array:
    part = jax.lax.dynamic_slice_in_dim(a, start, shape[1], axis=1)
    return jnp.broadcast_to(part, (shape[0], *part.shape[1:]))

  return jax.tree.map(cut, whole)


def _of_recording(model: Model, forward) -> Model:
  def query(params, layer, hidden):
    return model.query(params[0], layer, hidden)

  def unembed(params, x):
    del params
    return x.astype(jnp.float32)

  return model._replace(forward=forward, query=query, unembed=unembed)
