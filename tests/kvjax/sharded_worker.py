"""What `test_sharded` looks at, from processes of their own in which a CPU counts as many devices.

    python -m tests.kvjax.sharded_worker NAMES [PORT PROCESS]

NAMES are keys of `CASES`, separated by commas. With PORT and PROCESS it is one of two processes
that share the devices of both. Prints one JSON object, case -> `run` of it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import CacheConfig, Sampling, generate, make_mesh, make_policy, param_shardings, prepare
from kvjax.engine import steps
from kvjax.engine.sharded import to_host
from kvjax.types import Model
from models import build
from tests.kvjax import matrix

SHAPE = matrix.Shape(kv_heads=4, group=2, head_dim=16)
WARM = Sampling(temperature=0.8, top_p=0.9)
NEW_TOKENS = 20  # over a page boundary of every long row
SHORT = ([1] * 32, [2] * 5, [3], [4] * 17)
LONG = tuple(row[:length] for row, length in zip(matrix.ROWS, matrix.LENGTHS, strict=True))
COLLECTIVE = re.compile(r" = (\S+?)(?:\{\S*)? (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(")


class Case(NamedTuple):
  """What must give the same on a mesh as on one device.

  Attributes:
    mesh: sizes of the axes data and model.
    entry: policy, setting and store.
    model: makes the model and its weights.
    sampling: how tokens are chosen.
    compiled: look at the compiled step and at selected pages too, which takes long.
  """

  mesh: tuple[int, int]
  entry: matrix.Entry
  model: Callable[[], tuple[Model, Any]]
  sampling: Sampling = Sampling()
  compiled: bool = False


def llama():
  return matrix.tiny_model(SHAPE, 2)


def deeper():
  """Two layers that share the selection of a third."""
  return matrix.tiny_model(SHAPE, 3)


def other(family: str, **changes):
  """A model of another family with llama's heads, and biases that are not zero."""
  model = build(dataclasses.replace(llama()[0].config, family=family, **changes))

  def stir(path, leaf):
    noise = jax.random.normal(jax.random.key(len(str(path))), leaf.shape) / 10
    return leaf + noise if leaf.ndim == 1 else leaf

  params = model.init(jax.random.key(7), "float32")
  return model, jax.tree_util.tree_map_with_path(stir, params)


opt = partial(other, "opt", num_heads=SHAPE.kv_heads)
DENSE = matrix.Entry("dense", "harsh", "resident")
QUEST = matrix.Entry("quest", "harsh", "resident")
STREAMING = matrix.Entry("streaming", "harsh", "resident")
COMPACT = matrix.Entry("streaming", "harsh", "compact")
FIRST = (DENSE, QUEST, STREAMING, COMPACT)
# Those that keep what no other of these keeps, or work over what no other does. The rest: ArkVale
# keeps what Quest keeps, LServe what FlexiCache keeps; PyramidKV and duo without full heads are
# SnapKV's and streaming's code; InfiniGen and TOVA join heads as OmniKV does, and so have their
# rows split alone, which a row that is alone equals (test_laws.py).
SHARDED = ("dense", "quest", "streaming", "omnikv", "clusterkv", "flexicache")
SHARDED += ("snapkv", "h2o", "morphkv")


def _splits_heads(entry: matrix.Entry) -> bool:
  return not make_policy(entry.policy, **matrix.SETTINGS[entry.policy]["harsh"]).joins_heads


ALONE = {
  f"llama-{entry}": Case(
    (2, 4) if _splits_heads(entry) else (4, 1),
    entry,
    deeper if entry.policy == "omnikv" else llama,
    compiled=entry in FIRST,
  )
  for entry in matrix.entries()
  if entry.setting == "harsh" and entry.policy in SHARDED and entry.store not in matrix.HOST
}
ALONE |= {f"opt-{entry}": Case((2, 4), entry, opt, WARM) for entry in (QUEST, COMPACT)}
ALONE |= {
  "odd-vocabulary": Case((2, 4), DENSE, partial(opt, vocab_size=161), WARM, compiled=True),
  "norms-last": Case((2, 4), STREAMING, partial(opt, norm_last=True, token_dim=24), WARM),
  "tied": Case((2, 4), QUEST, partial(other, "qwen2", tied_embeddings=True), WARM),
  "window": Case((2, 4), QUEST, partial(other, "mistral", window_tokens=50), WARM),
  "heads-only": Case((1, 4), QUEST, llama, WARM),
  "rows-only": Case((4, 1), QUEST, llama, compiled=True),
  "more-rows": Case((4, 2), COMPACT, llama),
}
# Stores with a host tier: lists of the heads and rows of a device, in a pool of its own.
ON_HOST = {
  "op_block:strict=True:slack=1.5": ("flexicache", (2, 2), llama),
  "op_block:strict=True:slack=1.0:rho=0.3:host_blocks=0.5": ("omnikv", (4, 1), deeper),
  "token_slots:strict=True": ("omnikv", (4, 1), deeper),
  "whole_page": ("quest", (2, 2), llama),
}
ALONE |= {
  f"host-{store}": Case(mesh, matrix.Entry(policy, "harsh", store), model)
  for store, (policy, mesh, model) in ON_HOST.items()
}
# Two processes of two devices each: the first axis runs between them, or the second does.
TOGETHER = {
  f"rows-apart-{entry}": Case((2, 2), entry, llama, compiled=entry == QUEST) for entry in FIRST
}
TOGETHER["heads-apart"] = Case((1, 4), QUEST, opt, WARM)
CASES = ALONE | TOGETHER


