"""Pages in pinned host memory: the same flat pools, of which a step brings back what it needs.

Host arrays are a type of their own (`f32<host>[N, C, D]`). They are made inside jit, so that they
are the device's own and can be updated in place, and they are donated with the cache. Two rules
keep XLA from copying a pool: within a layer what is new is written before anything is recalled, and
nothing but a recall ever reads them.
"""

from __future__ import annotations

import os

import jax
from jax import lax

from kvjax.cache.paged import Pools

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_LIMIT_GB = 64


def empty(shape: tuple[int, int, int], dtype: str) -> Pools:
  """Pools f[N, C, D] of zeros in host memory, made there: nothing of their size on the device."""

  def zeros():
    zero = jax.device_put(jax.numpy.zeros((), dtype), jax.memory.Space.Host)
    return lax.broadcast(zero, shape)

  return Pools(zeros(), zeros())


def limit_bytes(backend: str) -> int:
  """Most bytes that pinned pools may have.

  On a GPU XLA's allocator has a limit of its own, 64 GB unless an environment variable says other;
  elsewhere it is the memory of the machine.
  """
  total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  if backend != "gpu":
    return total
  return min(total, int(float(os.environ.get(LIMIT_VARIABLE, _DEFAULT_LIMIT_GB)) * 2**30))


class HostPoolsTooLarge(ValueError):
  """Pools that cannot be pinned here. They are asked for whole before anything is read, so that a
  run never meets their end later; who catches it may go on with a store without a host tier."""


def check_fits(wanted: int, backend: str) -> None:
  """Raises HostPoolsTooLarge, in one line, where pools of so many bytes cannot be pinned here."""
  limit = limit_bytes(backend)
  if wanted <= limit:
    return
  how = f"raise {LIMIT_VARIABLE} (GB), " if backend == "gpu" else ""
  raise HostPoolsTooLarge(
    f"the host pools need {wanted} bytes and at most {limit} can be pinned here; {how}lower "
    "capacity_tokens, batch_size or op_block's host_blocks, or use a cache dtype of 2 bytes"
  )
