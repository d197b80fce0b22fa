"""What holds for every family: heads, steps against one pass, padding, causality, dtypes, sizes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import PRESETS, build, param_shapes
from tests.models import naive, tiny

TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 300, (2, 13)))
every_family = pytest.mark.parametrize("config", tiny.FAMILIES.values(), ids=tiny.FAMILIES)
PARAMETERS = {  # as their publishers count them
  "llama-2-7b": 6_738_415_616,
  "llama-2-13b": 13_015_864_320,
  "llama-2-70b": 68_976_648_192,
  "llama-3.1-8b": 8_030_261_248,
  "llama-3.1-70b": 70_553_706_496,
  "llama-3.2-1b": 1_235_814_400,
  "llama-3.2-3b": 3_212_749_824,
  "smollm2-135m": 134_515_008,
  "mistral-7b-v0.1": 7_241_732_096,
  "mistral-7b-v0.3": 7_248_023_552,
  "mistral-small-24b": 23_572_403_200,
  "yi-6b": 6_061_035_520,
  "yi-9b": 8_829_407_232,
  "yi-34b": 34_388_917_248,
  "qwen2.5-0.5b": 494_032_768,
  "qwen2.5-1.5b": 1_543_714_304,
  "qwen2.5-3b": 3_085_938_688,
  "qwen2.5-7b": 7_615_616_512,
  "qwen2.5-14b": 14_770_033_664,
  "qwen2.5-32b": 32_763_876_352,
  "opt-125m": 125_239_296,
  "opt-350m": 331_196_416,
  "opt-1.3b": 1_315_758_080,
  "opt-6.7b": 6_658_473_984,
}


def _model(config, dtype="float32"):
  """A model whose norms are not one and whose biases are not zero, as trained ones are."""
  model = build(config)
  leaves, tree = jax.tree.flatten(model.init(jax.random.key(0), dtype))
  keys = jax.random.split(jax.random.key(1), len(leaves))
  vectors = [
    leaf + (jax.random.normal(key, leaf.shape) / 4).astype(dtype) if leaf.ndim == 1 else leaf
    for key, leaf in zip(keys, leaves, strict=True)
  ]
  return model, jax.tree.unflatten(tree, vectors)


def _forward(model, params, attend, tokens=TOKENS, start=0, cache=None):
  cache = naive.empty_cache(model.config, len(tokens)) if cache is None else cache
  positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
  return model.forward(params, tokens, positions, cache, attend)


def test_every_family_is_here():
  assert {config.family for config in tiny.FAMILIES.values()} == set(models.FAMILIES)


@every_family
def test_grouped_heads_equal_repeated_ones(config):
  model, params = _model(config)
  grouped, repeated = (
    _forward(model, params, naive.attend_with(model.rotate, repeat))[0] for repeat in (False, True)
  )
  np.testing.assert_allclose(grouped, repeated, atol=1e-5)


@every_family
def test_prefill_and_steps_equal_one_pass(config):
  model, params = _model(config)
  attend = naive.attend_with(model.rotate, window=config.window_tokens)
  whole, _ = _forward(model, params, attend)
  parts, cache = [], None
  for start, stop in ((0, 9), (9, 12), (12, 13)):
    part, cache = _forward(model, params, attend, TOKENS[:, start:stop], start, cache)
    parts.append(part)
  np.testing.assert_allclose(whole, jnp.concatenate(parts, axis=1), atol=1e-5)


@every_family
def test_padded_rows_equal_the_rows_alone(config):
  model, params = _model(config)
  rows = [np.asarray(TOKENS[0]), np.asarray(TOKENS[1, :6])]
  alone = [naive.logits(model, params, jnp.asarray(row)[None])[0] for row in rows]
  for side in ("left", "right"):
    tokens, valid = np.full((2, 13), 7), np.zeros((2, 13), bool)
    spans = [slice(13 - len(row), 13) if side == "left" else slice(len(row)) for row in rows]
    for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
      tokens[index, span], valid[index, span] = row, True
    together = naive.logits(model, params, jnp.asarray(tokens), jnp.asarray(valid))
    for found, span, expected in zip(together, spans, alone, strict=True):
      np.testing.assert_allclose(found[span], expected, atol=2e-5)


@every_family
def test_tokens_see_the_past_that_their_window_reaches(config):
  model, params = _model(config)
  plain = naive.logits(model, params, TOKENS)
  for at in (0, 8):
    changed = naive.logits(model, params, TOKENS.at[:, at].add(1))
    differs = (jnp.abs(changed - plain) > 1e-5).any(-1).any(0)
    window = config.window_tokens or 13
    last = at + config.num_layers * (window - 1)  # each layer looks back by one window
    assert differs.tolist() == [at <= position <= last for position in range(13)]


@every_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_and_shapes(config, dtype):
  model = build(config)
  params = model.init(jax.random.key(0), dtype)
  shapes = param_shapes(config, dtype)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
    lambda x: (x.shape, x.dtype), shapes
  )
  logits = naive.logits(model, params, TOKENS)
  assert logits.shape == (2, 13, 300) and logits.dtype == jnp.float32
  assert bool(jnp.isfinite(logits).all()) and 0.1 < float(logits.std()) < 10


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_without_allocating(name):
  shapes = param_shapes(PRESETS[name], "bfloat16")
  assert PRESETS[name].family in models.FAMILIES
  if name in PARAMETERS:
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[name]


def test_opt_reads_its_positions_and_pads_beyond_the_last():
  config = tiny.FAMILIES["opt"]
  model, params = _model(config)
  attend = naive.attend_with(model.rotate)
  here, there = (_forward(model, params, attend, start=start)[0] for start in (0, 3))
  assert float(jnp.abs(here - there).max()) > 0.01
  last, beyond = (
    model.forward(
      params,
      TOKENS[:, :1],
      jnp.full((2, 1), position, jnp.int32),
      naive.empty_cache(config, 2),
      attend,
    )[0]
    for position in (config.max_tokens - 1, config.max_tokens + 500)
  )
  np.testing.assert_array_equal(last, beyond)


def test_opt_refuses_fewer_kv_heads():
  config = dataclasses.replace(tiny.FAMILIES["opt"], num_kv_heads=2)
  with pytest.raises(ValueError, match="as many KV heads as query heads, got 2 and 4"):
    build(config)
