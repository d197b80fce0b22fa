"""The matrix of (policy, setting, store) that every law is held against, and runs of it.

A new policy only has to be given two settings here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import POLICIES, CacheConfig, KVCache, ModelConfig, Runner, make_policy, prepare
from kvjax.engine import steps
from kvjax.engine.generate import prefill
from kvjax.types import Model
from models import build

PAGE = 16
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
  "dense": {"harsh": {}},  # it has no setting
  "quest": {
    "gentle": {"budget_tokens": 80, "dense_layers": 1},
    "harsh": {"budget_tokens": 32, "dense_layers": 1, "group": "none"},
  },
  "streaming": {
    "gentle": {"budget_tokens": 80},
    "harsh": {"budget_tokens": 32, "sinks": 3},
  },
  "infinigen": {
    "gentle": {"budget_tokens": 80},
    "harsh": {"budget_tokens": 32, "dense_layers": 1, "alpha": 1.0, "group": "none"},
  },
  "omnikv": {
    "gentle": {"budget_tokens": 80, "filter_layers": (0,)},
    "harsh": {
      **{"budget_tokens": 32, "filter_layers": (0,), "wait_layers": 0},
      **{"selector": "uniform", "window": 7},
    },
  },
  "clusterkv": {
    "gentle": {"budget_tokens": 80, "cluster_tokens": 12},
    "harsh": {
      **{"budget_tokens": 32, "dense_layers": 1, "group": "none"},
      **{"sinks": 3, "cluster_tokens": 8},
    },
  },
  "arkvale": {
    "gentle": {"budget_tokens": 80, "dense_layers": 1},
    "harsh": {"budget_tokens": 32, "dense_layers": 1, "sink_pages": 0, "window_pages": 1},
  },
  "flexicache": {
    "gentle": {"budget_tokens": 80, "unstable_heads": ((0, 0), (2, 0))},
    "harsh": {"budget_tokens": 32, "period": 5},
  },
  "flexicache_adaptive": {
    "gentle": {"budget_tokens": 80},
    "harsh": {"budget_tokens": 32, "longest": 8, "missed_mass": 0.1},
  },
  "lserve": {
    "gentle": {"budget_tokens": 80, "page_size": PAGE, "logical": 4, "group": "max"},
    "harsh": {"budget_tokens": 32, "page_size": PAGE},
  },
  "snapkv": {
    "gentle": {"budget_tokens": 80, "new_tokens": 20, "pool": "max", "group": "max"},
    "harsh": {"budget_tokens": 32, "window": 7, "new_tokens": 20},
  },
  "pyramidkv": {  # whose lower layers keep nearly twice the budget
    "gentle": {"budget_tokens": 56, "window": 8, "new_tokens": 20},
    "harsh": {"budget_tokens": 24, "window": 7, "new_tokens": 20, "beta": 5, "kernel": 3},
  },
  "h2o": {
    "gentle": {"budget_tokens": 80},
    "harsh": {"budget_tokens": 32, "recent": 3},
  },
  "tova": {
    "gentle": {"budget_tokens": 80},
    "harsh": {"budget_tokens": 32},
  },
  "duo": {  # with heads that keep everything: test_duo.py
    "gentle": {"budget_tokens": 80, "sinks": 8},
    "harsh": {"budget_tokens": 32, "sinks": 3},
  },
  "morphkv": {
    "gentle": {"budget_tokens": 80},
    "harsh": {"budget_tokens": 32, "window": 7, "fuse": "sum"},
  },
}


class Entry(NamedTuple):
  """One cell of the matrix."""

  policy: str
  setting: str
  store: str

  def __str__(self) -> str:
    return "-".join(self)


# Those that every other is built like; the whole product of policies, settings and shapes would
# take an hour. The others have one setting here, fewer shapes, and tests of their own.
THOROUGH = ("dense", "quest", "streaming")


# Stores with a host tier, and the policies that hold all laws on them, in one setting; those of the
# others that run there give the same tokens as on the device: test_host_stores.py. Only a strict
# op_block attends to nothing but the selection, which the laws are about.
HOST = {
  "whole_page": (("quest", "harsh"), ("infinigen", "harsh"), ("omnikv", "harsh")),
  "prefetch_all": (("infinigen", "harsh"),),
  "op_block:strict=True": (("flexicache", "harsh"), ("infinigen", "gentle"), ("omnikv", "harsh")),
  "op_block:strict=True:shared=False": (("infinigen", "gentle"),),
  "token_slots:strict=True": (("infinigen", "gentle"), ("omnikv", "harsh")),
  "head_tiered": (("flexicache", "harsh"), ("flexicache_adaptive", "harsh")),
}


def entries() -> list[Entry]:
  """Every policy that is registered, on every store that it allows; both settings if thorough."""
  on_device = [
    Entry(name, setting, store)
    for name in POLICIES
    for setting in SETTINGS.get(name, {})
    for store in ("resident", "compact")
    if store in make_policy(name, **SETTINGS[name][setting]).stores
    and (name in THOROUGH or setting == "harsh")
  ]
  return on_device + [Entry(*pair, store) for store, pairs in HOST.items() for pair in pairs]


class Shape(NamedTuple):
  """Heads and family of a tiny model."""

  kv_heads: int
  group: int
  head_dim: int
  family: str = "llama"

  def __str__(self) -> str:
    return f"{self.family}-K{self.kv_heads}G{self.group}D{self.head_dim}"


# Laws that need few runs are held in all shapes, the others in the first. Mistral's window has laws
# of its own (test_window.py); without it Mistral and Yi are Llama's code.
SHAPES = (
  *(Shape(2, 4, 16), Shape(2, 1, 32), Shape(1, 8, 16)),
  *(Shape(1, 2, 16, "qwen2"), Shape(3, 1, 16, "opt")),
)


def shapes_of(entry: Entry) -> tuple[Shape, ...]:
  """Shapes of the laws that need few runs; on a host tier more than one for the first policy of a
  store, since the others' shapes are those of the same policy on the device."""
  if entry.store in HOST and entry[:2] != HOST[entry.store][0]:
    return SHAPES[:1]
  if entry.policy not in THOROUGH or entry.store in HOST:
    return SHAPES[0], SHAPES[-1]  # OPT neither rotates nor groups heads, and has biases as Qwen2
  return SHAPES if entry.setting == "harsh" else SHAPES[:1]


