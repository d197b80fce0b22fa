"""What a store moves for selections that were recorded.

The store runs as it is, in a model of one layer that computes nothing and a policy that selects
what it is told. So a store or an option of one costs seconds, and all of them are asked for the
same. In a run of its own a store that shows more than what was selected (OPKV without `strict`)
changes what the model computes, and with it slightly what is selected later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from eval.results import Row, recall_fields
from kvjax import CacheConfig, KVCache, ModelConfig, Runner, decode_step, prepare
from kvjax.engine.steps import empty_cache, sealed
from kvjax.stores.traffic import Traffic, totals
from kvjax.types import SELECT, LayerPlan, Model, Selection
from scripts.reproduce_opkv.following import Followed

Counts = Mapping[str, np.ndarray]


def drive(followed: Followed, store: str, page_size: int) -> Counts:
  """i64[S, R] of each field of `Traffic`: what each step and layer counted.

  Args:
    followed: what was selected.
    store: spec of a store with a host tier.
    page_size: C of its pages, not necessarily that with which the policy ran.

  Raises:
    ValueError: the policy cannot run on the store, the store has no host tier, its options are not
      legal, or its pool is too small for what was selected.
  """
  counts = np.zeros((len(Traffic._fields), *followed.selected.shape[:2]), np.int64)
  for row, step, cache in driven(followed, store, page_size):
    counted = totals(cache) or {}
    counts[:, step, row] = [counted[name] for name in Traffic._fields]
  counts = np.diff(counts, axis=1, prepend=0)
  return dict(zip(Traffic._fields, counts, strict=True))


def driven(followed: Followed, store: str, page_size: int) -> Iterator[tuple[int, int, KVCache]]:
  """Layer, step, and the cache after it, of which the next step makes its own; else as `drive`."""
  width = int(followed.selected.sum(axis=-1).max())
  runner = _runner(followed, store, page_size, width)
  if not runner.store.on_host:
    raise ValueError(f"store {store!r} has no host tier; take whole_page, prefetch_all or op_block")
  steps, rows = followed.selected.shape[:2]
  for row in tqdm(range(rows), desc=store, leave=False):
    cache = empty_cache(runner)
    where = cache.lengths.sharding
    start = jax.device_put(np.array([followed.prompt_tokens], np.int32), where)
    cache = sealed(runner, cache.replace(lengths=start))
    token = jax.device_put(np.zeros(1, np.int32), where)
    for step in range(steps):
      selection = _selection(followed.selected[step, row], page_size, width, where)
      cache = cache.replace(policy_state=selection)
      _, cache = decode_step(runner, (), cache, token)
      yield row, step, cache
    if np.asarray(cache.overflow).any():
      raise ValueError(
        f"store {store!r} cannot hold what {followed.policy.name} selects in layer "
        f"{followed.layers[row]}; raise its option slack"
      )


def moves(counts: Counts, followed: Followed) -> Row:
  """Fields of a row: all steps but the first, at which nothing can be there yet.

  `moved_per_selected` are tokens brought from the host for each selected one, and
  `moved_per_selected_cold` the same with the first step; `blocks_per_step` the pages or OP blocks
  that a list of a layer reads in a step.
  """
  config = followed.runner.model.config
  later = {name: int(count[1:].sum()) for name, count in counts.items()}
  token_bytes = 2 * config.head_dim * np.dtype(followed.runner.decode_config.dtype).itemsize
  steps, rows = counts["moved"][1:].shape
  return recall_fields(later | {"moved_bytes": later["moved"] * token_bytes}, steps) | {
    "moved_per_selected": later["moved"] / max(1, later["selected"]),
    "moved_per_selected_cold": float(counts["moved"].sum() / max(1, counts["selected"].sum())),
    "blocks_per_step": later["pages_used"] / (steps * rows * config.num_kv_heads),
  }


def _runner(followed: Followed, store: str, page_size: int, width: int) -> Runner:
  _, _, heads, tokens = followed.selected.shape
  config = ModelConfig("none", 1, heads, heads, 2, 2, 1, 1, tokens)
  policy = followed.policy._replace(
    register=lambda model, cache: (LayerPlan((SELECT,)), _nothing(heads, width)),
    preprocess=lambda state, inputs: state,
    select=lambda state, inputs: (state, state),
    ahead=None,
    settle=None,
    page_size=None,
  )
  return prepare(_model(config), policy, store, CacheConfig(1, tokens, page_size))


def _nothing(heads: int, width: int) -> Selection:
  none = jnp.zeros((1, heads, width), jnp.int32)
  return Selection(none, jnp.zeros((*none.shape, 1), bool), none)


def _selection(
  selected: np.ndarray, page_size: int, width: int, where: jax.sharding.Sharding
) -> Selection:
  """Of tokens bool[K, T], as arrays that lie where a step leaves its own."""
  positions = np.full((1, len(selected), width), -1, np.int32)
  for head, wanted in enumerate(selected):
    at = np.flatnonzero(wanted)
    positions[0, head, : len(at)] = at
  chosen = positions >= 0
  positions = np.maximum(positions, 0)
  arrays = positions // page_size, chosen[..., None], positions % page_size
  return Selection(*(jax.device_put(x, where) for x in arrays))


def _model(config: ModelConfig) -> Model:
  """One layer of zeros."""

  def forward(params, tokens, positions, cache, attend):
    del params, positions
    hidden = jnp.zeros((*tokens.shape, config.embed_dim))
    q = jnp.zeros((*tokens.shape, config.num_heads, config.head_dim))
    _, cache = attend(0, q, q, q, cache, hidden)
    return hidden, cache

  def nothing(*args):
    raise AssertionError(f"a recorded selection needs nothing of the model, but got {args}")

  return Model(
    config,
    init=nothing,
    forward=forward,
    query=nothing,
    keys_values=nothing,
    unembed=lambda params, x: jnp.zeros((x.shape[0], config.vocab_size)),
    rotate=lambda x, positions: x,
    part=nothing,
  )
