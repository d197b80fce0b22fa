"""Whether weights fit, asked before they are made: the kernel's answer afterwards is to kill."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from kvjax.types import Params

_MEMINFO = Path("/proc/meminfo")


def params_bytes(params: Params) -> int:
  """Bytes of a parameter tree, which may be abstract."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def check_fits(source: str, shapes: Params) -> None:
  """Holds weights against the memory of this machine, where that is what they go to.

  Args:
    source: name of the model, for the message.
    shapes: its parameters, abstract.

  Raises:
    ValueError: they need more than there is.
  """
  if jax.default_backend() != "cpu":
    return  # a device says by itself that it is full
  needed, available = params_bytes(shapes), available_bytes()
  if needed > available:
    dtype = jax.tree.leaves(shapes)[0].dtype
    raise ValueError(
      f"{source}: its weights take {needed / 1e9:.1f} GB in {dtype} and this machine has "
      f"{available / 1e9:.1f} GB of memory left; use a narrower dtype or a smaller model, or look "
      "at it without weights: scripts.inspect_model"
    )


def available_bytes() -> int:
  """Memory that can be had without swapping; all of the machine's where the system does not say."""
  if _MEMINFO.exists():
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
      if line.startswith("MemAvailable:"):
        return int(line.split()[1]) * 1024
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
