"""DuoAttention's gates: which KV heads need the whole context (Xiao et al., ICLR 2025).

Every KV head has a gate a in [0, 1] and attends as a * full + (1 - a) * streaming, where streaming
sees the first tokens and the most recent ones. Gates alone are trained, to reproduce the last
hidden states of the full model on the tokens that answer questions about the far context, under an
L1 penalty that pulls them to zero. Heads whose gates stay high are the retrieval heads.

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

from kvjax.types import Attend, Model, Params

Gates = jax.Array  # f32[L, K]


def train_gates(
  model: Model,
  params: Params,
  batches: Callable[[int], tuple[jax.Array, jax.Array]],
  *,
  steps: int = 200,
  sinks: int = 64,
  recent: int = 256,
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


def full_heads(gates: np.ndarray, sparsity: float, seed: int = 0) -> tuple[tuple[int, int], ...]:
  """The (layer, KV head) pairs that keep everything: the share 1 - sparsity with the highest gates.

  Args:
    gates: f32[L, K].
    sparsity: share of heads that stream, in [0, 1].
    seed: of the noise of at most 1e-6 that breaks ties, as in the original.

  Raises:
    ValueError: a sparsity outside [0, 1].
  """
  if not 0 <= sparsity <= 1:
    raise ValueError(f"sparsity {sparsity} must be between 0 and 1")
  noisy = gates + np.random.default_rng(seed).uniform(0, 1e-6, gates.shape)
  count = gates.size - round(sparsity * gates.size)
  best = np.sort(np.argsort(-noisy, axis=None)[:count])
  return tuple((int(layer), int(head)) for layer, head in np.argwhere(np.ones_like(gates))[best])


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
    b, s, h, d = q.shape
    positions = jnp.broadcast_to(jnp.arange(s), (b, s))
    q, k = model.rotate(q, positions), model.rotate(k, positions)
    grouped = q.reshape(b, s, k.shape[2], -1, d)
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32)
    age = jnp.arange(s)[:, None] - jnp.arange(s)[None]
    causal = age >= 0

    def under(visible):
      hidden_away = jnp.where(visible[None, None, None], scores / math.sqrt(d), -jnp.inf)
      weights = jax.nn.softmax(hidden_away, axis=-1).astype(v.dtype)
      return jnp.einsum("bkgst,btkd->bskgd", weights, v)

    out = under(causal)
    if gates is not None:
      gate = gates[layer].astype(out.dtype)[None, None, :, None, None]
      near = causal & ((age < recent) | (jnp.arange(s)[None] < sinks))
      out = gate * out + (1 - gate) * under(near)
    return out.reshape(b, s, h, d), cache

  return attend
