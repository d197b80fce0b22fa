"""InfiniGen's skew (Lee et al., OSDI 2024): directions in which a model's queries are large.

With the singular values of a head's queries Q = U S V^T, n x D over a calibration text, A = V is
orthogonal, so that (q A) . (k A) = q . k, and the first columns of Q A hold as much of the energy
of Q as any as many directions can. The original also orders the columns by the product of the
singular values of Q and K; both descend, so that this is a plain reversal, and whoever chooses
columns by their size does not see it: it is left out here.

Queries are those after the position rule, with which A commutes as little as any rotation: it is
applied at run time, or, where the rule leaves queries as they are (OPT), folded into the weights.
The G query heads of a KV head share its A: their queries are stacked.

    runner = prepare(model, watch_queries(), "resident", cache_config)
    skew = skew_of(prefill(runner, params, [tokens])[1].policy_state)
    profile = Profile(METHOD, name, model.config.content_hash, {}, {"skew": skew})
    policy = make_policy("infinigen", profile=profile)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import CacheConfig, ModelConfig
from kvjax.profiling._watching import watching
from kvjax.types import Inputs, Params, Policy

METHOD = "skewing"


def watch_queries() -> Policy:
  """A dense policy that remembers Q^T Q of every KV head, f32[B, K, D, D] for each layer."""

  def begin(model: ModelConfig, cache: CacheConfig) -> tuple[jax.Array, ...]:
    shape = (cache.batch_size, model.num_kv_heads, model.head_dim, model.head_dim)
    return tuple(jnp.zeros(shape, jnp.float32) for _ in range(model.num_layers))

  def watch(state: tuple[jax.Array, ...], inputs: Inputs) -> tuple[jax.Array, ...]:
    b, s, _, d = inputs.q.shape
    q = jnp.where(inputs.valid[..., None, None], inputs.q.astype(jnp.float32), 0.0)
    q = q.reshape(b, s, inputs.k.shape[2], -1, d)
    layer = state[inputs.layer] + jnp.einsum("bskgd,bskge->bkde", q, q)
    return (*state[: inputs.layer], layer, *state[inputs.layer + 1 :])

  return watching("watch_queries", begin, watch)


def skew_of(state: tuple[jax.Array, ...]) -> np.ndarray:
  """A for each layer and KV head, f32[L, K, D, D], largest direction first.

  Args:
    state: what `watch_queries` remembers, f32[B, K, D, D] for each layer; rows are added up.
  """
  squares = np.stack([np.asarray(layer, np.float64).sum(axis=0) for layer in state])
  vectors = np.linalg.eigh(squares)[1][..., ::-1]  # the eigenvalues of Q^T Q are S^2
  peaks = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=-2)[..., None, :], axis=-2)
  return (vectors * np.sign(peaks)).astype(np.float32)  # either sign would do; this is the same one


def fold_skew(model: ModelConfig, params: Params, skew: np.ndarray) -> Params:
  """Parameters of an OPT whose queries and keys come skewed; what it computes stays the same.

  Args:
    model: of the family "opt".
    params: its weights; those of q and k are [E, K*D] and have biases.
    skew: f32[L, K, D, D].

  Raises:
    ValueError: a family with rotary positions, which do not commute with the skew.
  """
  if model.family != "opt":
    raise ValueError(
      f"a skew cannot be folded into the weights of {model.family!r}, whose positions rotate "
      "queries and keys after them; give the policy its profile"
    )

  def folded(weights: jax.Array, one: np.ndarray) -> jax.Array:  # f[..., K*D]
    heads = weights.reshape(*weights.shape[:-1], *one.shape[:2]).astype(jnp.float32)
    out = jnp.einsum("...kd,kde->...ke", heads, jnp.asarray(one, jnp.float32))
    return out.reshape(weights.shape).astype(weights.dtype)

  names = ("q", "q_bias", "k", "k_bias")
  layers = tuple(
    layer | {name: folded(layer[name], one) for name in names}
    for layer, one in zip(params["layers"], skew, strict=True)
  )
  return params | {"layers": layers}
