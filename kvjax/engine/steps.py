"""The jitted steps: prefill a chunk, seal, decode a token. State goes in, new state comes out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cached
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache import OVERFLOW, KVCache
from kvjax.config import CacheConfig
from kvjax.engine import sharded
from kvjax.engine.attend import Call, Setting, decode_attend, one_token, prefill_attend
from kvjax.engine.preparing import Runner, abstract_caches, new_cache, part_of, seal_cache
from kvjax.engine.sampling import sample
from kvjax.types import Params
from pallas_kernels.dispatch import recording


def _specs(runner: Runner, mesh: Mesh) -> dict[str, Any]:
  """How everything that steps take and give is split over the mesh."""
  one = dict.fromkeys(mesh.shape, 1)
  parts = {
    axis: abstract_caches(part_of(runner, one | {axis: size})) for axis, size in mesh.shape.items()
  }
  prefill, decode = sharded.split_specs(abstract_caches(runner), parts)
  return {
    "params": sharded.param_specs(runner.model, mesh),
    "prefill": prefill,
    "decode": decode,
    "rest": prefill.replace(host=None, pools=None),
    "pools": prefill.pools,
    "stowed": decode.replace(host=None),
    "rows": sharded.ROWS,
    "heads": sharded.HEADS,
    "same": sharded.SAME,
  }


def _on_mesh(step: Callable, takes: tuple[str, ...], gives: Any, *, first: int = 0) -> Callable:
  """`step(runner, ..., *arrays)`, which every device runs on its part where there is a mesh.

  Args:
    step: the step of one device.
    takes: names in `_specs` of the arrays that it takes.
    gives: a pytree of names in `_specs`, of what it returns.
    first: static arguments between the runner and the arrays.
  """

  @wraps(step)
  def run(runner: Runner, *args):
    if runner.mesh is None:
      return step(runner, *args)
    specs, part = _specs(runner, runner.mesh), part_of(runner, runner.mesh.shape)

    def on_device(*arrays):
      return sharded.agreed(step(part, *args[:first], *arrays))

    on_devices = jax.shard_map(
      on_device if runner.store.on_host else partial(step, part, *args[:first]),
      mesh=runner.mesh,
      in_specs=tuple(specs[name] for name in takes[: len(args) - first]),
      out_specs=jax.tree.map(specs.__getitem__, gives),
      check_vma=False,  # loops carry what differs between devices beside what does not
    )
    return on_devices(*args[first:])

  return run


def empty_cache(runner: Runner) -> KVCache:
  """The cache that prefill begins with. Made inside jit, so that every array is the device's own
  and can be updated in place."""
  return _compiled_empty(runner)


def read_chunk(
  runner: Runner,
  params: Params,
  cache: KVCache,
  last: jax.Array,
  tokens: jax.Array,
  counts: jax.Array,
  start: jax.Array,
) -> tuple[jax.Array, KVCache]:
  """`prefill_chunk` before it is jitted, for steps that do more than that."""
  s = tokens.shape[1]
  offsets = jnp.arange(s, dtype=jnp.int32)[None]
  positions = jnp.broadcast_to(start + offsets, tokens.shape)
  call = Call(positions, offsets < counts[:, None], cache.lengths + counts)
  attend = prefill_attend(_setting(runner, params, runner.prefill_config), call)
  x, cache = runner.model.forward(params, tokens, positions, cache, attend)
  newest = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
  last = jnp.where((counts > 0)[:, None], newest, last)
  return last, _advance(cache, counts, runner.prefill_config.capacity_tokens)


def _decode(
  runner: Runner, params: Params, cache: KVCache, tokens: jax.Array, active=None, watch=None
) -> tuple[jax.Array, KVCache]:
  call, before = one_token(cache.lengths, active), cache.overflow
  attend = decode_attend(_setting(runner, params, runner.decode_config), call, watch)
  x, cache = runner.model.forward(params, tokens[:, None], cache.lengths[:, None], cache, attend)
  logits, counts = runner.model.unembed(params, x[:, 0]), 1
  if active is not None:
    counts = active.astype(jnp.int32)
    cache = cache.replace(overflow=jnp.where(active, cache.overflow, before))
  return logits, _advance(cache, counts, _decode_limit(runner))


def _setting(runner: Runner, params: Params, config: CacheConfig) -> Setting:
  query = partial(runner.model.query, params)
  return Setting(runner.policy, runner.store, runner.plan, runner.model.rotate, query, config)


def _decode_limit(runner: Runner) -> int | None:
  """Tokens that a row can hold; None where the policy makes room."""
  config = runner.decode_config
  if runner.store.drops and config.capacity_tokens < runner.prefill_config.capacity_tokens:
    return None
  return config.capacity_tokens


def _advance(cache: KVCache, counts, limit: int | None) -> KVCache:
  lengths = cache.lengths + counts
  overflow = cache.overflow
  if limit is not None:
    overflow = overflow | jnp.where(lengths > limit, OVERFLOW, 0).astype(jnp.uint32)
  return cache.replace(lengths=lengths, overflow=overflow)


def sealed(runner: Runner, cache: KVCache) -> KVCache:
  """The cache that decodes, of the one that prefilled, which is donated unless the store drops."""
  if runner.store.drops:
    return seal(runner, cache)
  if runner.store.on_host:
    # Host pools go round the jitted step: donated arrays are matched with results by shape alone,
    # and a result on the device may have theirs. The device's own pools end here.
    rest = cache.replace(host=None, pools=None)
    return stow(runner, rest, cache.pools).replace(host=cache.host)
  return cache if runner.policy.settle is None else settle(runner, cache)


def _stow(runner: Runner, rest: KVCache, pools) -> KVCache:
  return seal_cache(runner, rest.replace(pools=pools))


def _first_token(runner, sampling, params, last, key, lengths):
  logits = runner.model.unembed(params, last)
  logits = logits.at[:, list(sampling.not_first)].set(-jnp.inf) if sampling.not_first else logits
  return sample(logits, sampling, key, lengths)


def _next_token(runner, sampling, params, cache, tokens, key, active=None):
  logits, cache = _decode(runner, params, cache, tokens, active)
  return sample(logits, sampling, key, cache.lengths), cache


def _selected_pages(runner, params, cache, tokens):
  seen = {}

  def watch(layer, selection):
    seen[layer] = jnp.where(selection.mask.any(axis=-1), selection.pages, -1)

  _decode(runner, params, cache, tokens, watch=watch)
  return seen


_compiled_empty = jax.jit(_on_mesh(new_cache, (), "prefill"), static_argnums=0)

prefill_chunk = jax.jit(
  _on_mesh(read_chunk, ("params", "prefill", "rows", "rows", "rows", "same"), ("rows", "prefill")),
  static_argnums=0,
  donate_argnums=2,
)
"""`prefill_chunk(runner, params, cache, last f[B, E], tokens i32[B, S], counts i32[B], start i32[])
-> f[B, E], cache`: hidden state of each row's newest token, last where the chunk has none of the
row. S is `chunk_tokens`, start a multiple of it, counts the tokens of each row in this chunk; the
cache is donated."""

seal = jax.jit(_on_mesh(seal_cache, ("prefill",), "decode"), static_argnums=0)
"""`seal(runner, cache) -> cache`: from the cache that prefilled to the one that decodes."""

settle = jax.jit(_on_mesh(seal_cache, ("prefill",), "decode"), static_argnums=0, donate_argnums=1)
"""`settle(runner, cache) -> cache`: `seal` where the store drops nothing; the cache is donated."""

stow = jax.jit(_on_mesh(_stow, ("rest", "pools"), "stowed"), static_argnums=0, donate_argnums=1)
"""`stow(runner, cache, pools) -> cache`: `seal` where pages are on the host; the cache, which is
given without its pools, is donated."""

first_token = jax.jit(
  _on_mesh(_first_token, ("params", "rows", "rows", "rows"), "rows", first=1),
  static_argnums=(0, 1),
)
"""`first_token(runner, sampling, params, last f[B, E], key key[B], lengths i32[B]) -> i32[B]`."""

decode_step = jax.jit(
  _on_mesh(_decode, ("params", "decode", "rows", "rows"), ("rows", "decode")),
  static_argnums=0,
  donate_argnums=2,
)
"""`decode_step(runner, params, cache, tokens i32[B], active bool[B]) -> logits f32[B, V], cache`:
the cache is donated. Rows that are not active sit the step out: what the cache holds of them stays
as it is, and their logits mean nothing. Without active all rows take part."""

next_token = jax.jit(
  _on_mesh(_next_token, ("params", "decode", "rows", "rows", "rows"), ("rows", "decode"), first=1),
  static_argnums=(0, 1),
  donate_argnums=3,
)
"""`next_token(runner, sampling, params, cache, tokens i32[B], key key[B], active bool[B]) ->
i32[B], cache`: a decode step and the choice of the token after it; otherwise as `decode_step`."""


@cached
def kernels_of(runner: Runner) -> dict[str, str]:
  """Which implementation of each operation a decode step runs on this machine's default device.

  Returns:
    operation -> "xla" or "mosaic", as `pallas_kernels.dispatch.recording` tells it.
  """
  config = runner.decode_config
  params = jax.eval_shape(lambda: runner.model.init(jax.random.key(0), config.dtype))
  tokens = jax.ShapeDtypeStruct((config.batch_size,), jnp.int32)
  step = _on_mesh(_decode, ("params", "decode", "rows"), ("rows", "decode"))
  with recording() as chosen:
    jax.eval_shape(partial(step, runner), params, abstract_caches(runner)[1], tokens)
  return dict(chosen)


_compiled_selected_pages = jax.jit(
  _on_mesh(_selected_pages, ("params", "decode", "rows"), "heads"), static_argnums=0
)


def selected_pages(runner: Runner, params: Params, cache: KVCache, tokens: jax.typing.ArrayLike):
  """Pages that the next decode step of tokens i32[B] (or a list of B) would attend to.

  Returns:
    {layer: i32[B, K or H, M]} for each layer that selects, -1 where fewer pages are used. The cache
    is left as it was.
  """
  return _compiled_selected_pages(runner, params, cache, jnp.asarray(tokens, jnp.int32))
