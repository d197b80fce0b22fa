"""Puts a model, a policy and a store together: a runner, and the shapes and bytes of its caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from kvjax.cache import CacheBytes, KVCache, allocate, cache_bytes, host
from kvjax.config import CacheConfig, ModelConfig
from kvjax.engine import sharded
from kvjax.engine.placing import make_store
from kvjax.types import LayerPlan, Model, Policy, Store

CHUNKS = (64, 128, 256, 512, 1024)


class Runner(NamedTuple):
  """A model with a policy on a store, for one shape of cache: everything static about a run.

  Attributes:
    model: what is computed.
    policy: which KV matters.
    store: where it lives.
    plan: role of each layer.
    prefill_config: shape of the cache that prefills.
    decode_config: shape of the cache that decodes; the same unless the store drops.
    chunk_tokens: tokens of a row that one prefill step takes.
    prefill_bytes: bytes of the cache that prefills, on each device.
    decode_bytes: bytes of the cache that decodes, on each device.
    mesh: the devices; None for one.
  """

  model: Model
  policy: Policy
  store: Store
  plan: LayerPlan
  prefill_config: CacheConfig
  decode_config: CacheConfig
  chunk_tokens: int
  prefill_bytes: CacheBytes
  decode_bytes: CacheBytes
  mesh: Mesh | None = None


def prepare(
  model: Model,
  policy: Policy,
  store: str,
  cache_config: CacheConfig,
  *,
  chunk_tokens: int = 512,
  mesh: Mesh | None = None,
) -> Runner:
  """Puts a run together and tells its bytes; allocates and compiles nothing.

  Args:
    model: from `models.load` or a family's `build`.
    policy: from `make_policy`.
    store: name of a store; the policy must allow it.
    cache_config: shape of the cache; its capacity counts prompt and new tokens.
    chunk_tokens: tokens of a row that one prefill step takes: 64 to 1024, a power of two.
    mesh: from `make_mesh`, to run on several devices; the weights that the steps are given must lie
      as `param_shardings` says.

  Raises:
    ValueError: the pair is not allowed, or shapes do not fit.
  """
  chosen = make_store(store)
  if store.partition(":")[0] not in policy.stores:
    raise ValueError(
      f"policy {policy.name!r} cannot run on store {store!r}; it runs on {', '.join(policy.stores)}"
    )
  if chunk_tokens not in CHUNKS:
    raise ValueError(f"chunk_tokens {chunk_tokens} is not one of {CHUNKS}")
  if policy.page_size not in (None, cache_config.page_size):
    raise ValueError(
      f"policy {policy.name!r} was made for pages of {policy.page_size} tokens and the cache has "
      f"pages of {cache_config.page_size}; give both the same page_size"
    )
  if mesh is not None:
    sharded.check_mesh(mesh)
    sharded.check_heads(mesh, policy, chosen)
  cache_config = _windowed(model, policy, cache_config, chunk_tokens)
  plan = _plan(policy, model.config, cache_config)
  if chosen.on_host and not plan.select_layers:
    raise ValueError(
      f"store {store!r} keeps pages of layers that select, and policy {policy.name!r} selects in "
      f"none of {model.config.num_layers}; take store 'resident', or fewer dense layers"
    )
  decode_config = chosen.decode_config(cache_config, policy)
  runner = Runner(
    model,
    policy,
    chosen,
    plan,
    cache_config,
    decode_config,
    chunk_tokens,
    CacheBytes(0, 0, 0),
    CacheBytes(0, 0, 0),
    mesh,
  )
  prefill, decode = abstract_caches(runner if mesh is None else part_of(runner, mesh.shape))
  here = 1 if mesh is None else mesh.size // jax.process_count()  # devices that share the memory
  reading, decoding = cache_bytes(prefill), cache_bytes(decode)  # a store may pin more than pages
  host.check_fits(max(reading.host, decoding.host) * here, jax.default_backend())
  return runner._replace(prefill_bytes=reading, decode_bytes=decoding)


def _plan(policy: Policy, model: ModelConfig, cache_config: CacheConfig) -> LayerPlan:
  """The roles of the layers; the state that comes with them is not made."""
  registered: list[LayerPlan | ValueError] = []

  def state():
    try:
      plan, state = policy.register(model, cache_config)
    except ValueError as error:  # JAX would add notes of its own to what the user reads
      registered.append(error)
      return ()
    registered.append(plan)
    return state

  jax.eval_shape(state)
  if isinstance(registered[0], ValueError):
    raise registered[0]
  return registered[0]


def _windowed(
  model: Model, policy: Policy, cache_config: CacheConfig, chunk_tokens: int
) -> CacheConfig:
  """The cache's config with the model's window, and a ring of slots where that is shorter.

  The ring has room for the window of every token of a prefill chunk, in whole chunks. A policy
  with positions inside the cache (StreamingLLM) sees tokens that the model's window has passed.
  """
  window = model.config.window_tokens
  if window is None:
    return cache_config
  ring = -(-(window - 1) // chunk_tokens) * chunk_tokens + chunk_tokens
  shorter = ring < cache_config.capacity_tokens and policy.cache_positions is None
  return dataclasses.replace(
    cache_config, window_tokens=window, ring_tokens=ring if shorter else None
  )


def abstract_caches(runner: Runner) -> tuple[KVCache, KVCache]:
  """Shapes of the cache that prefills and of the one that decodes."""
  empty = jax.eval_shape(partial(new_cache, runner))
  return empty, jax.eval_shape(partial(seal_cache, runner), empty)


def part_of(runner: Runner, sizes: Mapping[str, int]) -> Runner:
  """What each device runs where the axes of the mesh have these sizes."""
  return runner._replace(
    model=sharded.part_of_model(runner.model, sizes[sharded.MODEL]),
    prefill_config=sharded.part_of_cache(runner.prefill_config, sizes[sharded.DATA]),
    decode_config=sharded.part_of_cache(runner.decode_config, sizes[sharded.DATA]),
    mesh=None,
  )


def new_cache(runner: Runner) -> KVCache:
  """An empty cache, for prefill."""
  state = runner.policy.register(runner.model.config, runner.prefill_config)[1]
  store, plan = runner.store, runner.plan
  return allocate(
    runner.model.config,
    runner.prefill_config,
    plan,
    state,
    on_host=store.on_host,
    stay=plan.on_device if store.on_host and store.tiers_heads else (),
  )


def seal_cache(runner: Runner, cache: KVCache) -> KVCache:
  """The cache that decodes, of the one that prefilled."""
  return runner.store.seal(cache, runner.policy, runner.decode_config, runner.plan)
