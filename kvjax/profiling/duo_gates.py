"""DuoAttention's gates: which KV heads need the whole context (Xiao et al., ICLR 2025).

Every KV head has a gate a in [0, 1] and attends as a * full + (1 - a) * streaming, where streaming
sees the first tokens and the most recent ones. Gates alone are trained, to reproduce the last
hidden states of the full model on the tokens that answer questions about the far context, under an
L1 penalty that pulls them to zero. Heads whose gates stay high are the retrieval heads; how many
of them keep everything is an option of the policy `duo`.

Departures: the penalty is the mean of the gates, so that its weight does not depend on the model's
size; gates are clipped to [0, 1] after every update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from kvjax.types import Attend, Model, Params

METHOD = "duo_gates"
SINKS, RECENT = 64, 256  # what the original deploys, and the policy by default

Gates = jax.Array  # f32[L, K]


def train_gates(
  model: Model,
  params: Params,
  batches: Callable[[int], tuple[ArrayLike, ArrayLike]],
  *,
  steps: int = 200,
  sinks: int = SINKS,
  recent: int = RECENT,
  penalty: float = 0.05,
  learning_rate: float = 0.02,
  progress: Callable[[int, float], None] = lambda step, loss: None,
) -> np.ndarray:
  """Trains the gates of a model whose weights stay as they are.

  Args:
    model: static.
    params: its weights.
    batches: `batches(step) -> tokens i32[B, S], answers bool[B, S]`: whole texts, and the positions
      whose hidden states count: those that must predict an answer.
    steps: updates.
    sinks: first tokens that a streaming head sees; 128 in the original's training.
    recent: newest tokens that it sees, the query's own included.
    penalty: weight of the mean gate.
    learning_rate: of Adam.
    progress: called with the step and its loss.

  Returns:
    f32[L, K].
  """
  config = model.config
  gates = jnp.ones((config.num_layers, config.num_kv_heads), jnp.float32)
  optimizer = optax.adam(learning_rate)
  state = optimizer.init(gates)
  loss_of = partial(_loss, model, sinks, recent, penalty)

  @jax.jit
  def update(gates, state, params, tokens, answers):
    loss, slope = jax.value_and_grad(loss_of)(gates, params, tokens, answers)
    change, state = optimizer.update(slope, state)
    return jnp.clip(gates + change, 0.0, 1.0), state, loss

  for step in range(steps):
    gates, state, loss = update(gates, state, params, *batches(step))
    progress(step, float(loss))
  return np.asarray(gates)


def _loss(model, sinks, recent, penalty, gates, params, tokens, answers) -> jax.Array:
  """Squared distance of the hidden states of both models where answers, and the penalty."""
  wanted = jax.lax.stop_gradient(_hidden(model, params, tokens, _attend(model)))
  found = _hidden(model, params, tokens, _attend(model, gates, sinks, recent))
  distance = jnp.square(found.astype(jnp.float32) - wanted.astype(jnp.float32)).mean(axis=-1)
  weight = answers.astype(jnp.float32)
  return (distance * weight).sum() / jnp.maximum(weight.sum(), 1) + penalty * jnp.abs(gates).mean()


def _hidden(model: Model, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return model.forward(params, tokens, positions, (), attend)[0]


def _attend(model: Model, gates: Gates | None = None, sinks: int = 0, recent: int = 0) -> Attend:
  """Attention of whole texts: full, or mixed with streaming by the gates."""

  def attend(layer, q, k, v, cache, hidden, /):
    del hidden
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    q, k = model.rotate(q, positions), model.rotate(k, positions)
    gate = None if gates is None else gates[layer].astype(v.dtype)
    return _mixed(gate, q, k, v, sinks, recent), cache

  return attend


# The weights f32[B, H, S, S] of all layers would take most of the memory; making them again for the
# gradient costs little beside the rest of a layer.
@partial(jax.checkpoint, static_argnums=(4, 5))
def _mixed(gate, q, k, v, sinks: int, recent: int) -> jax.Array:
  """f[B, S, H, D] of q f[B, S, H, D], k and v f[B, S, K, D] and gate f[K], None for 1."""
  b, s, h, d = q.shape
  grouped = q.reshape(b, s, k.shape[2], -1, d)
  scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32)
  age = jnp.arange(s)[:, None] - jnp.arange(s)[None]
  causal = age >= 0

  def under(visible):
    seen = jnp.where(visible[None, None, None], scores / math.sqrt(d), -jnp.inf)
    weights = jax.nn.softmax(seen, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v)

  out = under(causal)
  if gate is not None:
    gate = gate[None, None, :, None, None]
    near = causal & ((age < recent) | (jnp.arange(s)[None] < sinks))
    out = gate * out + (1 - gate) * under(near)
  return out.reshape(b, s, h, d)
