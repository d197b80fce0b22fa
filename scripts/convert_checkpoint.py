"""Converts a model to a checkpoint that loads fast: Orbax, with config, tokenizer and digests.

    python -m scripts.convert_checkpoint --model=smollm2-135m --out_dir=smollm2
    python -m scripts.convert_checkpoint --model=FOLDER --dtype=bfloat16 --out_dir=NEW_FOLDER

Reads a .gguf file or a folder of Hugging Face safetensors one tensor at a time, so that a model
larger than memory can be converted. Every --model flag takes the folder that this makes.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli
from eval.tables import human_bytes
from kvjax.types import Params
from models import checkpoint, families, memory, saved
from models.loading import DTYPES, RANDOM_PREFIX, Opened, files_hash, open_files


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.DEFINE_string("out_dir", None, "New folder for the checkpoint.", required=True)
  flags.DEFINE_enum("dtype", "float32", DTYPES, "Of every parameter.")


def main(args: flags.FlagValues) -> None:
  """Plan, progress, what was written."""
  folder = Path(args.out_dir).expanduser()
  saved.check_new(folder)
  opened = _open(args.model)
  config = opened.checkpoint.config
  shapes = families.param_shapes(config, args.dtype)
  print(_plan(opened, args.dtype, shapes, folder), flush=True)
  with tqdm(total=memory.params_bytes(shapes), unit="B", unit_scale=True, leave=False) as bar:

    def read(path: str) -> np.ndarray:
      tensor = checkpoint.read_param(opened.checkpoint, path, args.dtype)
      bar.set_description(path, refresh=False)
      bar.update(tensor.nbytes)
      return tensor

    written = saved.write(
      folder,
      read,
      name=opened.name,
      config=config,
      dtype=args.dtype,
      tokenizer=opened.tokenizer,
      source_hash=files_hash(opened.weight_files),
    )
  size = sum(length for length, _ in written.files.values())
  print(f"wrote   {len(written.files)} files, {human_bytes(size)}, sha256 {written.content_hash}")


def _open(source: str) -> Opened:
  if source.startswith(RANDOM_PREFIX):
    raise ValueError(f"{source} has no files to convert; give a .gguf file or a model folder")
  if saved.is_saved(Path(source).expanduser()):
    raise ValueError(f"{source} is a checkpoint of kvjax already; give --model what it came from")
  opened = open_files(source)
  checkpoint.check(opened.checkpoint)
  return opened


def _plan(opened: Opened, dtype: str, shapes: Params, folder: Path) -> str:
  config, words = opened.checkpoint.config, opened.tokenizer
  tensors = jax.tree.leaves(shapes)
  count = sum(leaf.size for leaf in tensors)
  return (
    f"model   {opened.name}, {config.family} of {config.num_layers} layers, {count:,} parameters "
    f"in {len(tensors)} tensors\n"
    f"text    {f'tokenizer of {words.vocab_size:,} ids' if words else 'no tokenizer'}\n"
    f"from    {', '.join(file.name for file in opened.weight_files)}\n"
    f"to      {folder}, {human_bytes(memory.params_bytes(shapes))} in {dtype}"
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
