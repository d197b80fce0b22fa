"""Control flow under jit that costs nothing when it does not run."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def run_if[T](flag: jax.Array, f: Callable[[T], T], x: T) -> T:
  """f(x) where the scalar bool flag holds, else x.

  Not a loop of at most one trip: XLA moves what is the same in every trip out of a loop, and would
  then compute always what should be skipped.
  """
  return jax.lax.cond(flag, f, lambda x: x, x)


def unless_finite[T](out: T, careful: Callable[[], T]) -> T:
  """out, arrays that are finite throughout, else what careful() gives.

  Unused slots may hold anything, and 0 x NaN is NaN, so values must be masked as well as scores.
  Masking copies them, which costs more than the product. Instead the product runs on what is there
  and is repeated with masked values only when the result shows that something was not finite.
  """
  finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(out)]
  return run_if(~jnp.stack(finite).all(), lambda _: careful(), out)
