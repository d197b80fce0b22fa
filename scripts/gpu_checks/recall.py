"""Recall from pinned host memory: against a plain copy, by the size of a page, and beside products.

The goal of the project: at least 80 % of the bandwidth of a pinned copy (ratio 1.25) for 64 pages
of 4 KiB or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recall_pages import recall_pages
from scripts.gpu_checks.case import Case, Setting
from scripts.gpu_checks.timing import loops, measured, pinned_bandwidth, seconds_of_trip

SECONDS = 45
KIB = 1 << 10
PAGE_BYTES = tuple(n * KIB for n in (2, 4, 8, 16, 32, 64))
HEAD_DIM = 128  # of bf16: a token has 256 bytes


def cases(setting: Setting) -> Iterator[Case]:
  """Bandwidth by page size for few and many pages, then overlap."""
  yield Case("pinned copy", partial(_plain, setting))
  for page_bytes in PAGE_BYTES[:2] if setting.interpret else PAGE_BYTES:
    for count in (4,) if setting.interpret else (64, 1024):
      name = f"{count} pages of {page_bytes // KIB} KiB"
      yield Case(name, partial(_bandwidth, page_bytes, count, setting))
  yield Case("recall beside a product", partial(_overlap, setting))


def _bandwidth_of_copy(setting: Setting) -> float:
  return pinned_bandwidth(KIB * KIB if setting.interpret else 256 * KIB * KIB)


def _plain(setting):
  bandwidth = _bandwidth_of_copy(setting)
  return {"bytes_per_s": bandwidth}


def _bandwidth(page_bytes: int, count: int, setting: Setting):
  """Keys and values together, as many pages of each as make count."""
  host, device, source, target = _pools(page_bytes, count // 2, setting)

  def step(device, host, source, target):
    return recall_pages(host, device, source, target, jnp.int32(count // 2))

  often = loops(setting, 16)
  seconds = seconds_of_trip(step, device, host, source, target, **often)
  return measured(seconds, count * page_bytes, _bandwidth_of_copy(setting))


def _pools(page_bytes: int, count: int, setting: Setting):
  """Host pools of 256 MiB each, from which count pages are read in random order."""
  num_pages = 64 if setting.interpret else 256 * KIB * KIB // page_bytes
  page = (page_bytes // (2 * HEAD_DIM), HEAD_DIM)

  @jax.jit
  def make():
    zeros = jnp.zeros((num_pages, *page), jnp.bfloat16)
    host = tuple(jax.device_put(zeros, jax.memory.Space.Host) for _ in range(2))
    return host, tuple(jnp.zeros((count, *page), jnp.bfloat16) for _ in range(2))

  host, device = make()
  source = np.random.default_rng(0).permutation(num_pages)[:count].astype(np.int32)
  return host, device, jnp.asarray(source), jnp.arange(count, dtype=jnp.int32)


def _overlap(setting: Setting):
  """Times alone and together; `hidden` is the part of the shorter one that costs nothing."""
  count, width = (4, 64) if setting.interpret else (2048, 4096)
  host, device, source, target = _pools(4 * KIB, count // 2, setting)

  def move(device, host, source, target):
    return recall_pages(host, device, source, target, jnp.int32(count // 2))

  def multiply(x, weight):
    for _ in range(8):
      x = jnp.tanh(x @ weight)
    return x

  def both(carry, weight, *fixed):
    device, x = carry
    return move(device, *fixed), multiply(x, weight)

  often = loops(setting, 16)
  x, weight = (jnp.ones((width, width), jnp.bfloat16) for _ in range(2))
  fixed = host, source, target
  copies = tuple(pool + 0 for pool in device)
  alone = seconds_of_trip(move, device, *fixed, **often)
  product = seconds_of_trip(multiply, x + 0, weight, **often)
  together = seconds_of_trip(both, (copies, x), weight, *fixed, **often)
  hidden = (alone + product - together) / min(alone, product)
  floor = max(alone, product)
  return {
    "seconds": together,
    "floor_seconds": floor,
    "ratio": together / floor,
    "recall_seconds": alone,
    "product_seconds": product,
    "hidden": hidden,
  }
