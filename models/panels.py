"""Weights as a decode step of a few rows reads them fastest on a CPU.

XLA's libraries copy a whole matrix f[in, out] into an order of their own before they multiply it by
two rows or more, which costs as much as reading it. A panel of 64 columns f[in, 64] they read as it
lies. Two cores, f32, four rows, us for each matrix (jax 0.12.0.1):

    in x out     576 x 1536   1536 x 576   576 x 576   576 x 192
    matrix          204          243          106         35
    panels          133          160           53         23

One row takes as long either way, from 16 rows on there is nothing to win, and chunks of a prompt
take a quarter longer. So this is a second copy of the layers' weights, for decoding.
"""

from __future__ import annotations

import jax

from kvjax.types import Params

WIDTH = 64
_ROWS = range(2, 9)


def for_decode(params: Params, rows: int) -> Params:
  """What to give `decode_step`, for so many rows, in place of params.

  On a CPU and for two to eight rows, params whose layers' matrices f32[in, out] are panels
  f32[out/64, in, 64], where 64 divides out; `models.blocks.linear` takes both. Otherwise params.

  Args:
    params: weights, on one device.
    rows: B of the cache.
  """
  if jax.default_backend() != "cpu" or rows not in _ROWS:
    return params
  return params | {"layers": tuple(jax.tree.map(_panels, layer) for layer in params["layers"])}


def _panels(w: jax.Array) -> jax.Array:
  if w.ndim != 2 or w.dtype != "float32" or w.shape[1] % WIDTH:
    return w
  return w.reshape(w.shape[0], -1, WIDTH).swapaxes(0, 1)
