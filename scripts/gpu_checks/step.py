"""The decode step of Llama-3.1-8B's shape with random weights, under three policies.

Rows are as if 32k tokens had been prefilled: what a step costs hangs on lengths, not on what pages
hold. The floor is the time of reading all weights, and the keys and values (and bounds) that the
policy must read, at the bandwidth of a copy on the device.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from functools import cache, partial
from types import ModuleType

import jax
import jax.numpy as jnp

from scripts.gpu_checks.attention import bandwidth
from scripts.gpu_checks.case import Case, LeftOut, Setting
from scripts.gpu_checks.timing import measured, seconds_of

SECONDS = 110
STEPS = 16  # FlexiCache ranks once in as many
BUDGET_TOKENS, PAGE_SIZE = 1024, 16
POLICIES = ("dense", "quest", "flexicache")
TINY = {"num_layers": 3, "embed_dim": 64, "ffn_dim": 64, "num_heads": 4, "num_kv_heads": 2}
TINY |= {"head_dim": 16, "vocab_size": 256}


def cases(setting: Setting) -> Iterator[Case]:
  """A policy and a batch size each."""
  for batch in (1,) if setting.interpret else (4, 8):
    for policy in POLICIES:
      yield Case(f"{policy} batch {batch}", partial(_step, policy, batch, setting))


def _module(name: str) -> ModuleType:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    raise LeftOut(f"{name} needs {error.name}, which is not installed") from error


@cache
def _model(interpret: bool):
  """The model and its parameters in bf16, made on the device."""
  families = _module("models.families")
  config = families.PRESETS["llama-3.1-8b"]
  if interpret:
    config = dataclasses.replace(config, **TINY)
  model = families.build(config)
  leaves, tree = jax.tree.flatten(families.param_shapes(config, "bfloat16"))
  # A leaf at a time: few shapes are compiled, where the whole of `init` takes half a minute.
  normal = jax.jit(
    lambda key, size: jax.random.normal(key, size, "bfloat16") / 64, static_argnums=1
  )
  keys = jax.random.split(jax.random.key(0), len(leaves))
  made = [normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
  return model, jax.tree.unflatten(tree, made)


def _step(policy: str, batch: int, setting: Setting):
  kvjax, steps = _module("kvjax"), _module("kvjax.engine.steps")
  dispatch = _module("pallas_kernels.dispatch")
  model, params = _model(setting.interpret)
  tokens = 256 if setting.interpret else 32_768
  budget = 64 if setting.interpret else BUDGET_TOKENS
  chosen = kvjax.make_policy(policy, budget_tokens=budget, page_size=PAGE_SIZE)
  config = kvjax.CacheConfig(batch, tokens, PAGE_SIZE, "bfloat16", base_tokens=tokens)
  runner = kvjax.prepare(model, chosen, "resident", config)
  cache = steps.empty_cache(runner)
  rounds = 2 if setting.interpret else 5
  cache = cache.replace(lengths=cache.lengths + (tokens - (rounds + 1) * STEPS - 1))
  held, newest = [cache], jnp.zeros(batch, jnp.int32)

  def decode():
    logits, held[0] = steps.decode_step(runner, params, held[0], newest)
    return logits

  with dispatch.recording() as implementations:
    jax.block_until_ready(decode())
  seconds = seconds_of(lambda: [decode() for _ in range(STEPS)][-1], rounds=rounds) / STEPS
  return measured(
    seconds,
    _bytes(runner, params, budget, batch),
    bandwidth(setting),
    ok=not bool(held[0].overflow.any()),
    tokens_per_s=batch / seconds,
    implementations=dict(implementations),
  )


def _bytes(runner, params, budget: int, batch: int) -> int:
  """Weights, what is remembered of pages, and the keys and values of what a policy selects."""
  config, rows = runner.model.config, len(runner.plan.select_layers)
  weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
  one = 2 * batch * config.num_kv_heads * config.head_dim * 2  # a token of a layer, in bf16
  read = one * (budget * rows + runner.decode_config.capacity_tokens * (config.num_layers - rows))
  return weights + runner.decode_bytes.metadata + read
