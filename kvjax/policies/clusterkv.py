"""ClusterKV (Liu et al., DAC 2025): keys are clustered after prefill, and clusters are recalled.

For each KV head the keys of the prompt, but for the first 16 tokens, are put into clusters by
k-means under the cosine. In decode a query scores the clusters by its product with their centroids;
clusters are taken in that order until the budget is full, the last of them cut in order of
position. The first tokens and what has been generated are always attended to. Kept beside the keys
are the centroids, f32, and an i32 label for each token and KV head.

Departures. The original has one row, and a list for each query head ("none"). Here generated tokens
take their room out of the budget; each joins the cluster whose centroid is nearest, and where they
fill more than half of the budget the older ones are recalled with their clusters (the authors'
accuracy code keeps all of them, their speed code clusters every 320 anew). The number of clusters
follows the prompt, one for every 80 tokens as in the paper, where the code has 400. Its options for
cached clusters and averaged queries do not work and are not here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.config import CacheConfig, ModelConfig
from kvjax.policies import _clusters, _tokens
from kvjax.policies._clusters import Clusters
from kvjax.types import DENSE, SELECT, Inputs, LayerPlan, Policy, Selection, State


class _State(NamedTuple):
  """Clusters of each selecting layer, and tokens of the prompt, i32[B]."""

  clusters: tuple[Clusters, ...]
  prompt: jax.Array


def clusterkv(
  budget_tokens: int = 2048,
  page_size: int = 16,
  *,
  dense_layers: int = 2,
  sinks: int = 16,
  cluster_tokens: int = 80,
  iterations: int = 20,
  group: str = "max",
  seed: int = 0,
) -> Policy:
  """ClusterKV's recall of clusters.

  Args:
    budget_tokens: most tokens attended to, sinks and generated ones included.
    page_size: C.
    dense_layers: layers at the bottom that attend to everything; 2 in the original.
    sinks: first tokens, always attended to and in no cluster; 16 in the original.
    cluster_tokens: tokens of a cluster on average; 80 in the paper.
    iterations: of k-means; 20 in the original.
    group: the G query heads of a KV head share the list of their largest scores ("max"), or have
      one each ("none"), which reads up to G times as much.
    seed: of the first centroids.

  Raises:
    ValueError: an argument outside its range, or a budget of no more than twice the sinks.
  """
  if min(cluster_tokens, iterations) < 1 or min(dense_layers, sinks) < 0:
    raise ValueError(
      f"cluster_tokens {cluster_tokens} and iterations {iterations} must be at least 1, "
      f"dense_layers {dense_layers} and sinks {sinks} at least 0"
    )
  if budget_tokens <= 2 * sinks:
    raise ValueError(
      f"budget_tokens {budget_tokens} must be over twice the {sinks} sinks; raise it or lower them"
    )
  _tokens.check_group(group)

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    dense = min(dense_layers, model.num_layers)
    rows = model.num_layers - dense
    clusters = tuple(_clusters.empty(model, cache, cluster_tokens) for _ in range(rows))
    prompt = jnp.zeros(cache.batch_size, jnp.int32)
    return LayerPlan((DENSE,) * dense + (SELECT,) * rows), _State(clusters, prompt)

  def preprocess(state: _State, inputs: Inputs) -> _State:
    if inputs.q.shape[1] > 1:
      return state._replace(prompt=inputs.lengths)
    return with_layer(state, inputs, _clusters.join(state.clusters[inputs.row], inputs))

  def settle(state: _State, inputs: Inputs) -> _State:
    made = _clusters.k_means(
      inputs.keys(),
      jnp.maximum(inputs.first, sinks),
      inputs.lengths,
      most=state.clusters[inputs.row].centroids.shape[2],
      cluster_tokens=cluster_tokens,
      iterations=iterations,
      seed=seed,
    )
    return with_layer(state, inputs, made)

  def with_layer(state: _State, inputs: Inputs, clusters: Clusters) -> _State:
    row = inputs.row
    return state._replace(clusters=(*state.clusters[:row], clusters, *state.clusters[row + 1 :]))

  def select(state: _State, inputs: Inputs) -> tuple[Selection, _State]:
    labels, centroids, _ = state.clusters[inputs.row]
    b, heads, t = labels.shape
    q = inputs.q.reshape(b, heads, -1, inputs.q.shape[-1]).astype(jnp.float32)
    scores = jnp.einsum("bkgd,bkxd->bkgx", q, centroids)
    scores = _tokens.combine(scores, group)
    labels = jnp.repeat(labels, scores.shape[1] // heads, axis=1)
    # A token has the score of its cluster, and of equal ones the earlier come first.
    scores = jnp.take_along_axis(scores, labels, axis=-1)
    positions = jnp.arange(t, dtype=jnp.int32)[None, None]
    generated = _tokens.newest_generated(positions, state.prompt, inputs, budget_tokens)
    seen = _tokens.tokens_seen(positions, inputs)
    best = _tokens.best_tokens(scores, (positions < sinks) | generated, seen, budget_tokens)
    return _tokens.select_tokens(best, budget_tokens, page_size), state

  return Policy(
    name="clusterkv",
    budget_tokens=budget_tokens,
    stores=("resident",),
    register=register,
    preprocess=preprocess,
    select=select,
    settle=settle,
    page_size=page_size,
  )
