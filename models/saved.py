"""Checkpoints of our own: a folder that holds everything of a model, in a form that loads fast.

    FOLDER/
      kvjax.json      what is in the folder, and its digests; written last
      tokenizer.json  vocabulary and merges; absent for a model without a tokenizer
      params/         the parameter tree in the dtype that was asked for, an Orbax checkpoint

kvjax.json:

    {"version": 1, "name": ..., "source_hash": ..., "content_hash": ...,
     "content": {"config": ..., "dtype": ..., "tokenizer": ..., "files": {path: [bytes, sha256]}}}

`content_hash` is the sha256 of "content", and so of every byte that the model is made of: it is the
same wherever and whenever the same source is converted to the same dtype. `source_hash` is that of
the files it was made from. Both travel along because they say different things: rounded to bf16,
the same source gives other numbers, and results should name the numbers that ran.

Every file is held against its length and its digest before the parameters are used, each time they
are restored. Orbax would not notice: a chunk that is missing reads as zeros, a flipped bit as
another number. Each core hashes 1.5 GB/s: 0.2 s for the 538 MB of SmolLM2 on two of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers

from kvjax.config import ModelConfig, RopeScaling
from kvjax.types import Params
from models import families
from models.memory import params_bytes
from models.safetensors_reader import read_json
from models.tokenizer import Tokenizer

FORMAT_VERSION = 1
_MANIFEST, _TOKENIZER, _PARAMS = "kvjax.json", "tokenizer.json", "params"
_AGAIN = "convert the model again with scripts.convert_checkpoint"


class Saved(NamedTuple):
  """What a folder says of itself.

  Attributes:
    path: the folder.
    name: of the model that was converted, for tables.
    config: its static shape.
    dtype: numpy name of the dtype of every parameter.
    tokenizer: None if the model has none.
    content_hash: sha256 of everything that the model is made of.
    source_hash: content hash of the files that it was converted from.
    files: path inside the folder -> length in bytes, sha256.
  """

  path: Path
  name: str
  config: ModelConfig
  dtype: str
  tokenizer: Tokenizer | None
  content_hash: str
  source_hash: str
  files: Mapping[str, tuple[int, str]]


def is_saved(folder: Path) -> bool:
  """The folder was written by `write`, and to its end."""
  return (folder / _MANIFEST).is_file()


def write(
  folder: Path,
  read: Callable[[str], np.ndarray],
  *,
  name: str,
  config: ModelConfig,
  dtype: str,
  tokenizer: Tokenizer | None,
  source_hash: str,
) -> Saved:
  """Writes a checkpoint; about one tensor of it is in memory at a time.

  Everything goes into a hidden folder beside it first, which gets its name at the end, so that what
  an error or an interrupt leaves is nothing.

  Args:
    folder: is made, and must not exist.
    read: `read(path)` gives one parameter in dtype; path is its place in the tree, "layers/3/q".
    name: see `Saved`, as the others.
    config: the static shape.
    dtype: numpy name of the dtype.
    tokenizer: None if there is none.
    source_hash: content hash of what is converted.

  Raises:
    ValueError: the folder exists already, or its disk has not enough space.
  """
  from models import orbax_tree

  check_new(folder)
  shapes = families.param_shapes(config, dtype)
  with _all_or_nothing(folder) as partial:
    _check_space(partial, params_bytes(shapes))
    orbax_tree.write(partial / _PARAMS, shapes, read)
    settings = None
    if tokenizer is not None:
      tokenizer.backend.save(str(partial / _TOKENIZER))
      settings = _tokenizer_settings(tokenizer)
    content = {"config": _fields(config), "dtype": dtype, "tokenizer": settings}
    content["files"] = {
      path.relative_to(partial).as_posix(): [path.stat().st_size, _digest(path)]
      for path in sorted(partial.rglob("*"))
      if path.is_file()
    }
    manifest = {"version": FORMAT_VERSION, "name": name, "source_hash": source_hash}
    manifest |= {"content_hash": _content_hash(content), "content": content}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
  return describe(folder)


def check_new(folder: Path) -> None:
  """Raises ValueError if there is something at this path."""
  if os.path.lexists(folder):
    raise ValueError(f"{folder} exists already, expected the path of a new folder")


def describe(folder: Path) -> Saved:
  """What a checkpoint says of itself; its parameters are not looked at.

  Raises:
    ValueError: another format version, or kvjax.json or tokenizer.json is not as it was written.
  """
  manifest = _read_manifest(folder)
  content = manifest["content"]
  try:
    saved = Saved(
      path=folder,
      name=manifest["name"],
      config=_config(content["config"]),
      dtype=content["dtype"],
      tokenizer=None,
      content_hash=manifest["content_hash"],
      source_hash=manifest["source_hash"],
      files={path: (size, digest) for path, (size, digest) in content["files"].items()},
    )
    settings = content["tokenizer"]
    if settings is not None:
      _verify(saved, [_TOKENIZER])
      saved = saved._replace(tokenizer=_read_tokenizer(folder / _TOKENIZER, settings))
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{folder / _MANIFEST} lacks or has a field that this version of kvjax does not ({error}); "
      f"{_AGAIN}"
    ) from error
  return saved


def restore(saved: Saved, shardings: Any = None, dtype: str | None = None) -> Params:
  """The parameters of a checkpoint, each put straight where it belongs.

  Args:
    saved: from `describe`.
    shardings: tree of `jax.sharding.Sharding`, one for each parameter; each device reads its own
      slice only. By default all of them go to the first device.
    dtype: numpy name of the dtype to convert to; by default that of the checkpoint.

  Raises:
    ValueError: files are missing, truncated or changed, or do not hold the model that the config
      declares.
  """
  from models import orbax_tree

  _verify(saved, saved.files)
  folder = saved.path / _PARAMS
  shapes = families.param_shapes(saved.config, saved.dtype)
  _check_shapes(saved, families.by_path(shapes), orbax_tree.stored_shapes(folder))
  if dtype is not None:
    shapes = families.param_shapes(saved.config, dtype)
  if shardings is None:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: device, shapes)
  return orbax_tree.read(folder, shapes, shardings)


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Generator[Path]:
  """A new folder that gets its name when the block ends well, and otherwise goes."""
  partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
  partial.mkdir(parents=True)
  try:
    yield partial
    partial.rename(folder)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def _check_space(folder: Path, needed: int) -> None:
  free = shutil.disk_usage(folder).free
  if needed > free:
    raise ValueError(
      f"{folder.parent} has {free / 1e9:.1f} GB of free space, the checkpoint takes "
      f"{needed / 1e9:.1f} GB; free some or write it elsewhere"
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
  path = folder / _MANIFEST
  manifest = read_json(path)
  version = manifest.get("version")
  if version != FORMAT_VERSION:
    raise ValueError(
      f"{folder} is a checkpoint of format version {version!r}, expected {FORMAT_VERSION}; {_AGAIN}"
    )
  if manifest.get("content_hash") != _content_hash(manifest.get("content")):
    raise ValueError(
      f"{path} was changed since it was written: its content has another hash; {_AGAIN}"
    )
  return manifest


def _content_hash(content: Any) -> str:
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(saved: Saved, names: Collection[str]) -> None:
  """Lengths first, which costs nothing; then digests, on all cores."""
  paths = {name: saved.path / name for name in names}
  bad = [
    name
    for name, path in paths.items()
    if not path.is_file() or path.stat().st_size != saved.files[name][0]
  ]
  if not bad:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      digests = dict(zip(names, pool.map(_digest, paths.values()), strict=True))
    bad = [name for name, digest in digests.items() if digest != saved.files[name][1]]
  if bad:
    raise ValueError(
      f"{saved.path}: {len(bad)} of {len(saved.files)} files are missing, truncated or changed "
      f"since they were written: {_listed(bad)}; {_AGAIN}"
    )


def _check_shapes(
  saved: Saved,
  expected: Mapping[str, jax.ShapeDtypeStruct],
  found: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
  """Holds the arrays against the config; Orbax would cast another dtype without a word."""
  both = [*dict.fromkeys([*expected, *found])]
  bad = [path for path in both if _kind(expected, path) != _kind(found, path)]
  if bad:
    raise ValueError(
      f"{saved.path} does not hold the {saved.config.family} model that its config declares: "
      f"{len(bad)} of {len(both)} tensors are missing, unexpected or of another shape or dtype: "
      f"{_listed(bad)}; {_AGAIN}"
    )


def _kind(tensors: Mapping[str, jax.ShapeDtypeStruct], path: str) -> tuple | None:
  return (tensors[path].shape, tensors[path].dtype) if path in tensors else None


def _listed(names: Sequence[str], most: int = 5) -> str:
  return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _fields(config: ModelConfig) -> dict[str, Any]:
  """Every field but the hash of the weights that a config came with: the checkpoint has its own."""
  fields = dataclasses.asdict(config)
  del fields["content_hash"]
  return fields


def _config(fields: dict[str, Any]) -> ModelConfig:
  return ModelConfig(**fields | {"rope_scaling": RopeScaling(**fields["rope_scaling"])})


def _tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
  """Every field but the backend, which has a file of its own."""
  names = [field.name for field in dataclasses.fields(tokenizer) if field.name != "backend"]
  return {name: getattr(tokenizer, name) for name in names}


def _read_tokenizer(path: Path, settings: dict[str, Any]) -> Tokenizer:
  backend = tokenizers.Tokenizer.from_file(str(path))
  return Tokenizer(backend, **settings | {"eos_ids": tuple(settings["eos_ids"])})
