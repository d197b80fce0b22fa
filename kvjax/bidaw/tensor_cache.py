"""Tensor caching: a history's activations instead of its keys and values (Bidaw, FAST 2026).

Of what a layer makes of a token, Bidaw keeps between turns what saves the most compute for a byte
(`kvjax.bidaw.tensor_costs`). With as many KV heads as query heads that is x, the input of the
layer's projections ("tensor 6" of Fig. 14: the output of the norm before them), half of the bytes:

    K = x W_k + b_k, turned by the position rule if there is one;    V = x W_v + b_v

    policy = keeping(make_policy("dense"))         # x is part of the policy's state
    ...                                            # prefill and decode as ever
    x = activations(cache, row, 0, tokens)         # for host memory or a file
    keys, values = rebuild(model, params, x, runs, capacity_tokens)    # a turn later

**To the bit.** Sums of a product are rounded in an order that XLA chooses by the product's shape,
so the last bit of a token's keys depends on how many tokens were multiplied with it. Hence
`Run`: what was made by a step of B rows and S tokens is rebuilt in products of B*S rows, and then
it is the same on the same machine, in f32 and in bf16. Rebuilt in another shape, on a CPU and in
f32, numbers of an answer differ in their last bits: none at E = 128, 84 in 100 at E = 768. On
another device or version of XLA all may, as those of a prompt that is read again. The paper has no
word about this. What a conversation keeps has the shapes of its steps beside it (`packed`).

Departures. The paper has a low-priority stream for the rebuilding; here it is an ordinary program.
x of a whole row is on the device while a turn runs, half as much again as keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.bidaw.tensor_costs import why_no_activations
from kvjax.cache import KVCache
from kvjax.cache.segments import write_at, write_chunk
from kvjax.config import CacheConfig, ModelConfig
from kvjax.types import DENSE, Inputs, LayerPlan, Model, Params, Policy, State

PIECE_TOKENS = 64  # that one call of the jitted step rebuilds, or one product if that is more


class Run(NamedTuple):
  """Tokens that follow each other and were made by steps of one shape.

  Attributes:
    tokens: how many.
    rows: B of the steps.
    length: S of the steps: `chunk_tokens` of prefill, 1 of decode.
  """

  tokens: int
  rows: int
  length: int


class Kept(flax.struct.PyTreeNode):
  """State of a policy that keeps activations.

  Attributes:
    own: the policy's own state.
    x: f[B, 1, T, E] of each layer, in the dtype of the cache; slot t is position t.
    plan: the policy's own plan.
  """

  own: State
  x: tuple[jax.Array, ...]
  plan: LayerPlan = flax.struct.field(pytree_node=False)


def keeping(policy: Policy) -> Policy:
  """The same policy, whose state has the activations of all tokens besides.

  Keep them in the model's own dtype (`CacheConfig.dtype`), or what is rebuilt is of rounded ones.

  Raises:
    ValueError: the policy drops tokens; when the policy is prepared, it does not pay for the model.
  """
  if policy.keep is not None:
    raise ValueError(
      f"policy {policy.name!r} drops tokens, and activations would bring them back; choose one "
      "that drops none, or keep keys and values"
    )

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    if (reason := why_no_activations(model)) is not None:
      raise ValueError(reason)
    plan, own = policy.register(model, cache)
    shape = cache.batch_size, 1, cache.capacity_tokens, model.embed_dim
    x = tuple(jnp.zeros(shape, cache.dtype) for _ in plan.roles)
    dense = tuple(layer for layer, role in enumerate(plan.roles) if role == DENSE)
    return plan._replace(watched=dense), Kept(own, x, plan)

  def preprocess(state: Kept, inputs: Inputs) -> Kept:
    layer, plan = inputs.layer, state.plan
    x = (*state.x[:layer], _written(state.x[layer], inputs), *state.x[layer + 1 :])
    asked = layer in plan.select_layers or layer in plan.watched
    return state.replace(x=x, own=policy.preprocess(state.own, inputs) if asked else state.own)

  def select(state: Kept, inputs: Inputs):
    selection, own = policy.select(state.own, inputs)
    return selection, state.replace(own=own)

  ahead, settle = policy.ahead, policy.settle
  return policy._replace(
    register=register,
    preprocess=preprocess,
    select=select,
    ahead=ahead and (lambda state, row: ahead(state.own, row)),
    settle=settle and (lambda state, inputs: state.replace(own=settle(state.own, inputs))),
  )


def _written(x: jax.Array, inputs: Inputs) -> jax.Array:
  hidden, positions = inputs.hidden[:, None], inputs.positions
  if hidden.shape[2] == 1:  # what sits the step out has a position beyond every slot
    return write_at((x,), positions[:, 0], hidden[:, :, 0], axis=2)[0]
  return write_chunk((x,), hidden, positions[0, 0], inputs.valid, axis=2)[0]


def activations(cache: KVCache, row: int, start: int, stop: int) -> np.ndarray:
  """What a row has kept of positions start to stop: f[L, stop - start, E], in host memory.

  Of a row that goes on from keys and values that were rebuilt, only what came since is there.

  Raises:
    ValueError: the policy of the cache keeps none.
  """
  state = cache.policy_state
  if not isinstance(state, Kept):
    raise ValueError("the policy of this cache keeps no activations; prepare with keeping(policy)")
  return np.asarray(_of_row(state.x, jnp.int32(row)))[:, start:stop]


@jax.jit
def _of_row(x: tuple[jax.Array, ...], row: jax.Array) -> jax.Array:
  return jnp.stack([jax.lax.dynamic_index_in_dim(one, row, keepdims=False)[0] for one in x])


@partial(jax.jit, static_argnums=3)
def take_activations(state: Kept, slot: jax.Array, start: jax.Array, size: int) -> jax.Array:
  """What a row has kept of size positions from start i32[] on, on the device.

  Returns:
    f[size, L*E], layer after layer; zeros beyond the capacity.
  """
  index = start + jnp.arange(size, dtype=jnp.int32)
  rows = [jax.lax.dynamic_index_in_dim(one, slot, keepdims=False)[0] for one in state.x]
  taken = [jnp.take(row, index, axis=0, mode="fill", fill_value=0) for row in rows]
  return jnp.concatenate(taken, axis=1)


def packed(x: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
  """Activations that know how they were made, for stores that cut and join histories by tokens.

  Args:
    x: f[n, L*E].
    runs: of the n tokens, in their order.

  Returns:
    f[n, L*E + 2]: the last two of a token are B and S of its step, as integers of as many bytes as
    the numbers have; they mean nothing as numbers.
  """
  tokens = [run.tokens for run in runs]
  shapes = np.array([run[1:] for run in runs], _integers(x.dtype))
  return np.concatenate([x, np.repeat(shapes, tokens, axis=0).view(x.dtype)], axis=1)


def unpacked(kept: np.ndarray, layers: int) -> tuple[np.ndarray, list[Run]]:
  """x f[L, n, E] and runs, for `rebuild`, of what `packed` gave, f[n, L*E + 2]."""
  n, width = kept.shape
  shapes = np.ascontiguousarray(kept[:, -2:]).view(_integers(kept.dtype))
  first = np.flatnonzero((np.diff(shapes.astype(int), axis=0, prepend=-1) != 0).any(axis=1))
  tokens = np.diff(first, append=n)
  runs = [Run(int(t), *map(int, shapes[at])) for t, at in zip(tokens, first, strict=True)]
  return kept[:, :-2].reshape(n, layers, (width - 2) // layers).swapaxes(0, 1), runs


def _integers(dtype: np.dtype) -> np.dtype:
  return np.dtype(f"u{dtype.itemsize}")


def rebuild(
  model: Model, params: Params, x: np.ndarray, runs: Sequence[Run], capacity_tokens: int
) -> tuple[jax.Array, jax.Array]:
  """Keys, after the position rule, and values of a history, as they were made.

  Compiles once for each shape of steps and capacity, whatever the length.

  Args:
    model: that made x.
    params: its weights.
    x: f[L, n, E], from `activations`: positions 0 to n - 1.
    runs: in which shapes the n tokens were made, in their order. `Run(n, 1, 512)` for all of them
      is fastest, and right up to rounding.
    capacity_tokens: T, at least n.

  Returns:
    keys and values, f[L, T, K, D] in the dtype of x, zero from n on.

  Raises:
    ValueError: runs of another length than x, or a history longer than T; or it does not pay.
  """
  if (reason := why_no_activations(model.config)) is not None:
    raise ValueError(reason)
  layers, tokens, _ = x.shape
  if sum(run.tokens for run in runs) != tokens or tokens > capacity_tokens:
    raise ValueError(
      f"runs of {sum(run.tokens for run in runs)} tokens for activations of {tokens} and "
      f"{capacity_tokens} slots; the first two must agree and the slots must be enough"
    )
  k, d = model.config.num_kv_heads, model.config.head_dim
  keys, values = (jnp.zeros((layers, capacity_tokens, k, d), x.dtype) for _ in range(2))
  for (rows, length), places in _by_shape(runs).items():
    step = rows * length
    groups = max(1, PIECE_TOKENS // step)
    for first in range(0, len(places), groups * step):
      positions = np.full(groups * step, capacity_tokens, np.int32)  # beyond every slot: nowhere
      some = places[first : first + groups * step]
      positions[: len(some)] = some
      piece = x[:, np.minimum(positions, tokens - 1)].reshape(layers, groups, rows, length, -1)
      positions = positions.reshape(groups, rows, length)
      keys, values = _rebuilt(model, params, keys, values, piece.swapaxes(0, 1), positions)
  return keys, values


def _by_shape(runs: Sequence[Run]) -> dict[tuple[int, int], np.ndarray]:
  """(B, S) -> positions that were made so. Rows of a product do not depend on each other: only how
  many there are matters, so that tokens of several turns share one."""
  shapes: dict[tuple[int, int], list[np.ndarray]] = {}
  first = 0
  for tokens, rows, length in runs:
    shapes.setdefault((rows, length), []).append(np.arange(first, first + tokens, dtype=np.int32))
    first += tokens
  return {shape: np.concatenate(parts) for shape, parts in shapes.items()}


@partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _rebuilt(model: Model, params: Params, keys, values, x, positions):
  """keys and values f[L, T, K, D] with those of x f[n, L, B, S, E] at positions i32[n, B, S]."""

  def group(args):
    x, positions = args
    pairs = [model.keys_values(params, layer, hidden) for layer, hidden in enumerate(x)]
    turned = [model.rotate(k, positions) for k, _ in pairs]
    return jnp.stack(turned), jnp.stack([v for _, v in pairs])

  def put(into, new):  # f[n, L, B, S, K, D]
    new = new.swapaxes(0, 1).reshape(into.shape[0], -1, *into.shape[2:])
    return into.at[:, positions.reshape(-1)].set(new, mode="drop")

  new_keys, new_values = jax.lax.map(group, (x, positions))
  return put(keys, new_keys), put(values, new_values)
