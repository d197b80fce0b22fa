"""OPT: learned positions, LayerNorm, ReLU, a bias on everything, as many KV heads as query heads.

Parameters are a plain tree, matrices stored [in, out] as in `models.decoder`; X is `token_dim`, the
width of the embedding, which is E in all sizes but 350m:

    {"embed": f[V, X], "positions": f[max_tokens + 2, E], "norm": f[E], "norm_bias": f[E],
     "head": f[V, X], "project_in": f[X, E], "project_out": f[E, X], "layers": L dicts}
    layer: {"attn_norm": f[E], "attn_norm_bias": f[E], "q", "k", "v", "o": f[E, E] and their biases
            f[E], "mlp_norm": f[E], "mlp_norm_bias": f[E], "up": f[E, F], "up_bias": f[F],
            "down": f[F, E], "down_bias": f[E]}

"head" is absent when it is tied, the two projections where X is E, and the final norm where norms
come last (350m): there each half of a layer is norm(x + f(x)), elsewhere x + f(norm(x)).

The original reserves the first two rows of the position table for padding, so position p is row
p + 2. Positions come from the caller, row by row: where padding stands makes no difference.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvjax.config import ModelConfig
from kvjax.types import WHOLE, Attend, Axes, Model, Params, State
from models.blocks import (
  layer_norm,
  linear,
  lookup,
  merge_heads,
  random_matrices,
  random_matrix,
  split_heads,
  vocabulary_product,
)

POSITION_OFFSET = 2


def _preset(num_layers: int, num_heads: int, embed_dim: int, **more) -> ModelConfig:
  return ModelConfig(
    family="opt",
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_dim=embed_dim // num_heads,
    embed_dim=embed_dim,
    ffn_dim=4 * embed_dim,
    vocab_size=50_272,
    max_tokens=2048,
    tied_embeddings=True,
    **more,
  )


PRESETS: dict[str, ModelConfig] = {
  "opt-125m": _preset(12, 12, 768),
  "opt-350m": _preset(24, 16, 1024, norm_last=True, token_dim=512),
  "opt-1.3b": _preset(24, 32, 2048),
  "opt-2.7b": _preset(32, 32, 2560),
  "opt-6.7b": _preset(32, 32, 4096),
  "opt-13b": _preset(40, 40, 5120),
  "opt-30b": _preset(48, 56, 7168),
  "opt-66b": _preset(64, 72, 9216),
}


def build(config: ModelConfig, axes: Axes = WHOLE) -> Model:
  """The OPT of this shape; with axes the part of one device, and the shape that of its part.

  Raises:
    ValueError: the config has fewer KV heads than query heads.
  """
  if config.num_kv_heads != config.num_heads:
    raise ValueError(
      f"OPT has as many KV heads as query heads, got {config.num_kv_heads} and {config.num_heads}"
    )
  return Model(
    config=config,
    init=partial(init, config),
    forward=partial(forward, config, axes=axes),
    query=partial(query, config),
    keys_values=partial(keys_values, config),
    unembed=partial(unembed, axes=axes),
    rotate=lambda x, positions: x,
    part=build,
  )


def init(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
  """Random weights: normal with standard deviation 1/sqrt(in), norms one, biases zero."""
  embed_key, place_key, head_key, in_key, out_key, *layer_keys = jax.random.split(
    key, 5 + config.num_layers
  )
  embed, width = config.embed_dim, config.token_dim or config.embed_dim
  rows = config.max_tokens + POSITION_OFFSET
  params = {
    "embed": random_matrix(embed_key, (config.vocab_size, width), dtype, fan_in=width),
    "positions": random_matrix(place_key, (rows, embed), dtype, fan_in=embed),
    "layers": tuple(_init_layer(config, one, dtype) for one in layer_keys),
  }
  if not config.norm_last:
    params |= _norm("norm", embed, dtype)
  if not config.tied_embeddings:
    params["head"] = random_matrix(head_key, (config.vocab_size, width), dtype, fan_in=width)
  if width != embed:
    params["project_in"] = random_matrix(in_key, (width, embed), dtype)
    params["project_out"] = random_matrix(out_key, (embed, width), dtype)
  return params


def forward(
  config: ModelConfig,
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  cache: State,
  attend: Attend,
  axes: Axes = WHOLE,
) -> tuple[jax.Array, State]:
  """Embeddings of tokens and positions, layers, and the final norm where there is one.

  Args:
    config: the static shape.
    params: the tree of the module docstring.
    tokens: i32[B, S].
    positions: i32[B, S], in [0, max_tokens); padding may lie beyond, and gets the last row.
    cache: whatever `attend` threads through.
    attend: called once a layer with q, k and v f[B, S, H, D].
    axes: mesh axes over which the weights are split.

  Returns:
    f[B, S, E] and the new cache.
  """
  x = lookup(params["embed"], tokens, axes.vocab)
  if "project_in" in params:
    x = linear(x, params, "project_in")
  x = x + params["positions"].at[positions + POSITION_OFFSET].get(mode="clip")
  for index, layer in enumerate(params["layers"]):
    hidden = x if config.norm_last else _apply_norm(config, x, layer, "attn_norm")
    q = query(config, params, index, hidden)
    k, v = keys_values(config, params, index, hidden)
    out, cache = attend(index, q, k, v, cache, hidden)
    x = x + linear(merge_heads(out), layer, "o", axes.inner)
    x = _apply_norm(config, x, layer, "attn_norm") if config.norm_last else x
    hidden = x if config.norm_last else _apply_norm(config, x, layer, "mlp_norm")
    x = x + linear(jax.nn.relu(linear(hidden, layer, "up")), layer, "down", axes.inner)
    x = _apply_norm(config, x, layer, "mlp_norm") if config.norm_last else x
  return (x if config.norm_last else _apply_norm(config, x, params, "norm")), cache


def query(config: ModelConfig, params: Params, layer: int, hidden: jax.Array) -> jax.Array:
  """Queries f[B, S, H, D] that a layer makes of hidden f[B, S, E]."""
  return split_heads(linear(hidden, params["layers"][layer], "q"), config.num_heads)


def keys_values(
  config: ModelConfig, params: Params, layer: int, hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Keys and values f[B, S, K, D] that a layer makes of hidden f[B, S, E]."""
  k, v = (linear(hidden, params["layers"][layer], name) for name in "kv")
  return split_heads(k, config.num_kv_heads), split_heads(v, config.num_kv_heads)


