"""Dropping policies in the plainest terms: one row, lists of positions, numpy.

Everything that a layer ever saw is written down; a rule looks at it after the prompt and after each
token, and says which positions each KV head still holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from kvjax.types import Model


@dataclasses.dataclass
class Seen:
  """One layer's past.

  Attributes:
    q: for each position f[H, D], after the position rule.
    k: for each position f[K, D], after the position rule.
    v: for each position f[K, D].
    weights: for each position f[H, n], what its query gave to each position, 0 where it attended to
      nothing.
    held: for each KV head the positions that are left, ascending.
  """

  q: list
  k: list
  v: list
  weights: list
  held: list


Rule = Callable[[int, Seen, bool], list[list[int]]]
"""`rule(layer, seen, prompt)` -> what each KV head holds from now on; prompt: it has just ended."""


def softmax(x):
  e = np.exp(np.asarray(x, np.float64) - np.max(x))
  return e / e.sum()


def logits_and_held(
  model: Model, params, row: list[int], prompt_length: int, rule: Rule, window: int | None = None
):
  """Logits f[n + 1, V] from the last prompt token on, and for each layer the positions that each
  step attended to, [n][K] lists; window is the model's own."""
  config = model.config
  past = [Seen([], [], [], [], [[] for _ in range(config.num_kv_heads)]) for _ in params["layers"]]
  attended = [[] for _ in past]
  now = count = 0

  def attend(layer, q, k, v, cache, hidden, /):
    seen = past[layer]
    positions = jnp.arange(now, now + q.shape[1])[None]
    q, k = model.rotate(q, positions), model.rotate(k, positions)
    outs = [_step(seen, *(np.asarray(x[0, i], np.float64) for x in (q, k, v)), window)
            for i in range(count)]  # fmt: skip
    if now:
      attended[layer].append([list(held) for held in seen.held])
    seen.held = rule(layer, seen, not now)
    out = np.zeros(q.shape[1:], np.float32)
    out[:count] = outs
    return jnp.asarray(out[None]), cache

  out = []
  for tokens in (row[:prompt_length], *([token] for token in row[prompt_length:])):
    count = len(tokens)
    padded = [*tokens, *[0] * (-count % 50 if not now else 0)]  # so that few shapes are compiled
    positions = jnp.arange(now, now + len(padded))[None]
    x, _ = model.forward(params, jnp.asarray([padded]), positions, (), attend)
    out.append(np.asarray(model.unembed(params, x[:, count - 1]))[0])
    now += count
  return np.stack(out), attended


def _step(seen: Seen, q, k, v, window):
  """One query over what each KV head holds and its own token: f[H, D]."""
  at = len(seen.q)
  seen.q.append(q), seen.k.append(k), seen.v.append(v)
  group = q.shape[0] // k.shape[0]
  weights, out = np.zeros((q.shape[0], at + 1)), np.empty_like(q)
  for head in range(q.shape[0]):
    held = seen.held[head // group]
    if head % group == 0:
      held.append(at)
    visible = [p for p in held if window is None or at - p < window]
    scores = [q[head] @ seen.k[p][head // group] / math.sqrt(q.shape[1]) for p in visible]
    weights[head, visible] = softmax(scores)
    out[head] = sum(
      w * seen.v[p][head // group] for w, p in zip(softmax(scores), visible, strict=True)
    )
  seen.weights.append(weights)
  return out


def best(scores: dict[int, float], count: int) -> list[int]:
  """The positions with the largest scores, the later of equal ones."""
  return sorted(sorted(scores, key=lambda p: (scores[p], p), reverse=True)[: max(count, 0)])
