"""The decoder that Llama, Mistral, Yi and Qwen2 share: rotary positions, grouped-query attention,
RMSNorm before each half of a layer, SwiGLU.

Parameters are a plain tree, every layer's matrix stored [in, out] so that `x @ w` reads along its
rows; the head is stored like the embedding, [V, E], and absent when it is tied:

    {"embed": f[V, E], "norm": f[E], "head": f[V, E], "layers": one dict for each of the L layers}
    layer: {"attn_norm": f[E], "q": f[E, H*D], "k": f[E, K*D], "v": f[E, K*D], "o": f[H*D, E],
            "mlp_norm": f[E], "gate": f[E, F], "up": f[E, F], "down": f[F, E]}
    with biases of q, k, v (Qwen2), also "q_bias": f[H*D], "k_bias": f[K*D], "v_bias": f[K*D]

Measured on 2 CPU cores, jax 0.11.2 and 0.12.0.1 alike: a step of the 49152 x 576 head takes 2.8 ms
as [V, E] and 2.6 ms as [E, V] at batch 1, 4.8 and 7.4 ms at batch 4, so a tied head needs no
transposed copy; the layers' smaller matrices are 10 % faster as [in, out] at batch 4. What decode
steps of few rows read faster than either is in `models/panels.py`.

Layers are a tuple and the forward pass a Python loop over it, not a scan over stacked weights,
which would copy every layer's weights at each step on CPU.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvjax.config import ModelConfig
from kvjax.types import WHOLE, Attend, Axes, Model, Params, State
from models.blocks import (
  linear,
  lookup,
  merge_heads,
  random_matrices,
  random_matrix,
  rms_norm,
  split_heads,
  swiglu,
  vocabulary_product,
)
from models.rope import rotary


def build(config: ModelConfig, axes: Axes = WHOLE, *, qkv_bias: bool = False) -> Model:
  """The model of this shape; qkv_bias says whether q, k and v have biases.

  With axes it is the part of one device, and the shape that of its part.
  """
  return Model(
    config=config,
    init=partial(init, config, qkv_bias=qkv_bias),
    forward=partial(forward, config, axes=axes),
    query=partial(query, config),
    keys_values=partial(keys_values, config),
    unembed=partial(unembed, axes=axes),
    rotate=rotary(config),
    part=partial(build, qkv_bias=qkv_bias),
  )


def init(
  config: ModelConfig, key: jax.Array, dtype: str = "float32", *, qkv_bias: bool = False
) -> Params:
  """Random weights: normal with standard deviation 1/sqrt(in), norms one, biases normal / 10."""
  embed_key, head_key, *layer_keys = jax.random.split(key, 2 + config.num_layers)
  # Rows of unit size times 1/sqrt(E), so that a tied head gives logits of order one.
  shape = (config.vocab_size, config.embed_dim)
  params = {
    "embed": random_matrix(embed_key, shape, dtype, fan_in=config.embed_dim),
    "layers": tuple(_init_layer(config, one, dtype, qkv_bias) for one in layer_keys),
    "norm": jnp.ones(config.embed_dim, dtype),
  }
  if not config.tied_embeddings:
    params["head"] = random_matrix(head_key, shape, dtype, fan_in=config.embed_dim)
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
  """Embeddings, layers and the final norm.

  Args:
    config: the static shape.
    params: the tree of the module docstring.
    tokens: i32[B, S].
    positions: i32[B, S]; unused here, since `attend` turns queries and keys.
    cache: whatever `attend` threads through.
    attend: called once a layer with q f[B, S, H, D], k and v f[B, S, K, D], not yet rotated.
    axes: mesh axes over which the weights are split.

  Returns:
    f[B, S, E] and the new cache.
  """
  del positions
  x = lookup(params["embed"], tokens, axes.vocab)
  for index, layer in enumerate(params["layers"]):
    hidden = rms_norm(x, layer["attn_norm"], config.norm_eps)
    q = query(config, params, index, hidden)
    k, v = keys_values(config, params, index, hidden)
    out, cache = attend(index, q, k, v, cache, hidden)
    x = x + linear(merge_heads(out), layer, "o", axes.inner)
    hidden = rms_norm(x, layer["mlp_norm"], config.norm_eps)
    x = x + swiglu(hidden, layer, axes.inner)
  return rms_norm(x, params["norm"], config.norm_eps), cache


def query(config: ModelConfig, params: Params, layer: int, hidden: jax.Array) -> jax.Array:
  """Queries f[B, S, H, D] that a layer makes of hidden f[B, S, E], not yet rotated."""
  return split_heads(linear(hidden, params["layers"][layer], "q"), config.num_heads)


def keys_values(
  config: ModelConfig, params: Params, layer: int, hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Keys, not yet rotated, and values f[B, S, K, D] that a layer makes of hidden f[B, S, E]."""
  k, v = (linear(hidden, params["layers"][layer], name) for name in "kv")
  return split_heads(k, config.num_kv_heads), split_heads(v, config.num_kv_heads)


def unembed(params: Params, x: jax.Array, axes: Axes = WHOLE) -> jax.Array:
  """Logits f32[B, V] of x f[B, E], summed in f32."""
  return vocabulary_product(x, params.get("head", params["embed"]), axes.vocab)


def _init_layer(
  config: ModelConfig, key: jax.Array, dtype: str, qkv_bias: bool
) -> dict[str, jax.Array]:
  embed, ffn = config.embed_dim, config.ffn_dim
  query = config.num_heads * config.head_dim
  keyvalue = config.num_kv_heads * config.head_dim
  shapes = {
    "q": (embed, query),
    "k": (embed, keyvalue),
    "v": (embed, keyvalue),
    "o": (query, embed),
    "gate": (embed, ffn),
    "up": (embed, ffn),
    "down": (ffn, embed),
  }
  layer = random_matrices(key, shapes, dtype)
  if qkv_bias:
    sizes = {"q_bias": (query,), "k_bias": (keyvalue,), "v_bias": (keyvalue,)}
    biases = random_matrices(jax.random.fold_in(key, 1), sizes, "float32")
    layer |= {name: (bias * bias.size**0.5 / 10).astype(dtype) for name, bias in biases.items()}
  return layer | {"attn_norm": jnp.ones(embed, dtype), "mlp_norm": jnp.ones(embed, dtype)}
