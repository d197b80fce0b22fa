"""Every kernel and every implementation against its reference in f32, over the named shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import jax
import numpy as np

from pallas_kernels.arg_specs import Shape
from scripts.gpu_checks import inputs
from scripts.gpu_checks.case import Case, Setting
from scripts.gpu_checks.operations import OPERATIONS, widened

SECONDS = 120
IMPLEMENTATIONS = ("xla", "mosaic")
# Weights of attention are rounded to the dtype before they meet the values, and the result again;
# products of f32 are made in tf32 on a GPU, with 10 bits.
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 5e-3}


def cases(setting: Setting) -> Iterator[Case]:
  """One for each operation, implementation and shape."""
  for shape in inputs.shapes(setting):
    for name in OPERATIONS:
      for implementation in IMPLEMENTATIONS:
        run = partial(compare, name, shape, implementation, setting)
        yield Case(f"{name} {implementation} {shape.name}", run)


def compare(name: str, shape: Shape, implementation: str, setting: Setting):
  """The largest difference of any number."""
  operation, (arguments, expected) = OPERATIONS[name], _expected(name, shape)
  interpret = setting.interpret and implementation != "xla"
  call = partial(operation.call, implementation=implementation, interpret=interpret)
  found = jax.jit(call)(*arguments)
  tolerance = 0.0 if operation.exact else TOLERANCE[shape.dtype]
  worst = max(_error(*pair) for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True))
  return {"ok": worst <= tolerance, "max_error": worst, "tolerance": tolerance}


@lru_cache(maxsize=1)  # all implementations of an operation come one after another
def _expected(name: str, shape: Shape):
  """Arguments, and what the reference makes of them in f32."""
  arguments = tuple(OPERATIONS[name].arguments(shape))
  with jax.default_matmul_precision("highest"):
    return arguments, OPERATIONS[name].reference(*jax.tree.map(widened, arguments))


def _error(found, expected) -> float:
  """Infinite where either is not a number."""
  found, expected = (np.asarray(x, np.float32) for x in (found, expected))
  if found.shape != expected.shape:
    raise ValueError(f"shape {found.shape}, and the reference has {expected.shape}")
  finite = np.isfinite(found).all() and np.isfinite(expected).all()
  scale = 1 + np.abs(expected)  # differences of large numbers are relative
  return float((np.abs(found - expected) / scale).max(initial=0.0)) if finite else np.inf
