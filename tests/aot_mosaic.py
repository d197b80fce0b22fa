"""What ptxas says of GPU kernels on a machine without a GPU: registers, spills, shared memory.

XLA hands a Mosaic GPU kernel on as a module in the text of a custom call and compiles it only when
the program is loaded, with the help of the driver. The function that does so is exported by jax's
CUDA plugin, and all that it asks the driver for is which GPU is there: a library of nine functions
that stands in for the driver answers "an H100", and the kernel is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir

from tests import aot

# The soname by which libraries ask for the driver, and attribute 75 of a device: the first digit
# of its compute capability.
SONAME = "libcuda.so.1"
STAND_IN = """
int cuInit(unsigned flags) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *v, int name, int device) { *v = name == 75 ? 9 : 0; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **f, void *module, const char *name) { *f = (void *)1; return 0; }
int cuFuncSetAttribute(void *f, int name, int value) { return 0; }
int cuGetErrorName(int error, const char **text) { *text = "none"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no driver"; return 0; }
"""
DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidiactl")
ENTRY = re.compile(r"Compiling entry function '([^']+)'(.*?Used [^\n]*)", re.DOTALL)


class Kernel(NamedTuple):
  """One kernel as ptxas compiled it.

  Attributes:
    name: its entry in the PTX.
    registers: of a thread.
    spill_bytes: that a thread stores to and loads from memory for want of registers.
    shared_bytes: shared memory of a block; of XLA's kernels without what their launch asks for.
    ptx: its text.
    log: what ptxas said of it, its warnings ("Potential Performance Loss") included.
  """

  name: str
  registers: int
  spill_bytes: int
  shared_bytes: int
  ptx: str
  log: str


def why_not() -> str | None:
  """What is missing to compile Mosaic GPU kernels here; None if nothing is."""
  if any(os.path.exists(path) for path in DRIVER_FILES):
    return "a GPU driver is here, which the stand-in would hide"
  if _c_compiler() is None:
    return "no C compiler, for the stand-in of the driver"
  return aot.why_not()


def mosaic_kernels(lowered: jax.stages.Lowered) -> list[Kernel]:
  """The Mosaic GPU kernels of what `aot.lower_for_h100` gave, in the order of the program."""
  return [kernel for module in _modules(lowered) for kernel in _compile_module(module)]


def xla_kernels(lowered: jax.stages.Lowered) -> list[Kernel]:
  """The kernels that XLA makes itself, and those of Triton. Compiles the program."""
  with tempfile.TemporaryDirectory() as folder:
    # Without the last two options a GPU's PTX is not among what is written.
    options = {"xla_dump_to": folder, "xla_gpu_dump_llvmir": True, "xla_dump_emitter_re": ".*"}
    aot.compile_lowered(lowered, options)
    return _ptxas_all(Path(folder))


def _modules(lowered: jax.stages.Lowered) -> list[bytes]:
  """What the custom calls of Mosaic GPU carry."""
  found = []
  for call in _operations(lowered.compiler_ir(), "stablehlo.custom_call"):
    target = ir.StringAttr(call.attributes["call_target_name"]).value
    if target.startswith("mosaic_gpu"):
      config = ir.DictAttr(call.attributes["mhlo.backend_config"])
      found.append(ir.StringAttr(config["module"]).value_bytes)
  return found


def _operations(module, name: str) -> list:
  found = []

  def visit(operation):
    if operation.name == name:
      found.append(operation)
    return ir.WalkResult.ADVANCE

  module.operation.walk(visit)
  return found


def _compile_module(module: bytes) -> list[Kernel]:
  _load_stand_in()
  with tempfile.TemporaryDirectory() as folder:
    dump = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
    with mock.patch.dict(os.environ, dump), _stderr_of_libraries(Path(folder) / "stderr"):
      done = _compiler()(module, len(module))
    if not done:
      raise RuntimeError(f"Mosaic GPU failed: {(Path(folder) / 'stderr').read_text('utf-8')}")
    at_launch = _launch_bytes(module)
    kernels = _ptxas_all(Path(folder))
  return [kernel._replace(shared_bytes=kernel.shared_bytes + at_launch) for kernel in kernels]


def _launch_bytes(module: bytes) -> int:
  """Shared memory that the launch asks for: the last operand, a constant."""
  with mlir.make_ir_context() as context:
    mosaic_gpu_dialect.register_dialect(context)  # types of memory, of barriers among them
    context.allow_unregistered_dialects = True
    parsed = ir.Module.parse(module)  # which owns its operations
    (launch,) = _operations(parsed, "stable_mosaic_gpu.gpu.launch")
    size = launch.operands[len(launch.operands) - 1]
    return ir.IntegerAttr(size.owner.attributes["value"]).value


@cache
def _compiler():
  from jax_plugins import xla_cuda13  # only where it is installed

  library = ctypes.CDLL(xla_cuda13._get_library_path())
  compiler = library.MosaicGpuCompile
  compiler.argtypes, compiler.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
  return compiler


@cache
def _load_stand_in() -> ctypes.CDLL:
  """Who asks for the driver later finds what already goes by its name."""
  reason = why_not()
  if reason is not None:
    raise RuntimeError(reason)
  with tempfile.TemporaryDirectory() as folder:
    source, library = Path(folder) / "stand_in.c", Path(folder) / SONAME
    source.write_text(STAND_IN, "utf-8")
    flags = ["-w", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}"]
    subprocess.run([str(_c_compiler()), *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _c_compiler() -> str | None:
  return shutil.which("cc") or shutil.which("gcc")


@contextlib.contextmanager
def _stderr_of_libraries(path: Path) -> Iterator[None]:
  """Sends what C code writes to stderr to a file: it misses a disassembler it can do without."""
  sys.stderr.flush()
  saved = os.dup(2)
  with path.open("w") as file:
    os.dup2(file.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(saved, 2)
    os.close(saved)


def _ptxas_all(folder: Path) -> list[Kernel]:
  return [kernel for path in sorted(folder.glob("*.ptx")) for kernel in _ptxas(path)]


def _ptxas(path: Path) -> list[Kernel]:
  """Every entry of a file of PTX, assembled for the log alone."""
  command = ["ptxas", "-arch=sm_90a", "-v", str(path), "-o", os.devnull]
  run = subprocess.run(command, capture_output=True, text=True, check=True)
  log, text = run.stdout + run.stderr, path.read_text("utf-8")
  return [_kernel(name, about, text, log) for name, about in ENTRY.findall(log)]


def _kernel(name: str, about: str, ptx: str, log: str) -> Kernel:
  def total(pattern: str) -> int:
    return sum(int(number) for number in re.findall(pattern, about))

  registers, spilled = total(r"Used (\d+) registers"), total(r"(\d+) bytes spill")
  return Kernel(name, registers, spilled, total(r"(\d+) bytes smem"), ptx, log)
