"""What attention over page pools asks of them, and int8 pages with a scale each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# f32[N] of the keys and of the values, one for each page. With f16 queries those of the values
# should be 1e-5 or more: weights times scales are rounded to f16 before they meet the numbers.
Scales = tuple[jax.Array, jax.Array]


def check_pools(q, keys, values, scales: Scales | None) -> None:
  """ValueError unless the pools are of one shape [N, C, D] that fits q, with scales if int8."""
  if q.ndim != 4 or keys.ndim != 3 or keys.shape[2] != q.shape[3] or keys.shape != values.shape:
    raise ValueError(
      f"pools {keys.shape} and {values.shape} do not fit q {q.shape}: "
      "expected q [B, K, G, D] and [N, C, D] of both"
    )
  if keys.dtype != values.dtype:
    raise ValueError(f"keys are {keys.dtype} and values {values.dtype}: expected one dtype")
  for name, x, others in (("q", q, ()), ("pools", keys, (jnp.int8,))):
    if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype not in others:
      raise ValueError(
        f"{name} of {x.dtype}: expected floats{', or int8 with scales' * bool(others)}"
      )
  if (keys.dtype == jnp.int8) != (scales is not None):
    given = "no scales" if scales is None else "scales"
    raise ValueError(
      f"pools of {keys.dtype} with {given}: expected scales with int8, and only then"
    )
  for scale in scales or ():
    if scale.shape != keys.shape[:1]:
      raise ValueError(f"scales {scale.shape} do not fit pools {keys.shape}: expected [N] of both")
    if scale.dtype != jnp.float32:
      raise ValueError(f"scales are {scale.dtype}: expected float32")


def product_dtype(q: jax.Array, keys: jax.Array):
  """What is multiplied: the dtype of the pools, or of q where they are int8."""
  return q.dtype if keys.dtype == jnp.int8 else keys.dtype


def slot_scales(scale: jax.Array, pages: jax.Array, slots: int) -> jax.Array:
  """f32[B, K, M, slots]: the scale f32[N] of the page of every slot, for pages i32[B, K, M]."""
  of_page = scale.at[pages].get(mode="clip")
  return jnp.broadcast_to(of_page[..., None], (*pages.shape, slots))
