"""Which implementation of an operation runs: chosen while a call is traced, and recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax

# The oldest GPU, by compute capability, for which each implementation compiles; None for any
# device.
OLDEST = {"xla": None, "mosaic": (9, 0), "triton": (8, 0)}

# NVIDIA's names of GPUs whose capability cannot be asked for: a program that is compiled for a chip
# which is not here knows its name alone.
_HOPPER, _BLACKWELL = ("H100", "H200", "H800", "H20", "GH200"), ("B200", "GB200")
_BY_NAME = dict.fromkeys(_HOPPER, (9, 0)) | dict.fromkeys(_BLACKWELL, (10, 0))

_record: ContextVar[dict[str, str] | None] = ContextVar("chosen", default=None)


def choose(
  operation: str,
  implementation: str | None,
  refusals: Mapping[str, str | None],
  *,
  interpret: bool = False,
) -> str:
  """The implementation that a call uses.

  Args:
    operation: name in messages and records.
    implementation: "xla", "mosaic" or "triton"; None for mosaic where it can run, else xla.
    refusals: for every implementation that the operation has, why it cannot do this call (head
      size, dtype and the like), or None where it can.
    interpret: the kernel's code runs on a CPU, whatever the target is.

  Raises:
    ValueError: a named implementation that does not exist, is refused, or does not run on the
      target.
  """
  if implementation is None:
    able = _why_not("mosaic", refusals, interpret) is None
    return _recorded(operation, "mosaic" if able else "xla")
  reason = _why_not(implementation, refusals, interpret)
  if reason is not None:
    rest = [name for name in refusals if _why_not(name, refusals, interpret) is None]
    raise ValueError(
      f"{operation}: implementation {implementation!r} cannot run: {reason}; "
      f"use implementation=None or one of {', '.join(rest)}"
    )
  return _recorded(operation, implementation)


@contextmanager
def recording() -> Iterator[dict[str, str]]:
  """A dict that what is traced inside fills: operation -> implementation.

  An operation of which several implementations were chosen gets all of them, joined by "+". What
  jit has traced before is not traced again, and then not recorded.
  """
  chosen: dict[str, str] = {}
  token = _record.set(chosen)
  try:
    yield chosen
  finally:
    _record.reset(token)


def target_capability() -> tuple[int, int] | None:
  """Compute capability of the NVIDIA GPU that is traced for; None for any other device.

  The target is the device of the abstract mesh where one is set, as inside `shard_map` and for a
  chip that is not here, else the default device. Where arrays lie cannot be seen while tracing: for
  arrays on the CPU of a machine with a GPU, set `jax.default_device`, or name the implementation.
  """
  default = jax.config.jax_default_device or jax.devices()[0]
  if isinstance(default, str):  # the name of a platform
    default = jax.devices(default)[0]
  device = jax.sharding.get_abstract_mesh().abstract_device or default
  if device.platform not in ("gpu", "cuda"):
    return None
  if device.device_kind == default.device_kind:
    return _version(getattr(default, "compute_capability", ""))
  words = device.device_kind.split()
  return next((found for name, found in _BY_NAME.items() if name in words), None)


def _why_not(name: str, refusals: Mapping[str, str | None], interpret: bool) -> str | None:
  if name not in refusals:
    return f"there are only {', '.join(refusals)}"
  if refusals[name] is not None or interpret:
    return refusals[name]
  oldest = OLDEST[name]
  if oldest is None:
    return None
  found = target_capability()
  if found is None:
    return "the target is no NVIDIA GPU (interpret=True runs the kernel on a CPU)"
  if found < oldest:
    wanted, has = (".".join(map(str, version)) for version in (oldest, found))
    return f"it needs a GPU of compute capability {wanted} or newer, and the target has {has}"
  return None


def _version(capability: str) -> tuple[int, int] | None:
  """(9, 0) of "9.0"; None of what an AMD GPU says."""
  major, _, minor = capability.partition(".")
  return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _recorded(operation: str, name: str) -> str:
  chosen = _record.get()
  if chosen is not None:
    before = chosen.get(operation, name).split("+")
    chosen[operation] = "+".join(dict.fromkeys([*before, name]))
  return name