LENGTHS = (127, 128, 129, 1)  # one under, at and over a page, and a row that is all padding later
NUM_STEPS = 20  # over a page boundary of every long row
CAPACITY = 160


@cache
def tiny_model(shape: Shape, num_layers: int = 3) -> tuple[Model, Any]:
  """A random model of this shape and its f32 weights."""
  config = ModelConfig(
    family=shape.family,
    num_layers=num_layers,
    num_heads=shape.kv_heads * shape.group,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    embed_dim=48,
    ffn_dim=64,
    vocab_size=160,
    max_tokens=4096,
    rope_theta=1000.0,
  )
  model = build(config)
  params = model.init(jax.random.key(7), "float32")
  # Sharper attention than random weights give, so that what is left out shows.
  sharper = tuple(layer | {"q": 1.5 * layer["q"]} for layer in params["layers"])
  return model, params | {"layers": sharper}


# Two layers tell a layer from its row; most of the time of all laws goes into compiling them. A
# third is needed where one speculates from a layer that selects (InfiniGen), shares the selection
# of another (OmniKV), has heads of its own (FlexiCache) or a budget between two others (PyramidKV).
_LAYERS = {"infinigen": 3, "omnikv": 3, "flexicache": 3, "pyramidkv": 3}


def model_of(entry: Entry, shape: Shape) -> tuple[Model, Any]:
  """The tiny model of a cell, with as many layers as its policy needs."""
  return tiny_model(shape, _LAYERS.get(entry.policy, 2))


@cache
def known_model(shape: Shape, num_layers: int = 3) -> tuple[Model, Any]:
  """The same with a content hash, so that it can have a profile."""
  model, params = tiny_model(shape, num_layers)
  return build(dataclasses.replace(model.config, content_hash="ab" * 32)), params


@cache
def runner_of(
  entry: Entry,
  shape: Shape,
  *,
  batch: int = len(LENGTHS),
  capacity: int = CAPACITY,
  chunk: int = 64,
  base: int = 1024,
  budget: int | None = None,
) -> Runner:
  """The runner of a cell; budget, if given, is laid over the setting."""
  options = SETTINGS[entry.policy][entry.setting] | ({"budget_tokens": budget} if budget else {})
  policy = make_policy(entry.policy, **options)
  config = CacheConfig(batch, capacity, PAGE, base_tokens=base)
  return prepare(model_of(entry, shape)[0], policy, entry.store, config, chunk_tokens=chunk)


def tokens_of(lengths: Sequence[int], vocab: int = 160, seed: int = 0) -> list[list[int]]:
  """Random rows; the first tokens of a row are the same whatever its length."""
  return [
    np.random.default_rng([seed, row]).integers(0, vocab, 512)[:length].tolist()
    for row, length in enumerate(lengths)
  ]


ROWS = tuple(tuple(row) for row in tokens_of([length + NUM_STEPS for length in LENGTHS]))


