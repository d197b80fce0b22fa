"""Attends to everything: the baseline that all else is compared with."""

from __future__ import annotations

from kvjax.config import CacheConfig, ModelConfig
from kvjax.types import DENSE, LayerPlan, Policy, State


def dense() -> Policy:
  """Every layer is contiguous; nothing is ever selected."""

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    del cache
    return LayerPlan((DENSE,) * model.num_layers), ()

  def select(state, inputs):
    raise AssertionError(f"layer {inputs.layer} of a dense policy was asked to select")

  return Policy(
    name="dense",
    budget_tokens=None,
    stores=("resident",),
    register=register,
    preprocess=lambda state, inputs: state,
    select=select,
  )
