"""The decoder of Llama, Mistral, Yi and Qwen2, where it is not like OPT; see test_families too."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import build, decoder
from models.blocks import rms_norm, swiglu
from tests.models import naive, tiny

BASE = dataclasses.replace(tiny.CONFIG, num_heads=8, head_dim=8)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 300, (2, 13)))


def _forward(config, params, attend, tokens=TOKENS, cache=None):
  model = build(config)
  cache = naive.empty_cache(config, len(tokens)) if cache is None else cache
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return model.forward(params, tokens, positions, cache, attend)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_grouped_heads_equal_repeated_ones(group):
  config = dataclasses.replace(BASE, num_kv_heads=8 // group)
  model = build(config)
  params = model.init(jax.random.key(0), "float32")
  grouped, _ = _forward(config, params, naive.attend_with(model.rotate))
  repeated, _ = _forward(config, params, naive.attend_with(model.rotate, repeat_heads=True))
  np.testing.assert_allclose(grouped, repeated, atol=1e-5)

  # And a model of as many KV heads as query heads, whose weights repeat them.
  def widen(matrix):
    heads = matrix.reshape(config.embed_dim, config.num_kv_heads, config.head_dim)
    return jnp.repeat(heads, group, axis=1).reshape(config.embed_dim, -1)

  layers = tuple(
    layer | {"k": widen(layer["k"]), "v": widen(layer["v"])} for layer in params["layers"]
  )
  wide = dataclasses.replace(config, num_kv_heads=8)
  widened, _ = _forward(wide, params | {"layers": layers}, naive.attend_with(model.rotate))
  np.testing.assert_allclose(grouped, widened, atol=1e-5)


def test_attend_gets_unrotated_heads_and_the_normed_input():
  model = build(tiny.CONFIG)
  params = model.init(jax.random.key(0), "float32")
  seen = []

  def attend(layer, q, k, v, cache, hidden, /):
    seen.append(layer)
    weights = params["layers"][layer]
    np.testing.assert_allclose(q.reshape(2, 13, -1), hidden @ weights["q"], atol=1e-6)
    np.testing.assert_allclose(k.reshape(2, 13, -1), hidden @ weights["k"], atol=1e-6)
    assert k.shape == v.shape == (2, 13, 2, 16)
    return q, cache + 1

  x, cache = _forward(tiny.CONFIG, params, attend, cache=0)
  assert seen == [0, 1] and cache == 2 and x.shape == (2, 13, 64)


def test_tied_head_is_the_embedding():
  tied, untied = (decoder.init(c, jax.random.key(0)) for c in (tiny.tied(), tiny.CONFIG))
  x = jax.random.normal(jax.random.key(1), (2, tiny.CONFIG.embed_dim))
  assert "head" not in tied
  np.testing.assert_allclose(decoder.unembed(tied, x), x @ tied["embed"].T, atol=1e-5)
  np.testing.assert_allclose(decoder.unembed(untied, x), x @ untied["head"].T, atol=1e-5)


def test_build_refuses_another_family():
  with pytest.raises(ValueError, match="unknown model family 'gpt2', expected one of llama"):
    build(dataclasses.replace(tiny.CONFIG, family="gpt2"))


def test_norm_and_feed_forward_against_their_formulas():
  x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
  scale = np.arange(4, dtype=np.float32)
  expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.5) * scale
  np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(scale), 0.5), expected, rtol=1e-5)
  gate, up, down = np.random.default_rng(1).standard_normal((3, 4, 4)).astype(np.float32)
  hidden = (x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)
  found = swiglu(jnp.asarray(x), {"gate": gate, "up": up, "down": down})
  np.testing.assert_allclose(found, hidden @ down, rtol=1e-4, atol=1e-5)
