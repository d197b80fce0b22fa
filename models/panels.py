"""Weights as a decode step of a few rows reads them fastest on a CPU.

XLA's libraries copy a whole matrix f[in, out] into an order of their own before they multiply it by
two rows or more, which costs as much as reading it. A panel of 64 columns f[in, 64] they read as it
lies, and both cores have panels of their own. Two cores, f32, ms for the matrices of SmolLM2-135M's
layers one after another, 425 MB, and for its head, 113 MB (jax 0.12.0.1, AMD EPYC):

    rows             1      2      4      8      head: 1      4      8
    matrix        19.4   23.1   25.8   28.7          4.5    6.9    8.0
    panels        16.4   14.7   16.0   20.0          4.7    4.4    6.0

From 16 rows on there is nothing to win, and chunks of a prompt take a quarter longer. So this is a
second copy of the weights, for decoding.
"""

from __future__ import annotations

import jax

from kvjax.types import Params

WIDTH = 64
_ROWS = range(1, 9)


def for_decode(params: Params, rows: int) -> Params:
  """What to give `decode_step`, for so many rows, in place of params.

  On a CPU and for one to eight rows, params whose layers' matrices f32[in, out] are panels
  f32[out/64, in, 64], where 64 divides out, and whose head, tied or not, is the panels
  f32[V/64, E, 64] of its transpose; `models.blocks` takes both. Otherwise params.

  Args:
    params: weights, on one device.
    rows: B of the cache.
  """
  if jax.default_backend() != "cpu" or rows not in _ROWS:
    return params
  layers = tuple(jax.tree.map(_panels, layer) for layer in params["layers"])
  head = params.get("head", params["embed"])
  panels = _panels(head.T)
  return params | {"layers": layers, "head": head if panels.ndim == 2 else panels}


def _panels(w: jax.Array) -> jax.Array:
  if w.ndim != 2 or w.dtype != "float32" or w.shape[1] % WIDTH:
    return w
  return w.reshape(w.shape[0], -1, WIDTH).swapaxes(0, 1)