class Run(NamedTuple):
  """Teacher-forced logits.

  Attributes:
    logits: f32[n + 1, B, V], of the last prompt token and of n more.
    attended: for each selecting layer bool[n, B, H, T], positions that each step attended to.
    cache: after the last step.
  """

  logits: np.ndarray
  attended: dict[int, np.ndarray]
  cache: KVCache


def teacher_forced(
  runner: Runner, params, rows: Sequence[Sequence[int]], lengths: Sequence[int], between=None
) -> Run:
  """Prefills lengths tokens of each row and feeds the rest one by one.

  between, if given, is applied to the cache before each step.
  """
  prompts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
  last, state = prefill(runner, params, prompts)
  logits, attended = [runner.model.unembed(params, last)], []
  for step in range(min(len(row) - n for row, n in zip(rows, lengths, strict=True))):
    tokens = np.array([row[n + step] for row, n in zip(rows, lengths, strict=True)], np.int32)
    state = between(state) if between else state
    out, seen, state = spied_step(runner, params, state, tokens)
    logits.append(out)
    attended.append(seen)
  total = max(map(len, rows))
  layers = {
    layer: np.stack([_positions(runner, seen[layer], total) for seen in attended])
    for layer in runner.plan.select_layers
  }
  return Run(np.stack(logits), layers, state)


def greedy(runner: Runner, params, prompts: Sequence[Sequence[int]], num_steps: int) -> np.ndarray:
  """i32[n + 1, B]: what `generate` says, by the step that `teacher_forced` has compiled."""
  last, state = prefill(runner, params, prompts)
  tokens = [np.asarray(runner.model.unembed(params, last)).argmax(axis=-1).astype(np.int32)]
  for _ in range(num_steps):
    logits, _, state = spied_step(runner, params, state, tokens[-1])
    tokens.append(np.asarray(logits).argmax(axis=-1).astype(np.int32))
  return np.stack(tokens)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def spied_step(runner: Runner, params, state: KVCache, tokens):
  """A decode step that also says what each selecting layer was given to attend to."""
  seen = {}
  recall = runner.policy.recall or runner.store.recall

  def spy(state, row, ticket, lengths):
    recalled, state = recall(state, row, ticket, lengths)
    seen[runner.plan.select_layers[row]] = (recalled.positions, recalled.mask)
    return recalled, state

  spied = runner._replace(policy=runner.policy._replace(recall=spy))
  logits, state = steps.decode_step.__wrapped__(spied, params, state, tokens)
  return logits, seen, state


def _positions(runner: Runner, recalled, total: int) -> np.ndarray:
  """bool[B, H, T] of positions and mask [B, K or H, M, C]; a slot that came twice is a bug."""
  positions, mask = (np.asarray(x) for x in recalled)
  mask = np.broadcast_to(mask, positions.shape)
  b, heads = positions.shape[:2]
  counts = np.zeros((b, heads, total), int)
  for row, head in np.ndindex(b, heads):
    np.add.at(counts[row, head], positions[row, head][mask[row, head]], 1)
  assert counts.max() <= 1, "a token was attended to twice"
  return np.repeat(counts > 0, runner.model.config.num_heads // heads, axis=1)


def paged_keys(state: KVCache, row: int) -> jax.Array:
  """f[B, K, P, C, D], what the pages of a selecting layer hold."""
  pools = state.pools or jax.device_put(state.host, jax.memory.Space.Device)
  return pools.keys[state.table[row]]


def filled(tree, value):
  """The same arrays with value in place of every number."""
  return jax.tree.map(lambda x: jnp.full_like(x, value) if x.dtype == jnp.float32 else x, tree)


def filled_cache(cache: KVCache, value) -> KVCache:
  """The cache with value everywhere, host pools included, which stay where they are."""

  def full(x):  # by numpy, which compiles nothing; where x is bound to a device, bound to it too
    if x.dtype != jnp.float32:
      return x
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
      return _filled_on_host(x, np.float32(value))
    return jax.device_put(np.full(x.shape, value, x.dtype), x.sharding if x.committed else None)

  return jax.tree.map(full, cache)


@jax.jit
def _filled_on_host(pool, value):
  return jax.lax.broadcast(jax.device_put(value, jax.memory.Space.Host), pool.shape)


def padded(rows: Sequence[Sequence[int]]) -> jnp.ndarray:
  """i32[B, longest], zeros after the end of a row."""
  out = np.zeros((len(rows), max(map(len, rows))), np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return jnp.asarray(out)


def aligned(logits: jax.Array, lengths: Sequence[int], num_steps: int) -> np.ndarray:
  """f32[n + 1, B, V] of logits f32[B, S, V]: from the last prompt token on."""
  whole = np.asarray(logits)
  return np.stack([whole[b, n - 1 : n + num_steps] for b, n in enumerate(lengths)], axis=1)
