"""What the tests of checkpoints need a process of its own for: python -m THIS NAME FOLDER."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from models import families, saved
from models.memory import params_bytes
from tests.models.test_saved import LLAMA, save, write

SPECS = {"embed": ("model", None), "head": ("model", None), "o": ("model", None)}
SPECS |= {"down": ("model", "data"), "q": (None, "model"), "up": (None, ("data", "model"))}


def sharded(folder: Path) -> None:
  """Restores onto 8 devices and looks at what each of them holds."""
  written, tensors = write(folder)
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
  shapes = models.param_shapes(LLAMA, "float32")

  def place(keys, _):
    spec = SPECS.get(families.path_of(keys).split("/")[-1], ())
    return NamedSharding(mesh, PartitionSpec(*spec))

  shardings = jax.tree_util.tree_map_with_path(place, shapes)
  params = families.by_path(saved.restore(written, shardings))
  for path, sharding in families.by_path(shardings).items():
    array, tensor = params[path], tensors[path]
    assert array.sharding == sharding, path
    assert len(array.addressable_shards) == 8
    for shard in array.addressable_shards:
      assert shard.data.shape == sharding.shard_shape(tensor.shape)
      np.testing.assert_array_equal(np.asarray(shard.data), tensor[shard.index], err_msg=path)
  split = [path for path in params if path.split("/")[-1] in SPECS]
  assert len(split) == 2 + 4 * LLAMA.num_layers
  held = sum(params[path].addressable_shards[0].data.nbytes for path in split)
  print(f"{held} of {sum(tensors[path].nbytes for path in split)} bytes of what is split")


def peak(folder: Path) -> None:
  """Writes 100 MB in tensors of up to 1 MB and prints by how much memory grew, at most."""
  config = dataclasses.replace(LLAMA, num_layers=26, embed_dim=256, head_dim=64, ffn_dim=1024)
  shapes = families.by_path(models.param_shapes(config))
  seen = []

  def read(path: str) -> np.ndarray:
    if not seen:
      watcher.start()
    seen.append(_memory())
    return np.full(shapes[path].shape, len(seen), np.float32)

  def watch() -> None:
    while not done.wait(0.001):
      seen.append(_memory())

  done, watcher = threading.Event(), threading.Thread(target=watch)
  save(folder, config, read)
  done.set()
  watcher.join()
  print(max(seen) - seen[0], params_bytes(shapes))


def slow(folder: Path) -> None:
  """Writes so slowly that it can be interrupted."""
  tensors = families.by_path(models.param_shapes(LLAMA))

  def read(path: str) -> np.ndarray:
    print(path, flush=True)
    time.sleep(0.2)
    return np.zeros(tensors[path].shape, np.float32)

  save(folder, LLAMA, read)


def _memory() -> int:
  """Bytes of this process that are its own, without mapped files."""
  status = Path("/proc/self/status").read_text(encoding="ascii")
  [line] = [line for line in status.splitlines() if line.startswith("RssAnon:")]
  return int(line.split()[1]) * 1024


if __name__ == "__main__":
  {"sharded": sharded, "peak": peak, "slow": slow}[sys.argv[1]](Path(sys.argv[2]))
