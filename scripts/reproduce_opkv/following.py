"""Which tokens a policy selects while its model is given a text, token by token."""

from __future__ import annotations

import inspect
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from eval import replay
from kvjax import KVCache, Runner, decode_step, prepare
from kvjax.stores.resident import slots_of
from kvjax.types import Params, Policy
from scripts.reproduce_opkv.case import Case, cache_config, policy_of


class Followed(NamedTuple):
  """What was selected in S steps, in each of the R layers that select.

  Attributes:
    runner: the policy with everything on the device, which selected.
    selected: bool[S, R, K, T], tokens by position.
    prompt_tokens: tokens before the first step; step s attends to prompt_tokens + s + 1 tokens.
  """

  runner: Runner
  selected: np.ndarray
  prompt_tokens: int

  @property
  def policy(self) -> Policy:
    """The policy."""
    return self.runner.policy

  @property
  def layers(self) -> tuple[int, ...]:
    """The R layers."""
    return self.runner.plan.select_layers


def follow(case: Case, spec: str, percent: int | None = None) -> Followed:
  """Decodes the text of a case, the policy attending to what it selects.

  Args:
    case: model and text.
    spec: of the policy.
    percent: its budget in percent of the prompt; None for that of the case.

  Raises:
    ValueError: the policy selects nothing on this model.
  """
  config = cache_config(case)
  runner = prepare(case.loaded.model, policy_of(case, spec, percent), "resident", config)
  layers, heads = runner.plan.select_layers, case.loaded.model.config.num_kv_heads
  if not layers:
    raise ValueError(
      f"policy {spec!r} selects in no layer of {case.loaded.name}; take one that does, as infinigen"
    )
  cache = replay.replayed(runner, case.loaded.params, case.recording)[1]
  total = config.pages_per_row * config.page_size
  selected = np.zeros((len(case.following), len(layers), heads, total), bool)
  for step, token in enumerate(tqdm(case.following, desc=f"{spec} decodes", leave=False)):
    tokens = jnp.array([token], jnp.int32)
    chosen, cache = _watched_step(runner, case.loaded.params, cache, tokens)
    for row, (slots, mask) in enumerate(chosen):
      places = np.where(mask, slots, total).reshape(heads, -1)
      head, place = np.nonzero(places <= case.prompt_tokens + step)
      selected[step, row, head, places[head, place]] = True
  return Followed(runner, selected, case.prompt_tokens)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _watched_step(
  runner: Runner, params: Params, cache: KVCache, tokens: jax.Array
) -> tuple[list[tuple[jax.Array, jax.Array]], KVCache]:
  """A decode step, and of each selecting layer positions i32[1, K, ...] and which of them count."""
  chosen = []

  def select(state, inputs):
    selection, state = runner.policy.select(state, inputs)
    slots = slots_of(selection, runner.decode_config.page_size)
    chosen.append((slots, jnp.broadcast_to(selection.mask, slots.shape)))
    return selection, state

  watched = runner._replace(policy=runner.policy._replace(select=select))
  _, cache = inspect.unwrap(decode_step)(watched, params, cache, tokens)
  return chosen, cache
