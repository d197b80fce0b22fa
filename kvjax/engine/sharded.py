"""More than one device: heads and weights over one axis of a mesh, rows of the batch over another.

Inside `jax.shard_map` each device runs the code of a single device on a smaller model and a smaller
cache. It has page pools and tables of its own, with ids that mean nothing elsewhere, so no policy
and no store knows of the others. Only the model does: its sums and its vocabulary meet over the
axis (`kvjax.types.Axes`), which is all that is ever sent.

How arrays are split is found and not written down: where dividing a shape makes an axis of an array
shorter, that axis is split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.cache import KVCache
from kvjax.config import CacheConfig
from kvjax.types import Axes, Model, Params, Policy, Store

DATA, MODEL = "data", "model"
ROWS = P(DATA)  # [B, ...]
HEADS = P(DATA, MODEL)  # [B, K or H, ...]
SAME = P()  # the same everywhere

Specs = Any  # a pytree of PartitionSpec


def make_mesh(*, data: int = 1, model: int = 1) -> Mesh:
  """The first data * model devices, of all processes.

  Args:
    data: parts that the rows of a batch are split into.
    model: parts that heads, feed-forward and vocabulary are split into.

  Raises:
    ValueError: there are not so many devices.
  """
  devices = jax.device_count()
  if data < 1 or model < 1:
    raise ValueError(f"a mesh of data={data} and model={model} is empty; both must be at least 1")
  if data * model > devices:
    raise ValueError(
      f"a mesh of data={data} and model={model} needs {data * model} devices, and JAX has "
      f"{devices}; ask for fewer"
    )
  return jax.make_mesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def check_mesh(mesh: Mesh) -> None:
  """Raises ValueError for a mesh of other axes."""
  if mesh.axis_names != (DATA, MODEL):
    raise ValueError(
      f"the mesh has axes {mesh.axis_names}, expected {(DATA, MODEL)}; make it with make_mesh"
    )


def check_heads(mesh: Mesh, policy: Policy, store: Store) -> None:
  """Raises ValueError for a mesh that splits heads which must stay together."""
  reasons = {
    f"policy {policy.name!r} joins the heads of a layer": policy.joins_heads,
    f"store {store.name!r} places each head of a layer by itself": store.tiers_heads,
  }
  for reason, together in reasons.items():
    if together and mesh.shape[MODEL] > 1:
      raise ValueError(
        f"{reason}, which a mesh with model={mesh.shape[MODEL]} splits; make a mesh that splits "
        "rows only: make_mesh(data=N)"
      )


def part_of_model(model: Model, parts: int) -> Model:
  """What one device of the model axis computes.

  Raises:
    ValueError: KV heads or feed-forward cannot be split so.
  """
  if parts == 1:
    return model
  config = model.config
  for name in ("num_kv_heads", "ffn_dim"):
    _check_divides(name, getattr(config, name), MODEL, parts)
  splits_vocab = config.vocab_size % parts == 0
  part = dataclasses.replace(
    config,
    num_heads=config.num_heads // parts,
    num_kv_heads=config.num_kv_heads // parts,
    ffn_dim=config.ffn_dim // parts,
    vocab_size=config.vocab_size // parts if splits_vocab else config.vocab_size,
  )
  return model.part(part, Axes(inner=MODEL, vocab=MODEL if splits_vocab else None))


def part_of_cache(config: CacheConfig, parts: int) -> CacheConfig:
  """The rows that one device of the data axis has.

  Raises:
    ValueError: the rows cannot be split so.
  """
  _check_divides("batch_size", config.batch_size, DATA, parts)
  return dataclasses.replace(config, batch_size=config.batch_size // parts)


def param_shardings(model: Model, mesh: Mesh) -> Params:
  """A `NamedSharding` for every weight of a model, in the tree of its parameters.

  `jax.device_put(params, param_shardings(model, mesh))` puts weights where a runner on this mesh
  wants them; with several processes each must hold all of them.

  Raises:
    ValueError: the model cannot be split over this mesh.
  """
  return jax.tree.map(partial(NamedSharding, mesh), param_specs(model, mesh))


def param_specs(model: Model, mesh: Mesh) -> Specs:
  """A `PartitionSpec` for every weight of a model."""
  check_mesh(mesh)
  whole, part = (
    jax.eval_shape(lambda one=one: one.init(jax.random.key(0)))
    for one in (model, part_of_model(model, mesh.shape[MODEL]))
  )
  return split_specs(whole, {MODEL: part})


def split_specs(whole: Any, parts: Mapping[str, Any]) -> Specs:
  """How arrays are split, by which of their axes became shorter.

  Args:
    whole: a pytree of abstract arrays.
    parts: mesh axis -> the same arrays where it alone divides the shape.
  """

  def spec(array, *split):
    axes = [
      tuple(axis for axis, part in zip(parts, split, strict=True) if part.shape[i] < size)
      for i, size in enumerate(array.shape)
    ]
    return P(*(names or None for names in axes))

  return jax.tree.map(spec, whole, *parts.values())


def agreed(out: Any) -> Any:
  """What a step gives, where devices that share rows agree on their overflow bits.

  Each plans for the heads that it has, and the pool of one alone may be too small. That a row is
  longer than the cache all of them see, so that the greatest number has all the bits.
  """

  def agree(node):
    if not isinstance(node, KVCache):
      return node
    return node.replace(overflow=lax.pmax(node.overflow, MODEL))

  return jax.tree.map(agree, out, is_leaf=lambda node: isinstance(node, KVCache))


def rows(mesh: Mesh | None) -> NamedSharding | None:
  """Where arrays [B, ...] lie; None, JAX's own choice, without a mesh."""
  return None if mesh is None else NamedSharding(mesh, ROWS)


def to_host(x: jax.Array) -> np.ndarray:
  """The whole of an array, of which other processes may hold a part; then all must ask for it."""
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def _check_divides(name: str, size: int, axis: str, parts: int) -> None:
  if size % parts:
    raise ValueError(
      f"{name} {size} cannot be split over the {parts} devices of the mesh's {axis!r} axis; "
      f"make a mesh whose {axis} divides it"
    )
