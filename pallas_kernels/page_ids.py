"""What page operations ask of their pools and ids before they trace anything."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np


def is_known(*arrays) -> bool:
  """None of these is being traced: their values can be looked at."""
  return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_pool(operation: str, pool: jax.Array) -> None:
  """Raises ValueError for what is not f[N, C, D]."""
  if pool.ndim != 3:
    raise ValueError(f"{operation}: pool {pool.shape} has {pool.ndim} axes, expected [N, C, D]")


def check_moves(
  operation: str,
  origin: Sequence[jax.Array],
  into: Sequence[jax.Array],
  source: jax.Array,
  target: jax.Array,
  count: jax.Array,
) -> None:
  """Raises ValueError where pages cannot go from origin to into, or ids do not fit them."""
  if len(origin) != len(into) or not origin:
    raise ValueError(
      f"{operation}: {len(origin)} pools to read and {len(into)} to write, expected as many of both"
    )
  for pool in (*origin, *into):
    check_pool(operation, pool)
    if (pool.shape[1:], pool.dtype) != (origin[0].shape[1:], origin[0].dtype):
      raise ValueError(
        f"{operation}: pages of {origin[0].dtype}{list(origin[0].shape[1:])} and of "
        f"{pool.dtype}{list(pool.shape[1:])} in one call, expected one shape and dtype"
      )
  if source.shape != target.shape or source.ndim != 1:
    raise ValueError(
      f"{operation}: source {source.shape} and target {target.shape} must be the same [R]"
    )
  # Which pairs count is unknown where count is being traced, and the others may hold any ids.
  known = max(int(count), 0) if is_known(count) else 0
  for name, ids, of in (("source", source, origin), ("target", target, into)):
    check_ids(f"{operation}: {name}", ids[:known], min(pool.shape[0] for pool in of))


def check_ids(
  name: str,
  ids: jax.Array,
  num_pages: int,
  *,
  none: bool = False,
  used: jax.Array | np.ndarray | None = None,
) -> None:
  """Raises ValueError for ids that are not i32 in [0, num_pages), as far as they are known.

  What is being traced has no values yet.

  Args:
    name: of the ids, in the message.
    ids: i32[...].
    num_pages: N.
    none: N itself is allowed, and means no page.
    used: bool[...], ids that matter; None for all.
  """
  if ids.dtype != np.int32:
    raise ValueError(f"{name}: ids are {ids.dtype}, expected int32")
  if not is_known(ids, used) or ids.size == 0:
    return
  known = np.asarray(ids) if used is None else np.asarray(ids)[np.asarray(used)]
  wrong = known[(known < 0) | (known >= num_pages + none)]
  if wrong.size:
    raise ValueError(f"{name}: {wrong[0]} is out of range, expected 0 to {num_pages - 1}")
