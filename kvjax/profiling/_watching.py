"""A policy that changes nothing and looks at every layer: how a model is measured as it runs."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.config import CacheConfig, ModelConfig
from kvjax.types import DENSE, Inputs, LayerPlan, Policy, State


def watching(
  name: str,
  begin: Callable[[ModelConfig, CacheConfig], State],
  watch: Callable[[State, Inputs], State],
) -> Policy:
  """A dense policy with a memory; `cache.policy_state` has what it has seen.

  Args:
    name: of the policy.
    begin: the memory before the first token.
    watch: called for every layer, for each prefill chunk and each decode token.
  """

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    layers = model.num_layers
    return LayerPlan((DENSE,) * layers, watched=tuple(range(layers))), begin(model, cache)

  def select(state: State, inputs: Inputs):
    raise AssertionError(f"layer {inputs.layer} of a dense policy was asked to select")

  return Policy(
    name=name,
    budget_tokens=None,
    stores=("resident",),
    register=register,
    preprocess=watch,
    select=select,
  )