def unembed(params: Params, x: jax.Array, axes: Axes = WHOLE) -> jax.Array:
  """Logits f32[B, V] of x f[B, E], summed in f32."""
  if "project_out" in params:
    x = linear(x, params, "project_out")
  return vocabulary_product(x, params.get("head", params["embed"]), axes.vocab)


def _apply_norm(config: ModelConfig, x: jax.Array, tree: Params, name: str) -> jax.Array:
  return layer_norm(x, tree[name], tree[f"{name}_bias"], config.norm_eps)


def _norm(name: str, size: int, dtype: str) -> dict[str, jax.Array]:
  return {name: jnp.ones(size, dtype), f"{name}_bias": jnp.zeros(size, dtype)}


def _init_layer(config: ModelConfig, key: jax.Array, dtype: str) -> dict[str, jax.Array]:
  embed, ffn, heads = config.embed_dim, config.ffn_dim, config.num_heads * config.head_dim
  shapes = dict.fromkeys(("q", "k", "v"), (embed, heads))
  shapes |= {"o": (heads, embed), "up": (embed, ffn), "down": (ffn, embed)}
  layer = random_matrices(key, shapes, dtype)
  layer |= {f"{name}_bias": jnp.zeros(shape[1], dtype) for name, shape in shapes.items()}
  return layer | _norm("attn_norm", embed, dtype) | _norm("mlp_norm", embed, dtype)
