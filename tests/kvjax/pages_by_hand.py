"""Methods that select pages by hand: one row, one head, one page at a time; and their driver."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import CacheConfig
from kvjax.policies._digests import OTHERS_SPREAD, SPREAD
from kvjax.types import Inputs
from tests.kvjax import matrix

B, K, G, D = 3, 2, 2, 8
MODEL = matrix.tiny_model(matrix.Shape(K, G, D))[0]
PROMPTS, CHUNK, CAPACITY = (50, 33, 7), 32, 128


def normal(seed, shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


KEYS = normal(0, (B, CAPACITY, K, D))  # of every position of every row
QUERIES = normal(1, (CAPACITY, B, K * G, D))  # of every step


def scores_of_page(form, q, keys):
  """Score of one page, keys [n, D], for one query [D]."""
  keys, q = keys.astype(np.float64), q.astype(np.float64)
  low, high = keys.min(axis=0), keys.max(axis=0)
  if form == "cuboid":
    middle = (low + high) / 2
    radius = np.abs(keys - middle).mean(axis=0)
    low, high = middle - radius, middle + radius
  if form in ("minmax", "cuboid"):
    return np.maximum(q * low, q * high).sum()
  if form == "exact":
    return (keys @ q).max()
  if form == "outlier":
    far = np.square(keys - keys.mean(axis=0)).sum(axis=1).argmax()
    others = np.delete(keys, far, axis=0) if len(keys) > 1 else keys
    spread = np.linalg.norm(q) * np.sqrt(others.var(axis=0).mean())
    return max(keys[far] @ q, others.mean(axis=0) @ q + OTHERS_SPREAD * spread)
  spread = SPREAD * np.sqrt((q**2 * keys.var(axis=0)).sum()) if form == "mean_std" else 0
  return keys.mean(axis=0) @ q + spread


def scores_of_row(form, q, keys, page_size):
  """[K, G, P] of q [K*G, D] and keys [n, K, D]."""
  starts = range(0, len(keys), page_size)
  return np.array(
    [
      [
        [scores_of_page(form, q[k * G + g], keys[at : at + page_size, k]) for at in starts]
        for g in range(G)
      ]
      for k in range(K)
    ]
  )


def grouped(scores, group, head_dim):
  """[lists, P] of scores [K, G, P] of q . k. Sums of probabilities as their logarithms, since that
  of a far page is less than any float."""
  if group == "none":
    return scores.reshape(-1, scores.shape[-1])
  if group == "sum_probs":
    scaled = scores / np.sqrt(head_dim)
    logs = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
    return np.logaddexp.reduce(logs, axis=1)
  return getattr(scores, group)(axis=1)


def best(scores, forced, width):
  """Pages by score [P], those in forced first."""
  order = sorted(range(len(scores)), key=lambda page: (page not in forced, -scores[page]))
  return order[:width]


# How a policy is driven without a model.


def inputs_of(lengths, page_size=None, **own):
  none = dict.fromkeys(Inputs._fields)
  slots = jnp.broadcast_to(jnp.arange(CAPACITY), (B, K, CAPACITY))
  held = jnp.asarray(KEYS).swapaxes(1, 2)
  held = jnp.where(slots[..., None] < lengths[:, None, None, None], held, jnp.nan)

  def keys(pages=None):
    if pages is None:
      return held
    of_pages = held.reshape(B, K, -1, page_size, D)
    some = jnp.take_along_axis(of_pages, pages[..., None, None], axis=2, mode="clip")
    return some.reshape(B, K, -1, D)

  return Inputs(
    **none
    | {"layer": 0, "row": 0, "lengths": lengths, "first": jnp.zeros(B, jnp.int32)}
    | {"slot_positions": jnp.where(slots < lengths[:, None, None], slots, -1)}
    | {"keys": keys}
    | own
  )


def prefilled(policy, page_size, prompts=PROMPTS):
  """State after the prompts, in chunks."""
  config = CacheConfig(B, CAPACITY, page_size)
  state = policy.register(MODEL.config, config)[1]
  state = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, state)
  counts = np.array(prompts)
  for start in range(0, max(prompts), CHUNK):
    positions = np.broadcast_to(np.arange(start, start + CHUNK), (B, CHUNK))
    valid = positions < counts[:, None]
    keys = np.where(valid[..., None, None], KEYS[:, start : start + CHUNK], np.nan)
    lengths = jnp.asarray(np.minimum(counts, start + CHUNK))
    own = {"k": jnp.asarray(keys), "positions": jnp.asarray(positions), "valid": jnp.asarray(valid)}
    state = policy.preprocess(state, inputs_of(lengths, **own))
  return state


def decode(policy, state, steps, prompts=PROMPTS):
  """For each step and row, the sets of pages of its heads; and the state after them."""

  @jax.jit
  def step(state, lengths, q, k):
    positions = lengths[:, None] - 1
    own = {"q": q[:, None], "k": k[:, None], "positions": positions, "valid": positions >= 0}
    inputs = inputs_of(lengths, policy.page_size, **own)
    return policy.select(policy.preprocess(state, inputs), inputs)

  chosen = []
  for at in range(steps):
    lengths = np.array(prompts) + at + 1
    keys = KEYS[np.arange(B), lengths - 1]
    selection, state = step(state, jnp.asarray(lengths), QUERIES[at], keys)
    pages = np.where(selection.mask[..., 0], selection.pages, -1)
    for head in pages.reshape(-1, pages.shape[-1]):
      named = head[head >= 0]
      assert len(set(named)) == len(named), "a page was named twice"
    chosen.append([[set(head[head >= 0].tolist()) for head in row] for row in pages])
  return chosen, state
