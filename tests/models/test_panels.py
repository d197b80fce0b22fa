"""Weights in panels: another order in memory, the same model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from kvjax import CacheConfig, decode_step, make_policy, prepare
from kvjax.engine import steps
from models.blocks import linear
from models.panels import WIDTH, for_decode
from tests.models.tiny import FAMILIES

ROWS = 3
NO_LAYERS = {"layers": (), "embed": jnp.ones((2, 5))}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "opt-350m"])
def test_a_step_in_panels_is_the_step(name, tied):
  config = dataclasses.replace(FAMILIES[name], tied_embeddings=tied, vocab_size=2 * WIDTH)
  model = models.build(config)
  params = model.init(jax.random.key(0))
  panels = for_decode(params, ROWS)
  shapes = {key: w.shape for key, w in panels["layers"][0].items()}
  assert shapes["o"] == (1, 64, WIDTH) and shapes["attn_norm"] == (64,)
  assert len(shapes["up"]) == 2, "96 columns are no whole panels"
  assert panels["head"].shape[::2] == (2, WIDTH) and panels["embed"] is params["embed"]
  runner = prepare(model, make_policy("dense"), "resident", CacheConfig(ROWS, 32))
  tokens = jnp.array([3, 1, 4], jnp.int32)
  cache = steps.sealed(runner, steps.empty_cache(runner))
  plain, _ = decode_step(runner, params, cache, tokens)
  cache = steps.sealed(runner, steps.empty_cache(runner))
  paneled, _ = decode_step(runner, panels, cache, tokens)
  np.testing.assert_allclose(paneled, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(ROWS, 1), (2, 4), ()])
def test_products_are_those_of_the_matrix(shape):
  """With a bias, of rows of any shape; a single token in a cache would not show q and k."""
  keys = jax.random.split(jax.random.key(1), 3)
  layer = {
    "up": jax.random.normal(keys[0], (5, 3 * WIDTH)),
    "up_bias": jax.random.normal(keys[1], (3 * WIDTH,)),
  }
  panels = for_decode(NO_LAYERS | {"layers": (layer,)}, ROWS)["layers"][0]
  x = jax.random.normal(keys[2], (*shape, 5))
  np.testing.assert_allclose(linear(x, panels, "up"), linear(x, layer, "up"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 8])
def test_panels_keep_the_columns_in_order(rows):
  w = jnp.arange(2.0 * 3 * WIDTH).reshape(2, 3 * WIDTH)
  panels = for_decode(NO_LAYERS | {"layers": ({"up": w},)}, rows)["layers"][0]["up"]
  np.testing.assert_array_equal(jnp.concatenate(list(panels), axis=1), w)


def test_a_head_of_no_whole_panels_is_kept():
  embed = jnp.arange(12.0).reshape(4, 3)
  assert for_decode({"layers": (), "embed": embed}, 1)["head"] is embed


@pytest.mark.parametrize("rows", [9, 512])
def test_other_numbers_of_rows_keep_their_weights(rows):
  params = NO_LAYERS | {"layers": ({"up": jnp.ones((2, WIDTH))},)}
  assert for_decode(params, rows) is params


def test_half_precision_keeps_its_weights():
  layer, head = {"up": jnp.ones((2, WIDTH), jnp.bfloat16)}, jnp.ones((WIDTH, 2), jnp.bfloat16)
  params = for_decode({"layers": (layer,), "embed": head, "head": head}, ROWS)
  assert params["layers"][0]["up"] is layer["up"] and params["head"] is head