def alone_of(case: Case) -> str:
  """The case of one process that says the same on one device."""
  parts = case.entry, case.model, case.sampling
  return next(name for name, one in ALONE.items() if (one.entry, one.model, one.sampling) == parts)


def run(case: Case) -> dict[str, Any]:
  """Tokens, bytes, and what was compiled, on one device and on the mesh.

  Two processes have no tokens of one device: `alone_of` names the case in `ALONE` that has them.
  """
  model, params = case.model()
  mesh = make_mesh(data=case.mesh[0], model=case.mesh[1])
  one, many = _runner(case, None), _runner(case, mesh)
  placed = jax.device_put(params, param_shardings(model, mesh))
  generate(many, placed, SHORT, max_new_tokens=3, sampling=case.sampling)
  with Compilations() as compilations:
    cache, tokens = _generate(many, placed, case.sampling)
  here = [leaf for leaf in jax.tree.leaves(cache) if leaf.sharding.memory_kind == "device"]
  held = [leaf.addressable_shards for leaf in here]
  result = {
    "tokens": [_tokens_of_one(case) if jax.process_count() == 1 else None, tokens],
    "recompiled": compilations.names,
    "keys_values": [one.decode_bytes.keys_values, many.decode_bytes.keys_values],
    "total": many.decode_bytes.total,
    "shapes": [_shapes(jax.eval_shape(lambda: _sealed(one))), _shapes(cache)],
    "held": [sum(shard.data.nbytes for shard in device) for device in zip(*held, strict=True)],
    "unplaced": _error(lambda: generate(many, params, LONG, max_new_tokens=1)),
  }
  return result | (_compiled(case, one, many, params, placed, cache) if case.compiled else {})


def _compiled(case, one, many, params, placed, cache) -> dict[str, Any]:
  """What the compiled step sends and reuses, and pages of the same step on one device."""
  newest, keys = np.zeros(len(LONG), np.int32), jnp.broadcast_to(jax.random.key(0), (len(LONG),))
  pages = [
    {layer: to_host(ids).tolist() for layer, ids in found.items()}
    for found in (
      steps.selected_pages(one, params, _generate(one, params, case.sampling)[0], newest),
      steps.selected_pages(many, placed, cache, newest),
    )
  ]
  step = steps.next_token.lower(many, case.sampling, placed, cache, newest, keys).compile()
  return {
    "pages": pages,
    "aliased": step.memory_analysis().alias_size_in_bytes,
    "sent": [" ".join(found) for found in COLLECTIVE.findall(step.as_text())],
  }


def _runner(case: Case, mesh):
  options = matrix.SETTINGS[case.entry.policy][case.entry.setting]
  policy = make_policy(case.entry.policy, **options)
  config = CacheConfig(len(LONG), matrix.CAPACITY, matrix.PAGE)
  return prepare(case.model()[0], policy, case.entry.store, config, chunk_tokens=64, mesh=mesh)


def _generate(runner, params, sampling):
  out = generate(runner, params, LONG, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=3)
  return out.cache, out.tokens


def _tokens_of_one(case: Case) -> list[list[int]]:
  return _tokens_once(case._replace(mesh=(1, 1), compiled=False))


@cache
def _tokens_once(case: Case) -> list[list[int]]:
  return _generate(_runner(case, None), case.model()[1], case.sampling)[1]


def _sealed(runner):
  return steps.seal(runner, steps.empty_cache(runner))


def _shapes(cache) -> list[list[int]]:
  return [list(leaf.shape) for leaf in jax.tree.leaves(cache)]


def _error(call: Callable) -> str:
  try:
    call()
  except ValueError as error:
    return str(error)
  return "none"


class Compilations(logging.Handler):
  """Names of what is compiled inside it."""

  def __enter__(self):
    self.names: list[str] = []
    self.context = jax.log_compiles()
    self.context.__enter__()
    logging.getLogger("jax").addHandler(self)
    return self

  def __exit__(self, *error):
    logging.getLogger("jax").removeHandler(self)
    self.context.__exit__(*error)

  def emit(self, record):
    if record.getMessage().startswith("Compiling"):
      self.names.append(record.getMessage().split(" with ")[0])


def main(names: str, port: str = "", process: str = "") -> None:
  jax.config.update("jax_numpy_rank_promotion", "raise")
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  if port:
    # Programs of two processes are not to be loaded by one as the other has stored them.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
  print(json.dumps({name: run(CASES[name]) for name in names.split(",")}))


if __name__ == "__main__":
  main(*sys.argv[1:])
