"""The floor of a decode step: the bytes that it must read at least once, over the read bandwidth.

At batch sizes of a few rows decoding is bound by memory, not by arithmetic, so a step cannot take
less than `floor_bytes / read_bandwidth`; how far above it a step is says what is left to gain.
Writes (2*K*D values a layer and row) and activations are small and left out, which keeps the floor
low and the comparison strict. Axis letters are those of `kvjax.types`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.config import ModelConfig

QUEST_DENSE_LAYERS = 2
_ITEM_BYTES = 4  # weights, keys, values and bounds are f32 here
_COLUMNS = 1 << 16
_BYTES = 1 << 30


def bandwidth_reader() -> Callable[[], float]:
  """A function that reads 1 GB (2^30 bytes) of f32 on the default device and returns bytes/s.

  That is far more than caches hold. Each call reads it as a sum over rows and as a vector-matrix
  product, and returns the faster: whichever way reads faster sets the floor. The array lives as
  long as the function.
  """
  array = jnp.ones((_BYTES // 4 // _COLUMNS, _COLUMNS), jnp.float32)
  weights = jnp.ones(array.shape[0], jnp.float32)
  ways = (
    (jax.jit(lambda x: x.sum(axis=1)), (array,)),
    (jax.jit(lambda w, x: w @ x), (weights, array)),
  )
  for function, arguments in ways:
    jax.block_until_ready(function(*arguments))

  def read() -> float:
    seconds = []
    for function, arguments in ways:
      start = time.perf_counter()
      jax.block_until_ready(function(*arguments))
      seconds.append(time.perf_counter() - start)
    return _BYTES / min(seconds)

  return read


def read_bandwidth(repeats: int = 5) -> float:
  """Best of several reads of 1 GB on the default device, in bytes/s."""
  read = bandwidth_reader()
  return max(read() for _ in range(repeats))


def floor_bytes(
  config: ModelConfig,
  weight_bytes: int,
  policy: str,
  *,
  budget_tokens: int | None,
  page_size: int,
  tokens: int,
  batch_size: int,
) -> int:
  """Bytes that one decode step must read.

      weights   all of them once for the whole batch. A tied embedding is read whole, as the head;
                of an untied one only B rows of E.
      dense     B * L * 2*K*D * T
      others    B * L * 2*K*D * min(budget, T)              without what selecting reads, nor what
                                                            dense layers read beyond the budget
      quest     B * (2 * 2*K*D * T                          the two dense layers
                     + (L-2) * 2*K*D * ceil(T/C)            minimum and maximum of every page,
                                                            unless the budget holds all of them
                     + (L-2) * 2*K*D * min(budget, T))      keys and values of the chosen pages

  with 4 bytes for each value: weights, keys, values and bounds are f32.

  Args:
    config: the model's shape: L, K, D, E, V.
    weight_bytes: `params_bytes` of its parameters.
    policy: name of the policy.
    budget_tokens: of the policy; unused by "dense".
    page_size: C.
    tokens: T, tokens that each row holds.
    batch_size: B.
  """
  weights = weight_bytes
  if not config.tied_embeddings:
    weights -= max(config.vocab_size - batch_size, 0) * config.embed_dim * _ITEM_BYTES
  token = 2 * config.num_kv_heads * config.head_dim  # values of one token, or page, in one layer
  read = tokens if budget_tokens is None else min(budget_tokens, tokens)
  if policy == "dense":
    values = config.num_layers * token * tokens
  elif policy == "quest":
    dense_layers = min(QUEST_DENSE_LAYERS, config.num_layers)
    pages = -(-tokens // page_size) if read < tokens else 0
    values = dense_layers * token * tokens
    values += (config.num_layers - dense_layers) * token * (pages + read)
  else:
    values = config.num_layers * token * read
  return weights + batch_size * values * _ITEM_BYTES
