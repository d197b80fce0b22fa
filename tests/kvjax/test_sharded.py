"""Several devices give what one gives, each holding and sending no more than its part.

A CPU counts as several devices only if it is told so before JAX starts, so the runs are those of
`sharded_worker` in other processes: one with 8 devices, and two with 2 devices each.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from kvjax import CacheConfig, make_mesh, make_policy, param_shardings, prepare
from models import PRESETS, build, param_shapes
from tests.kvjax import matrix
from tests.kvjax.sharded_worker import ALONE, LONG, TOGETHER, alone_of, llama

ROOT = Path(__file__).resolve().parents[2]
MODEL = llama()[0]
HARSH = [
  entry for entry in matrix.entries() if entry.setting == "harsh" and entry.store not in matrix.HOST
]
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # to compile


@pytest.fixture(scope="module")
def alone():
  """Results of one process with 8 devices."""
  return _run(8, ",".join(ALONE))


@pytest.fixture(scope="module")
def together():
  """Results of two processes with 2 devices each, as both of them tell them."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
  with ThreadPoolExecutor() as threads:
    return list(threads.map(lambda process: _run(2, ",".join(TOGETHER), port, process), "01"))


def _run(devices: int, *arguments: str) -> dict:
  flags = (
    f"--xla_force_host_platform_device_count={devices} {QUICK} {os.environ.get('XLA_FLAGS', '')}"
  )
  done = subprocess.run(
    [sys.executable, "-m", "tests.kvjax.sharded_worker", *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def _check(case, result: dict, expected: list[list[int]]) -> None:
  """expected: tokens of one device."""
  devices = math.prod(case.mesh)
  found = result["tokens"][1]
  assert found == expected
  assert len({token for row in found for token in row}) > 10, "too little to tell apart"
  assert not result["recompiled"]
  one, many = result["keys_values"]
  assert many * devices == one
  assert set(result["held"]) == {result["total"]}
  assert result["shapes"][1] == result["shapes"][0]
  assert result["unplaced"].startswith("the weights do not lie on the mesh of the runner")
  if case.compiled:
    expected, found = result["pages"]
    assert found == expected
    assert bool(found) == (case.entry.policy != "dense")
    assert result["aliased"] >= result["total"]
    assert sorted(result["sent"]) == sorted(_sent(case))


def _sent(case) -> list[str]:
  """All that a decode step may send: sums f[B, 1, E], two a layer and one of the embedding, and the
  logits f[B, V]; nothing between rows."""
  data, parts = case.mesh
  config = case.model()[0].config
  if parts == 1:
    return []
  rows, splits_vocab = len(LONG) // data, config.vocab_size % parts == 0
  sums = 2 * config.num_layers + splits_vocab
  logits = [f"f32[{rows},{config.vocab_size}] all-gather"] * splits_vocab
  return logits + [f"f32[{rows},1,{config.embed_dim}] all-reduce"] * sums


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_eight_devices_give_what_one_gives(name, alone):
  _check(ALONE[name], alone[name], alone[name]["tokens"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_give_what_one_device_gives(name, alone, together):
  expected = alone[alone_of(TOGETHER[name])]["tokens"][0]
  for result in together:
    _check(TOGETHER[name], result[name], expected)


def abstract_mesh(data: int, model: int) -> AbstractMesh:
  """A mesh of devices that are not here, for what is known before anything runs."""
  return AbstractMesh((data, model), ("data", "model"))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "opt-6.7b", "qwen2.5-7b", "mistral-7b-v0.1"])
def test_real_shapes_are_split(name):
  """Every matrix is divided; norms, learned positions and what is added to a sum are not."""
  mesh, config = abstract_mesh(2, 4), PRESETS[name]
  model, shapes = build(config), param_shapes(config)
  shardings = param_shardings(model, mesh)
  whole = jax.tree.map(
    lambda leaf, one: leaf.size == math.prod(one.shard_shape(leaf.shape)), shapes, shardings
  )
  for path, kept in jax.tree_util.tree_leaves_with_path(whole):
    leaf = path[-1].key
    assert kept == ("norm" in leaf or leaf in ("positions", "o_bias", "down_bias")), path
  cache = CacheConfig(4, 2048, base_tokens=2048)
  for policy in ("dense", "quest"):  # and every other policy on a small model, below
    one, many = (
      prepare(model, make_policy(policy), "resident", cache, mesh=m).decode_bytes
      for m in (None, mesh)
    )
    assert (many.keys_values * 8, many.metadata * 8) == (one.keys_values, one.metadata)


@pytest.mark.parametrize("entry", HARSH, ids=str)
def test_what_any_policy_keeps_is_split(entry):
  """Keys and values are; of the rest no more is repeated than a few numbers of each row."""
  policy = make_policy(entry.policy, **matrix.SETTINGS[entry.policy]["harsh"])
  sizes = (4, 1) if policy.joins_heads else (2, 4)
  cache = CacheConfig(len(matrix.LENGTHS), matrix.CAPACITY, matrix.PAGE)
  one, many = (
    prepare(MODEL, policy, entry.store, cache, chunk_tokens=64, mesh=mesh).decode_bytes
    for mesh in (None, abstract_mesh(*sizes))
  )
  devices = math.prod(sizes)
  assert many.keys_values * devices == one.keys_values
  by_row = 8 * len(matrix.LENGTHS)  # bytes
  assert one.total <= many.total * devices <= one.total + devices * by_row


@pytest.mark.parametrize(
  ("data", "model", "message"),
  [
    (1, 8, "num_kv_heads 4 cannot be split over the 8 devices of the mesh's 'model' axis"),
    (3, 1, "batch_size 4 cannot be split over the 3 devices of the mesh's 'data' axis"),
  ],
)
def test_what_cannot_be_split_is_refused(data, model, message):
  cache = CacheConfig(4, 64)
  with pytest.raises(ValueError, match=message) as error:
    prepare(MODEL, make_policy("dense"), "resident", cache, mesh=abstract_mesh(data, model))
  assert "\n" not in str(error.value)


def test_heads_that_a_policy_joins_are_not_split():
  cache = CacheConfig(4, 64)
  with pytest.raises(ValueError, match=r"'tova' joins the heads .*model=4 splits.*data=N"):
    prepare(MODEL, make_policy("tova"), "compact", cache, mesh=abstract_mesh(1, 4))
  prepare(MODEL, make_policy("tova"), "compact", cache, mesh=abstract_mesh(4, 1))


def test_a_feed_forward_that_cannot_be_split_is_refused():
  config = dataclasses.replace(MODEL.config, ffn_dim=66)
  with pytest.raises(ValueError, match=r"ffn_dim 66 cannot .* make a mesh whose model divides it"):
    param_shardings(build(config), abstract_mesh(1, 4))


def test_meshes_that_cannot_be_are_refused():
  with pytest.raises(ValueError, match=r"needs 1024 devices, and JAX has \d+; ask for fewer"):
    make_mesh(data=2, model=512)
  with pytest.raises(ValueError, match="data=0 and model=1 is empty"):
    make_mesh(data=0)
  other = AbstractMesh((1, 1), ("x", "y"))
  for call in (
    lambda: param_shardings(MODEL, other),
    lambda: prepare(MODEL, make_policy("dense"), "resident", CacheConfig(1, 64), mesh=other),
  ):
    with pytest.raises(ValueError, match=r"axes \('x', 'y'\), .* make it with make_mesh"):
      call()
