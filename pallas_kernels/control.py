"""Control flow under jit that costs nothing when it does not run."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def run_if[T](flag: jax.Array, f: Callable[..., T], x: T, *used: jax.Array) -> T:
  """f(x, *used) where the scalar bool flag holds, else x: a loop of at most one trip.

  Not `lax.cond`: XLA on CPU runs the fusions of a conditional's branches on one thread, those of a
  loop's body on all (25 against 31 ms for the attention of 30 layers at 8k tokens).

  What f computes must hang on x or `used`: XLA moves whatever is the same in every trip of a loop
  out of it (through an optimization barrier too), and would then compute it always. Here `used`
  seems to change with the trip. Give small arrays; the large ones that f reads may be closed over.
  """

  def body(trip, x):
    return f(x, *(jnp.where(trip < 0, jnp.zeros_like(array), array) for array in used))

  return jax.lax.fori_loop(0, flag.astype(jnp.int32), body, x)


def unless_finite(out: jax.Array, careful: Callable[..., jax.Array], *used: jax.Array) -> jax.Array:
  """out where it is finite throughout, else what careful(*used) gives; see `run_if` for `used`.

  Unused slots may hold anything, and 0 x NaN is NaN, so values must be masked as well as scores.
  Masking copies them, which costs more than the product. Instead the product runs on what is there
  and is repeated with masked values only when the result shows that something was not finite.
  """
  return run_if(~jnp.isfinite(out).all(), lambda _, *args: careful(*args), out, *used)
