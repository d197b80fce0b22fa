"""SnapKV's choice of prompt tokens, for any rule of how many a layer keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies._attention import empty_ring, grouped, received_from_ring, remember
from kvjax.policies._dropping import best_and_newest, everything_held, with_layer
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State

POOLS = ("mean", "max")
GROUPS = ("mean", "max")

Capacity = Callable[[jax.Array, int, int], jax.Array]


def snap_policy(
  name: str,
  budget_tokens: int,
  page_size: int,
  *,
  capacity: Capacity,
  most_tokens: int,
  window: int,
  kernel: int,
  pool: str,
  group: str,
  new_tokens: int,
) -> Policy:
  """A policy that keeps the last tokens of a prompt and those that they attend to most.

  Until the prompt has been read, the state of a layer is a ring of its newest queries,
  f[B, K, W, G, D]; from then on it is empty.

  Args:
    name: of the policy.
    budget_tokens: of the policy; checked here.
    page_size: C.
    capacity: `capacity(lengths i32[B], row, rows) -> i32[B]`, prompt tokens that the selecting
      layer `row` of `rows` keeps, the window included, of prompts of these lengths.
    most_tokens: most that capacity gives.
    window: W, tokens at the end of the prompt that are kept and whose attention counts.
    kernel: neighbours that share their scores.
    pool: how.
    group: how the G query heads of a KV head become one.
    new_tokens: room for generated tokens.
  """
  _check(name, budget_tokens, window, kernel, pool, group, new_tokens)

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    shape = (cache.batch_size, model.num_kv_heads, window, model.group_size, model.head_dim)
    rings = tuple(empty_ring(*shape, cache.dtype) for _ in range(model.num_layers))
    return LayerPlan((SELECT,) * model.num_layers), rings

  def preprocess(state: State, inputs: Inputs) -> State:
    if inputs.q.shape[1] == 1:  # decode: nothing is chosen any more
      return state
    ring = remember(state[inputs.row], grouped(inputs.q, inputs), inputs)
    return with_layer(state, inputs, ring)

  def keep(state: State, inputs: Inputs) -> tuple[jax.Array, State]:
    scores = _scores(state[inputs.row], inputs, kernel, pool, group)
    count = capacity(inputs.lengths, inputs.row, len(state)) - window
    return best_and_newest(scores, inputs, count, window), with_layer(state, inputs, ())

  def keeps(row: int, rows: int, heads: int, slots: int) -> Sequence[int]:
    with jax.ensure_compile_time_eval():  # shapes follow from it
      prompts = jnp.arange(1, slots + 1)
      tokens = int(jnp.minimum(capacity(prompts, row, rows), prompts).max())
    return (min(tokens + new_tokens, slots),) * heads

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    return everything_held(inputs, page_size), state

  return Policy(
    name=name,
    budget_tokens=most_tokens + new_tokens,
    stores=("compact",),
    register=register,
    preprocess=preprocess,
    select=select,
    keep=keep,
    keeps=keeps,
    page_size=page_size,
  )


def _scores(ring: jax.Array, inputs: Inputs, kernel: int, pool: str, group: str) -> jax.Array:
  """f32[B, K, T] of the prompt, whose tokens still lie in the slots of their positions."""
  received = received_from_ring(ring, inputs)
  before = inputs.slot_positions < (inputs.lengths - ring.shape[2])[:, None, None]
  received = jnp.where(before[:, :, None], received, 0.0)
  width, ones = (1, 1, 1, kernel), (1, 1, 1, 1)
  if pool == "mean":
    pooled = jax.lax.reduce_window(received, 0.0, jax.lax.add, width, ones, "SAME") / kernel
  else:
    pooled = jax.lax.reduce_window(received, 0.0, jax.lax.max, width, ones, "SAME")
  return pooled.mean(axis=2) if group == "mean" else pooled.max(axis=2)


def _check(name, budget_tokens, window, kernel, pool, group, new_tokens) -> None:
  if window < 1 or budget_tokens <= window:
    raise ValueError(
      f"{name} needs a budget over its window of at least 1 token, and has budget_tokens "
      f"{budget_tokens} and window {window}; give a larger budget or a smaller window"
    )
  if kernel < 1 or kernel % 2 == 0:
    raise ValueError(f"{name} kernel {kernel} must be odd and positive; 5 is the original's")
  if new_tokens < 1:
    raise ValueError(f"{name} new_tokens {new_tokens} must be positive: generated tokens are kept")
  for option, value, known in (("pool", pool, POOLS), ("group", group, GROUPS)):
    if value not in known:
      raise ValueError(f"{name} {option} {value!r} is not one of {', '.join(known)}")
