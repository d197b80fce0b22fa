"""Compiles a jitted function for an H100 on a machine without a GPU, and reads what came out.

XLA's CUDA compiler comes with the packages jax-cuda13-plugin and jax-cuda13-pjrt (of jax's own
version) and asks for nothing but a description of the chip.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The plugin refuses to load where it finds neither a GPU nor cuDNN; a compiler needs neither.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")

# The public data sheet of an H100 SXM (80 GB) in the terms of XLA's GpuTargetConfig.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84978434048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
ITEM_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "s16": 2, "u16": 2}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def why_not() -> str | None:
  """What is missing to compile for an H100 here; None if nothing is."""
  wanted = importlib.metadata.version("jaxlib")
  for name in PLUGINS:
    try:
      found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      return f"{name} is not installed"
    if found != wanted:
      return f"{name} is {found}, jaxlib {wanted}"
  if shutil.which("ptxas") is None:
    return "ptxas of a CUDA 13 toolkit is not on PATH"
  return None


def on_host(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
  """An argument that lies in pinned host memory."""
  return jax.eval_shape(lambda: jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host))


def lower_for_h100(fn: Callable, *args, static_argnums=(), donate_argnums=()) -> jax.stages.Lowered:
  """fn lowered; args are static values or pytrees of `jax.ShapeDtypeStruct`.

  A leaf lies in pinned host memory if its type says so, as that of `on_host` does and those that
  `jax.eval_shape` finds for what a function puts there.
  """
  abstract = _mesh().abstract_mesh

  def place(x):
    kind = "pinned_host" if jax.typeof(x).memory_space == jax.memory.Space.Host else "device"
    # Over a mesh of devices that are only compiled for, jax would drop the kind of memory.
    sharding = NamedSharding(abstract, PartitionSpec(), memory_kind=kind)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  args = [arg if i in static_argnums else jax.tree.map(place, arg) for i, arg in enumerate(args)]
  with jax.sharding.use_abstract_mesh(abstract):
    jitted = jax.jit(fn, static_argnums=static_argnums, donate_argnums=donate_argnums)
    return jitted.trace(*args).lower(lowering_platforms=("cuda",))


def compile_lowered(lowered: jax.stages.Lowered, options=None) -> jax.stages.Compiled:
  """What `lower_for_h100` gave, compiled; options are XLA's, by name."""
  device = _mesh().devices.flat[0]
  # Lowered for an abstract mesh it has no device yet, and would be given to the CPU's compiler.
  lowered._lowering.compile_args["backend"] = device.client
  with _no_compilation_cache():
    return lowered.compile(device_assignment=(device,), compiler_options=options)


@contextmanager
def _no_compilation_cache():
  """It cannot load what was compiled for a device that is not here."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()  # asks the setting only once
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def compile_for_h100(fn: Callable, *args, **argnums) -> jax.stages.Compiled:
  """fn compiled; arguments as of `lower_for_h100`."""
  return compile_lowered(lower_for_h100(fn, *args, **argnums))


def big_copies(hlo: str, min_bytes: int) -> list[str]:
  """Instructions of optimised HLO that copy at least so many bytes, one line each."""
  found = []
  for name, kind, opcode in INSTRUCTION.findall(hlo):
    size = array_bytes(kind)
    if opcode in ("copy", "copy-start") and size >= min_bytes:
      found.append(f"{name}: {opcode} of {size} bytes, {kind}")
  return found


def array_bytes(kind: str) -> int:
  """Bytes of the largest array of an HLO type."""
  sizes = [
    ITEM_BYTES.get(dtype, 0) * int(np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64))
    for dtype, dims in ARRAY.findall(kind)
  ]
  return max(sizes, default=0)


@cache
def _mesh() -> Mesh:
  described = topologies.get_topology_desc("1x1x1", "cuda", target_config=H100, topology="1x1x1")
  return Mesh(np.array(described.devices[:1]), ("x",))
