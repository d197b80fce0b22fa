"""How the small models are trained: batches, loss, optimizer, and checkpoints that resume exactly.

The trained code is that of `models/`, run without a cache. A step depends on nothing but the seed,
its number and the state before it, so that a run which was stopped anywhere and started again ends
with the same weights, to the bit, as one that was not.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax import checkpoint as ocp

from eval import recall
from kvjax.config import ModelConfig
from kvjax.types import Model, Params
from models import families
from scripts import small_models


class Phase(NamedTuple):
  """A part of the training with texts of one length, in bytes."""

  steps: int
  length: int
  rows: int


# Look-up is learned on short texts, where it takes few steps, and then stretched to long ones.
PHASES = {
  "small-opt": (
    Phase(steps=600, length=64, rows=32),
    Phase(steps=200, length=128, rows=16),
    Phase(steps=200, length=256, rows=8),
    Phase(steps=200, length=512, rows=4),
    Phase(steps=150, length=1024, rows=2),
    Phase(steps=200, length=2048, rows=1),
    Phase(steps=80, length=4096, rows=1),
  ),
  "small-llama": (
    Phase(steps=800, length=64, rows=32),
    Phase(steps=200, length=128, rows=16),
    Phase(steps=150, length=256, rows=8),
    Phase(steps=150, length=512, rows=4),
    Phase(steps=100, length=1024, rows=2),
    Phase(steps=120, length=2048, rows=1),
    Phase(steps=40, length=4096, rows=1),
  ),
}
_LEARNING_RATE, _WARM_UP, _LAST_RATE = 3e-3, 50, 0.05  # the last one as a share of the first
_BETA2, _WEIGHT_DECAY, _CLIP = 0.95, 0.01, 1.0
_POSITION_RATE = 0.1  # of learned positions: a step meets few, and Adam then moves these far
_BOOK_WEIGHT = 0.1  # of the mean loss of what is no answer, beside that of the answers
_QUESTION_BYTES = {"lookup": 19, "chain": 37, "passkey": 45}  # with what it asks about
_MOST_QUESTIONS = 0.7  # share of a text that questions and their facts may take
_KEEP_EVERY = 50  # steps between checkpoints


class State(NamedTuple):
  """Everything that a run goes on from.

  Attributes:
    params: weights, f32.
    moments: state of the optimizer.
    step: steps done.
    seconds: wall time that they took, over all starts of the run.
  """

  params: Params
  moments: Any
  step: np.ndarray
  seconds: np.ndarray


class Batch(NamedTuple):
  """One step's texts.

  Attributes:
    tokens: i32[B, S + 1], the first of each row is `BOS_ID`.
    positions: i32[B, S] of all but the last.
    is_answer: bool[B, S], whether the next byte belongs to an answer.
  """

  tokens: np.ndarray
  positions: np.ndarray
  is_answer: np.ndarray


def train(
  config: ModelConfig,
  phases: Sequence[Phase],
  book: str,
  seed: int,
  folder: Path,
  progress: Callable[[Phase, int, float, float], None] = lambda *_: None,
) -> State:
  """Trains a model, from its last checkpoint if there is one.

  Args:
    config: the static shape.
    phases: one after the other.
    book: from `recall.plain`.
    seed: of weights and texts.
    folder: for checkpoints; made if needed.
    progress: called after each step with (phase, steps done, loss and accuracy of the answers).
  """
  total = sum(phase.steps for phase in phases)
  params = small_models.start(config, jax.random.key(seed))
  state = State(params, _optimizer(total).init(params), np.array(0), np.array(0.0))
  options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
  with ocp.CheckpointManager(folder.resolve(), options=options) as manager:
    if manager.latest_step() is not None:
      state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
    begin, before = time.perf_counter(), float(state.seconds)
    for done in range(int(state.step), total):
      phase = _phase(phases, done)
      batch = make_batch(config, phase, book, random.Random(f"{seed} {done}"))
      params, moments, loss, accuracy = _step(config, total, state.params, state.moments, batch)
      progress(phase, done + 1, float(loss), float(accuracy))
      seconds = before + time.perf_counter() - begin
      state = State(params, moments, np.array(done + 1), np.array(seconds))
      if (done + 1) % _KEEP_EVERY == 0 or done + 1 == total:
        manager.save(done + 1, args=ocp.args.StandardSave(state))
  return state


def make_batch(config: ModelConfig, phase: Phase, book: str, rng: random.Random) -> Batch:
  """Texts of all tasks at random, with as many questions as there is room for, or fewer."""
  texts = [_text(phase.length, book, rng) for _ in range(phase.rows)]
  tokens = np.full((phase.rows, phase.length + 1), small_models.BOS_ID, np.int32)
  is_answer = np.zeros((phase.rows, phase.length), bool)
  for row, text in enumerate(texts):
    tokens[row, 1:] = np.frombuffer(text.text.encode("ascii"), np.uint8)
    for begin, end in text.answers:
      is_answer[row, begin:end] = True
  positions = np.stack([_place(config, text.text, rng) for text in texts])
  return Batch(tokens, positions, is_answer)


def _place(config: ModelConfig, text: str, rng: random.Random) -> np.ndarray:
  """i32[S], positions of the start and of all bytes but the last.

  A text stands anywhere in the context, so that all learned positions are trained. Rotary heads
  must also look up what is far away, which short texts would not teach them; there every question
  stands a random way behind what is before it (after PoSE, Zhu et al., ICLR 2024).
  """
  free = config.max_tokens - len(text)
  if config.family == "opt":
    return rng.randint(0, free) + np.arange(len(text), dtype=np.int32)
  lines = np.cumsum([letter == "\n" for letter in "^" + text[:-1]])
  starts = sorted(rng.randint(0, free) for _ in range(lines[-1] + 1))
  return np.array(starts, np.int32)[lines] + np.arange(len(text), dtype=np.int32)


def _text(length: int, book: str, rng: random.Random) -> recall.Recall:
  task = rng.choice(list(_QUESTION_BYTES))
  share = rng.uniform(0.1, 1) * _MOST_QUESTIONS
  questions = max(int(share * length / _QUESTION_BYTES[task]), 1)
  facts = questions * (recall.HOPS if task == "chain" else 1)
  return recall.build(task, book, length, rng, facts=facts, questions=questions)


def _phase(phases: Sequence[Phase], step: int) -> Phase:
  for phase in phases:
    if step < phase.steps:
      return phase
    step -= phase.steps
  raise IndexError(step)


def _optimizer(steps: int) -> optax.GradientTransformation:
  rate = optax.warmup_cosine_decay_schedule(
    0.0, _LEARNING_RATE, min(_WARM_UP, steps // 10), steps, _LEARNING_RATE * _LAST_RATE
  )
  return optax.chain(
    optax.clip_by_global_norm(_CLIP),
    optax.adamw(rate, b2=_BETA2, weight_decay=_WEIGHT_DECAY),
    optax.masked(optax.scale(_POSITION_RATE), _positions),
  )


def _positions(params: Params) -> Params:
  """The tree with True for learned positions."""
  return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "positions", params)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(config: ModelConfig, total: int, params: Params, moments: Any, batch: Batch):
  """One of `total` steps: new weights and moments, loss and accuracy of the answers."""
  model = families.build(config)
  gradient, (loss, accuracy) = jax.grad(_loss, has_aux=True)(params, model, batch)
  updates, moments = _optimizer(total).update(gradient, moments, params)
  return optax.apply_updates(params, updates), moments, loss, accuracy


def _loss(params: Params, model: Model, batch: Batch):
  """What is minimised; and of the answers alone, cross entropy in nats and accuracy, by bytes."""
  tokens, targets = jnp.asarray(batch.tokens[:, :-1]), batch.tokens[:, 1:]
  logits = _logits(params, model, tokens, jnp.asarray(batch.positions))
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  answers = jnp.mean(losses, where=batch.is_answer)
  others = jnp.mean(losses, where=~batch.is_answer)
  accuracy = jnp.mean(jnp.argmax(logits, -1) == targets, where=batch.is_answer)
  return answers + _BOOK_WEIGHT * others, (answers, accuracy)


def _logits(params: Params, model: Model, tokens: jax.Array, positions: jax.Array) -> jax.Array:
  """f32[B, S, V] of a whole text at once, without a cache."""

  def attend(layer, q, k, v, cache, hidden):
    del layer, hidden
    return _attention(model.rotate(q, positions), model.rotate(k, positions), v), cache

  layers = tuple(jax.tree.map(_flat, layer) for layer in params["layers"])
  x, _ = model.forward(params | {"layers": layers}, tokens, positions, None, attend)
  logits = model.unembed(params, x.reshape(-1, x.shape[-1]))
  return logits.reshape(*tokens.shape, -1)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Causal attention: q f[B, S, H, D], k and v f[B, S, K, D] -> f[B, S, H, D].

  A quarter of the queries at a time, so that keys behind it need not be read.
  """
  b, s, heads, d = q.shape
  q, k, v = (
    jnp.repeat(x.swapaxes(1, 2), heads // x.shape[2], axis=1).reshape(b * heads, s, d)
    for x in (q, k, v)
  )
  ends = range(s // 4, s + 1, s // 4) if s % 4 == 0 and s >= 256 else (s,)
  starts = (0, *ends[:-1])
  parts = [_attend_last(q[:, i:j], k[:, :j], v[:, :j]) for i, j in zip(starts, ends, strict=True)]
  return jnp.concatenate(parts, axis=1).reshape(b, heads, s, d).swapaxes(1, 2)


def _attend_last(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """q f[N, S, D] are the last S of T places, k and v f[N, T, D] -> f[N, S, D]."""
  s, t = q.shape[1], k.shape[1]
  scores = jnp.einsum("nsd,ntd->nst", q, k) * q.shape[-1] ** -0.5
  is_past = np.arange(t) <= np.arange(t - s, t)[:, None]
  weights = jax.nn.softmax(jnp.where(is_past[None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("nst,ntd->nsd", weights, v)


@dataclasses.dataclass(frozen=True)
class _Flat:
  """A matrix that flattens the rows and tokens of what it is multiplied with.

  The result is the same. But the gradient of `x f[B, S, E] @ w` is a product over two axes, for
  which XLA on a CPU first writes transposed copies of x (jax 0.11 and 0.12): a step of the small
  models took 2.5 times as long.
  """

  matrix: jax.Array
  ndim = 2  # no panels (`models.panels`)

  def __rmatmul__(self, x: jax.Array) -> jax.Array:
    return (x.reshape(-1, x.shape[-1]) @ self.matrix).reshape(*x.shape[:-1], -1)


def _flat(weight: jax.Array) -> jax.Array | _Flat:
  return _Flat(weight) if weight.ndim == 2 else weight
