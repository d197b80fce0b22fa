"""Pages copied out of a pool, in the form that each platform copies fast."""

from __future__ import annotations

import jax


def copies_of_pages(pool: jax.Array, pages: jax.Array) -> jax.Array:
  """f[..., C, D]: the pages i32[...] of a pool f[N, C, D]; out of range, the nearest that there is.

  XLA's loop over a gather for a CPU has the last axis of the result innermost. An axis of D numbers
  is unrolled before anything is vectorised, and the page is copied number by number; over C*D
  numbers it stays a loop of whole vectors, 1.3 to 2.3 times as fast. The barrier keeps the result
  from being reshaped inside that loop. Other platforms need no help, and a barrier would keep the
  gather from what it could be fused with.
  """
  return jax.lax.platform_dependent(pool, pages, cpu=_in_one_piece, default=_as_they_are)


def _in_one_piece(pool, pages):
  n, c, d = pool.shape
  copies = pool.reshape(n, c * d).at[pages].get(mode="clip", wrap_negative_indices=False)
  return jax.lax.optimization_barrier(copies).reshape(*pages.shape, c, d)


def _as_they_are(pool, pages):
  return pool.at[pages].get(mode="clip", wrap_negative_indices=False)
