"""Copies of pages on every path that a platform may take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_copies

N, C, D = 7, 8, 16


def _case(dtype):
  pool = jnp.arange(N * C * D, dtype=jnp.float32).reshape(N, C, D).astype(dtype)
  return pool, jnp.array([[[6, 0, 3], [3, 3, 10**6]]], jnp.int32)


@pytest.mark.parametrize("path", [page_copies.copies_of_pages, page_copies._as_they_are])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_copies_of_pages(path, dtype):
  pool, pages = _case(dtype)
  found = jax.jit(path)(pool, pages)
  assert found.dtype == pool.dtype
  np.testing.assert_array_equal(found, np.asarray(pool)[np.minimum(pages, N - 1)])


@pytest.mark.usefixtures("fully_optimized")
def test_a_cpu_copies_whole_pages():
  """What is gathered has C*D numbers innermost, also where C and D are asked for."""
  pool, pages = _case("float32")
  compiled = jax.jit(lambda *args: page_copies.copies_of_pages(*args) * 2).lower(pool, pages)
  hlo = compiled.compile().as_text()
  gathers = [line.split(" gather(")[0] for line in hlo.splitlines() if " gather(" in line]
  roots = [line.split(" fusion(")[0] for line in hlo.splitlines() if "gather" in line]
  assert gathers
  assert all(f",{C * D}]" in line for line in gathers)
  assert any(f",{C * D}]" in root for root in roots if "fusion" in root)
