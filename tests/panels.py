"""What is kept of pages, as it is written and as `page_scores` reads it."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.page_scores import PANEL


def in_panels(x):
  """[B, K, Z, P] in panels [B, K, C, Z, W] of 64 pages, or in one if these do not come out even."""
  b, k, z, p = x.shape
  count = p // PANEL if p % PANEL == 0 else 1
  return x.reshape(b, k, z, count, p // count).swapaxes(2, 3)


def in_order(segments):
  """[B, K, P, Z] of segments of panels [B, K, C, Z, W]."""
  return jnp.concatenate(
    [x.swapaxes(3, 4).reshape(*x.shape[:2], -1, x.shape[3]) for x in segments], axis=2
  )
