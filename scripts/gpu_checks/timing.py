"""Times of what runs on the device, without the launch of every call in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu_checks.case import Setting

ROUNDS = 7


def seconds_of(call: Callable[[], Any], calls: int = 1, rounds: int = ROUNDS) -> float:
  """Median over rounds of the time of a call, of several that follow each other without waiting."""
  jax.block_until_ready(call())
  times = []
  for _ in range(rounds):
    start = time.perf_counter()
    last = [call() for _ in range(calls)][-1]
    jax.block_until_ready(last)
    times.append((time.perf_counter() - start) / calls)
  return statistics.median(times)


def seconds_of_trip(step: Callable, carry, *fixed, trips: int = 32, rounds: int = ROUNDS) -> float:
  """Time of `carry = step(carry, *fixed)` in a loop on the device.

  Every trip must need what the one before it gave, or XLA would compute it once. Array leaves of
  carry are given up.
  """

  def loop(carry, *fixed):
    return jax.lax.fori_loop(0, trips, lambda _, carry: step(carry, *fixed), carry)

  compiled, held = jax.jit(loop, donate_argnums=0), [carry]

  def call():
    held[0] = compiled(held[0], *fixed)
    return held[0]

  return seconds_of(call, rounds=rounds) / trips


def loops(setting: Setting, trips: int = 32) -> dict[str, int]:
  """Keywords of `seconds_of_trip`; what is interpreted runs once, as its time means nothing."""
  return {"trips": 1, "rounds": 1} if setting.interpret else {"trips": trips, "rounds": ROUNDS}


@cache
def device_bandwidth(num_bytes: int) -> float:
  """Bytes/s read and written when an array of so many bytes is copied on the device."""
  array = jnp.zeros(num_bytes // 4, jnp.float32)
  return 2 * num_bytes / seconds_of_trip(lambda x: x + 1, array)


@cache
def pinned_bandwidth(num_bytes: int) -> float:
  """Bytes/s of one plain copy from pinned host memory to the device."""

  @jax.jit
  def make():
    return jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), jax.memory.Space.Host)

  @jax.jit
  def copy(x):
    return jax.device_put(x, jax.memory.Space.Device)

  host = make()
  return num_bytes / seconds_of(lambda: copy(host), calls=4)


def measured(seconds: float, num_bytes: float, bandwidth: float, **more) -> dict[str, Any]:
  """A result: the time, the least that so many bytes take, and how often that fits in."""
  floor = num_bytes / bandwidth
  return {
    "seconds": seconds,
    "bytes": int(num_bytes),
    "bytes_per_s": num_bytes / seconds,
    "floor_seconds": floor,
    "ratio": seconds / floor,
    **more,
  }
