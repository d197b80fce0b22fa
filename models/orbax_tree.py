"""Parameter trees on disk, through Orbax: written tensor by tensor, read straight onto shardings.

Each tensor becomes a folder of plain, uncompressed chunks (Zarr). Orbax's default, OCDBT with zstd,
made 540 MB of random f32 weights 7 % smaller and took twice as long to read, and it gives its files
random names, so that two conversions of one model would not be the same bytes.

Import this module where it is used: Orbax takes 0.2 s to import, which most commands need not pay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath  # Orbax's type of path
from orbax import checkpoint as ocp
from orbax.checkpoint import type_handlers

from kvjax.types import Params
from models.families import by_path, path_of

# A device that holds a slice of a tensor reads the chunks that the slice touches.
_CHUNK_BYTES = 32 << 20


def write(folder: Path, shapes: Params, read: Callable[[str], np.ndarray]) -> None:
  """Writes a parameter tree; about one tensor of it is in memory at a time.

  Args:
    folder: is made, and must not exist.
    shapes: tree of `jax.ShapeDtypeStruct`.
    read: `read(path)` gives one tensor; path is its place in the tree, such as "layers/3/q".
  """
  leaves = jax.tree_util.tree_map_with_path(
    lambda keys, leaf: _Unread(leaf.shape, leaf.dtype, path_of(keys), read), shapes
  )
  chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), shapes)
  handler = ocp.PyTreeCheckpointHandler(
    use_ocdbt=False,
    use_compression=False,
    type_handler_registry=type_handlers.create_type_handler_registry(
      (_Unread, _OneByOne(deepcopy_host_arrays=False)), (jax.Array, type_handlers.ArrayHandler())
    ),
  )
  folder.mkdir()
  handler.save(_orbax(folder), args=ocp.args.PyTreeSave(leaves, save_args=chunks))


def stored_shapes(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype of every tensor that the folder holds, by its place in the tree."""
  tree = ocp.PyTreeCheckpointHandler().metadata(_orbax(folder)).tree
  return {
    path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in by_path(tree).items()
  }


def read(folder: Path, shapes: Params, shardings: Any) -> Params:
  """Reads a parameter tree.

  Args:
    folder: what `write` made.
    shapes: tree of `jax.ShapeDtypeStruct` with the shapes that were written; dtypes may differ.
    shardings: tree of `jax.sharding.Sharding` of the same structure. A device reads its own slice.
  """
  places = jax.tree.map(
    lambda leaf, sharding: type_handlers.ArrayRestoreArgs(
      sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
    ),
    shapes,
    shardings,
  )
  return ocp.PyTreeCheckpointHandler().restore(
    _orbax(folder), args=ocp.args.PyTreeRestore(item=shapes, restore_args=places)
  )


def _orbax(folder: Path) -> epath.Path:
  return epath.Path(folder.resolve())


@dataclasses.dataclass(frozen=True)
class _Unread:
  """A leaf that is read when its turn to be written has come."""

  shape: tuple[int, ...]
  dtype: np.dtype
  path: str
  read: Callable[[str], np.ndarray]


class _OneByOne(type_handlers.NumpyHandler):
  """Reads a tensor, writes it and lets go of it before it reads the next."""

  async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list:
    for one in zip(values, infos, args, strict=True):
      await self._write(*one)
    return []

  async def _write(self, value: _Unread, info: Any, arg: Any) -> None:
    for written in await super().serialize([value.read(value.path)], [info], [arg]):
      written.result()
