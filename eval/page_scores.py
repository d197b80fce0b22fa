"""How well a score finds the pages that matter: measured on queries and keys of a real model.

A prompt is prefilled once, by a policy that attends to everything and remembers the queries of its
decode steps. Every score is then judged on the same queries and keys, and decodes from the same
cache, whose digests alone are made anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import CacheConfig, KVCache, ModelConfig, Runner, Sampling
from kvjax.cache import paged
from kvjax.engine import steps
from kvjax.engine.generate import prefill
from kvjax.policies._digests import DIGESTS
from kvjax.policies._kept import quantised
from kvjax.policies._pages import all_pages, pages_there, replaced
from kvjax.types import DENSE, SELECT, Inputs, LayerPlan, Params, Policy, State


class Captured(NamedTuple):
  """One prompt, prefilled, and what dense attention made of it.

  Attributes:
    cache: of the prompt, B = 1.
    tokens: what dense attention says, one token more than there are steps.
    queries: f32[steps, rows, H, D], of the layers that select.
  """

  cache: KVCache
  tokens: list[int]
  queries: jax.Array

  @property
  def lengths(self) -> jax.Array:
    """i32[steps]: tokens that each query sees."""
    return self.cache.lengths[0] + 1 + jnp.arange(len(self.queries))


def watcher(page_size: int, dense_layers: int) -> Policy:
  """A policy that selects every page; its state is the newest queries, f32[B, H, D] a layer."""

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    roles = (DENSE if layer < dense_layers else SELECT for layer in range(model.num_layers))
    plan = LayerPlan(tuple(roles))
    queries = jnp.zeros((cache.batch_size, model.num_heads, model.head_dim))
    return plan, (queries,) * len(plan.select_layers)

  def select(state: State, inputs: Inputs):
    slots = inputs.slot_positions.shape
    selection = all_pages(pages_there(inputs, slots[-1] // page_size, page_size), slots[1])
    return selection, replaced(state, inputs.row, inputs.q[:, 0].astype(jnp.float32))

  return Policy(
    name="watcher",
    budget_tokens=None,
    stores=("resident",),
    register=register,
    preprocess=lambda state, inputs: state,
    select=select,
    page_size=page_size,
  )


def capture(runner: Runner, params: Params, prompt: Sequence[int], count: int) -> Captured:
  """Prefills, and decodes count steps greedily with dense attention; runner has a `watcher`."""
  last, cache = prefill(runner, params, [prompt])
  logits, tokens, queries = runner.model.unembed(params, last), [], []
  for _ in range(count):
    tokens.append(int(logits.argmax()))
    logits, cache = steps.decode_step(runner, params, cache, np.array(tokens[-1:], np.int32))
    queries.append(jnp.concatenate(cache.policy_state))
  tokens.append(int(logits.argmax()))
  # The keys of what was decoded stay where they are: slots beyond the length may hold anything.
  cache = cache.replace(lengths=cache.lengths - count, policy_state=())
  return Captured(cache, tokens, jnp.stack(queries))


def repaged(cache: KVCache, page_size: int) -> KVCache:
  """The same cache in pages of page_size, a multiple of those that it has, as are its slots."""
  _, c, d = cache.pools.keys.shape
  times = page_size // c
  pools = paged.Pools(*(pool.reshape(-1, page_size, d) for pool in cache.pools))
  return cache.replace(pools=pools, table=cache.table[..., ::times] // times)


@partial(jax.jit, static_argnums=0)
def redigested(runner: Runner, cache: KVCache) -> KVCache:
  """The cache with the state that this runner's policy would have after the same prompt."""
  state = runner.policy.register(runner.model.config, runner.decode_config)[1]
  for row, layer in enumerate(runner.plan.select_layers):
    k = paged.keys_of(cache.pools, cache.table[row]).swapaxes(1, 2)
    positions = jnp.arange(k.shape[1])[None]
    inputs = _inputs(layer, row, cache)._replace(
      k=k, positions=positions, valid=positions < cache.lengths[:, None]
    )
    state = runner.policy.preprocess(state, inputs)
  return cache.replace(policy_state=state)


def decoded(runner: Runner, params: Params, captured: Captured, cache: KVCache) -> list[int]:
  """What the policy says: as many tokens as dense attention said, the first of them the same."""
  tokens, key = [captured.tokens[0]], jax.random.key(0)[None]
  cache = jax.tree.map(jnp.copy, cache)  # a step takes what it is given
  for _ in captured.tokens[1:]:
    newest = jnp.array(tokens[-1:], jnp.int32)
    newest, cache = steps.next_token(runner, Sampling(), params, cache, newest, key)
    tokens.append(int(newest[0]))
  return tokens


def select_seconds(runner: Runner, captured: Captured, cache: KVCache, repeats: int = 20) -> float:
  """Median wall seconds that all the layers of one step take to select."""
  q = captured.queries[0].astype(runner.decode_config.dtype)
  samples = []
  for _ in range(repeats + 1):
    begin = time.perf_counter()
    jax.block_until_ready(_select(runner, cache, q))
    samples.append(time.perf_counter() - begin)
  return float(np.median(samples[1:]))  # the first compiles


