"""DuoAttention (Xiao et al., ICLR 2025): retrieval heads keep everything, streaming heads little.

Which KV heads need the whole context is found once a model, by training a gate a head
(`kvjax.profiling.duo_gates`), and is static: those with the highest gates. The others, the
streaming heads, keep the first tokens and the most recent ones; what they drop is dropped for good,
and their pages do not exist.

The pattern is given as such a profile, or as the heads that keep everything. Prefill is dense in
all heads, as everywhere here; the original's streaming heads are sparse in prefill too. A decode
step still gathers as many places for a streaming head as for a full one, masked: bytes are saved,
time on a CPU is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _profile
from kvjax.policies._dropping import everything_held
from kvjax.types import SELECT, Inputs, LayerPlan, Policy, Selection, State


def duo(
  budget_tokens: int = 320,
  page_size: int = 16,
  *,
  full_heads: Sequence[tuple[int, int]] = (),
  profile: _profile.Source = None,
  sparsity: float = 0.5,
  sinks: int = 64,
) -> Policy:
  """DuoAttention's static pattern.

  Args:
    budget_tokens: tokens of a streaming head, sinks included; the original deploys 64 + 256.
    page_size: C.
    full_heads: (layer, KV head) of those that keep everything; none of them by default.
    profile: of this very model by `kvjax.profiling.duo_gates`, which has the gates, or the path of
      one; not beside full_heads.
    sparsity: with a profile, the share of KV heads that stream; in [0, 1] even without one.
    sinks: first tokens that streaming heads never drop.

  Raises:
    ValueError: a budget no larger than the sinks, or a sparsity out of range; in `register`, heads
      that the model lacks, or a profile of another model.
  """
  if not 0 <= sinks < budget_tokens:
    raise ValueError(f"duo sinks {sinks} must be at least 0 and under the budget {budget_tokens}")
  _check_sparsity(sparsity)
  measured = _profile.read("duo", profile, "duo_gates", full_heads=full_heads)
  if measured is not None:
    full_heads = retrieval_heads(measured.arrays["gates"], sparsity)
  full = frozenset((int(layer), int(head)) for layer, head in full_heads)
  window = budget_tokens - sinks

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    del cache
    _profile.check("duo", measured, model)
    for layer, head in sorted(full):
      if not (0 <= layer < model.num_layers and 0 <= head < model.num_kv_heads):
        raise ValueError(
          f"duo pattern names KV head {head} of layer {layer}; the model has {model.num_kv_heads} "
          f"heads in {model.num_layers} layers: make a pattern for this model"
        )
    return LayerPlan((SELECT,) * model.num_layers), ()

  def keeps(row: int, rows: int, heads: int, capacity: int) -> list[int]:
    del rows
    few = min(budget_tokens, capacity)
    return [capacity if (row, head) in full else few for head in range(heads)]

  def keep(state: State, inputs: Inputs) -> tuple[jax.Array, State]:
    positions, heads = inputs.slot_positions, inputs.slot_positions.shape[1]
    whole = np.array([(inputs.row, head) in full for head in range(heads)])[None, :, None]
    recent = positions >= (inputs.lengths - window)[:, None, None]
    return (positions >= 0) & (whole | recent | (positions < sinks)), state

  def select(state: State, inputs: Inputs) -> tuple[Selection, State]:
    return everything_held(inputs, page_size), state

  def evict(state: State, inputs: Inputs) -> jax.Array:
    """The oldest token that is not a sink; heads that keep everything have a free slot."""
    del state
    positions = inputs.slot_positions
    return jnp.argmin(jnp.where(positions < sinks, jnp.iinfo(jnp.int32).max, positions), axis=-1)

  return Policy(
    name="duo",
    budget_tokens=None if full else budget_tokens,
    stores=("compact",),
    register=register,
    preprocess=lambda state, inputs: state,
    select=select,
    keep=keep,
    keeps=keeps,
    evict=evict,
    page_size=page_size,
    joins_heads=bool(full),
  )


def retrieval_heads(
  gates: np.ndarray, sparsity: float, seed: int = 0
) -> tuple[tuple[int, int], ...]:
  """The (layer, KV head) pairs that keep everything: the share 1 - sparsity with the highest gates.

  Args:
    gates: f32[L, K].
    sparsity: share of heads that stream, in [0, 1].
    seed: of the noise of at most 1e-6 that breaks ties, as in the original.

  Raises:
    ValueError: a sparsity outside [0, 1].
  """
  _check_sparsity(sparsity)
  noisy = gates + np.random.default_rng(seed).uniform(0, 1e-6, gates.shape)
  count = gates.size - round(sparsity * gates.size)
  best = np.sort(np.argsort(-noisy, axis=None)[:count])
  return tuple((int(layer), int(head)) for layer, head in np.argwhere(np.ones_like(gates))[best])


def _check_sparsity(sparsity: float) -> None:
  if not 0 <= sparsity <= 1:
    raise ValueError(f"sparsity {sparsity} must be between 0 and 1")