@partial(jax.jit, static_argnums=0)
def _select(runner: Runner, cache: KVCache, q: jax.Array):
  selected = []
  for row, layer in enumerate(runner.plan.select_layers):
    inputs = _inputs(layer, row, cache)._replace(
      q=q[None, None, row], k=jnp.zeros((1, 1, cache.table.shape[2], q.shape[-1]))
    )
    selected.append(runner.policy.select(cache.policy_state, inputs)[0].pages)
  return selected


def _inputs(layer: int, row: int, cache: KVCache) -> Inputs:
  b, k, p = cache.table.shape[1:]
  slots = jnp.broadcast_to(jnp.arange(p * cache.pools.page_size), (b, k, p * cache.pools.page_size))
  return Inputs(
    layer=layer,
    row=row,
    lengths=cache.lengths,
    first=0 * cache.lengths,
    slot_positions=jnp.where(slots < cache.lengths[:, None, None], slots, -1),
    keys=partial(paged.keys_of, cache.pools, cache.table[row]),
  )


class Judged(NamedTuple):
  """What budgets of a score keep, means over steps.

  Attributes:
    recall: f32[budgets], share of the pages with the largest q . k that are among those of the best
      scores, mean over heads; the newest page, which both have, does not count.
    mass: f32[budgets, K], share of dense attention's weights that falls on the chosen pages.
  """

  recall: jax.Array
  mass: jax.Array


class Score(NamedTuple):
  """A way to score pages: as quest's arguments of these names."""

  score: str
  candidates: int = 1
  digest_dtype: str | None = None

  def __str__(self) -> str:
    dtype = f"/{self.digest_dtype}" if self.digest_dtype else ""
    return self.score + dtype + (f"*{self.candidates}" if self.candidates > 1 else "")


@partial(jax.jit, static_argnums=(0, 1, 2))
def judge(
  how: Score, page_size: int, widths: tuple[int, ...], keys: jax.Array, q: jax.Array, lengths
) -> Judged:
  """Judges one layer.

  Args:
    how: what is judged.
    page_size: C.
    widths: budgets in pages, at least 2 each.
    keys: f32[K, T, D], of which as many hold tokens as the last step sees.
    q: f32[S, H, D], queries of S steps.
    lengths: i32[S], tokens that each of them sees.
  """
  (heads, total, d), digest = keys.shape, DIGESTS[how.score]
  q = q.reshape(len(q), heads, -1, d)
  seen = jnp.arange(total)[None] < lengths[:, None]  # bool[S, T]
  logits = jnp.einsum("skgd,ktd->skgt", q, jnp.where(seen[-1, :, None], keys, 0))
  logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
  by_page = (*logits.shape[:3], -1, page_size)
  last = ((lengths - 1) // page_size)[:, None, None]
  pages = jnp.arange(total // page_size)[None, None]

  def combined(scores):  # over the group: f32[S, K, P]
    return jnp.where(pages <= last, scores.max(axis=2), -jnp.inf)

  def rank(scores):  # i32[S, K, P], 0 for the best page; the newest comes first
    scores = jnp.where(pages == last, jnp.inf, scores)
    return jnp.argsort(jnp.argsort(scores, axis=-1, descending=True), axis=-1)

  exact = combined(logits.reshape(by_page).max(axis=-1))
  guess = exact
  if digest.vectors:
    split = keys.reshape(heads, -1, page_size, d)
    valid = jnp.broadcast_to(seen[-1].reshape(1, -1, page_size), split.shape[:-1])
    digests = digest.of_pages(split, valid)
    if how.digest_dtype:
      numbers, scales = quantised(digests)
      digests = numbers.astype(jnp.float32) * scales
    guess = combined(digest.scores(jnp.einsum("skrz,kpz->skrp", digest.queries(q), digests)))
  first, true = rank(guess), rank(exact)

  def chosen(width):  # bool[S, K, P]
    if how.candidates == 1:
      return first < width
    return rank(jnp.where(first < how.candidates * width, exact, -jnp.inf)) < width

  weights = jax.nn.softmax(logits * d**-0.5, axis=-1).reshape(by_page).sum(axis=-1).mean(axis=2)
  own = [chosen(width) for width in widths]
  hits = [(one & (true < w)).sum(axis=-1) for one, w in zip(own, widths, strict=True)]
  others = jnp.array(widths, jnp.float32) - 1  # than the newest
  recall = (jnp.stack(hits).mean(axis=(1, 2), dtype=jnp.float32) - 1) / others
  mass = [jnp.where(one, weights, 0).sum(axis=-1).mean(axis=0) for one in own]
  return Judged(recall, jnp.stack(mass))


def judge_layers(
  how: Score, widths: tuple[int, ...], captured: Captured, cache: KVCache
) -> tuple[np.ndarray, np.ndarray]:
  """Of the layers that select: recall, their mean, f[budgets]; mass, f[budgets, layers, K]."""
  judged = []
  for row in range(captured.queries.shape[1]):
    keys = paged.keys_of(cache.pools, cache.table[row])[0].astype(jnp.float32)
    q = captured.queries[:, row]
    judged.append(judge(how, cache.pools.page_size, widths, keys, q, captured.lengths))
  recall, mass = (np.stack(values, axis=1) for values in zip(*judged, strict=True))
  return recall.mean(axis=1), mass
