"""Pages between a pool in host memory and one on the device, both ways, and only those named.

A host pool is an array of type `<host>`, as `jax.device_put(x, jax.memory.Space.Host)` makes inside
jit. Keys and values move by the same ids, so the pools of a call are a tuple. Pools of pages
f[N, C, D] move single tokens after `pool.reshape(N * C, 1, D)`, which copies nothing.

**Order within a step.** XLA copies a whole pool that is written after it was read, unless it sees
that the read comes first: because what is written depends on what was read, or by a barrier. So in
each layer write the host pool first (`offload_pages`, or `.at[ids].set`), recall from what that
gave, and attend to what that gave: the next layer's tokens depend on it. Where what is recalled
must be what was there before, put a barrier after every read:

    device = recall_pages(host, device, source, target, count)
    device, host = jax.lax.optimization_barrier((device, host))
    host = offload_pages(...)
    out, device = jax.lax.optimization_barrier((attend(q, device), device))

A slice of a pool that is written later needs the barrier always: XLA moves slices to where they are
used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels.dispatch import choose
from pallas_kernels.mosaic import move_pages as mosaic
from pallas_kernels.page_ids import check_moves

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
Pools = tuple[jax.Array, ...]


def recall_pages(
  host: Pools,
  device: Pools,
  source: jax.Array,
  target: jax.Array,
  count: jax.Array,
  *,
  implementation: str | None = None,
  interpret: bool = False,
) -> Pools:
  """The device pools with page target[i] replaced by page source[i] of the host pools, i < count.

  Fewer pages cost less. With Mosaic it is one launch for each pool, whose programs read pinned
  memory themselves and return at once where there is nothing to do; it runs on a stream of its own
  beside what does not depend on it. XLA runs a loop: on a CPU that is the fastest form found; on a
  GPU (an older one, or where it is asked for) every step is some launches and a question of the
  host, so that it is a fallback only.

  Args:
    host: f[Nh, C, D] each, in host memory.
    device: f[Nd, C, D] each, of the same number, C, D and dtype; donate them, and they are written
      in place.
    source: i32[R], pages of the host pools.
    target: i32[R], pages of the device pools, distinct.
    count: i32[], pairs that count, all R if it is more. The others may hold any ids; those that
      count must be in range. Traced ids cannot be checked: of one that is not, Mosaic's kernel
      leaves the pair out, and XLA's loop moves the nearest page.
    implementation: "xla" or "mosaic"; None for Mosaic where it can run, else XLA.
    interpret: run Mosaic's kernel on a CPU, where the host pools must be on the device too.

  Raises:
    ValueError: pools, ids or an implementation that do not fit.
  """
  check_moves("recall_pages", host, device, source, target, count)
  refusals = {"xla": None, "mosaic": mosaic.why_not(device[0])}
  chosen = choose("recall_pages", implementation, refusals, interpret=interpret)
  if source.shape[0] == 0:
    return tuple(device)
  if chosen == "mosaic":
    if interpret:
      return mosaic.move_pages(host, device, source, target, count, interpret=True)
    return _beside(host, device, source, target, count)
  return _by_loop(host, device, source, target, count, DEVICE)


def _beside(host, device, source, target, count):
  """By Mosaic, on a stream of a GPU that other kernels do not wait for.

  XLA makes a call with this annotation two instructions, begin and end, and puts between them what
  does not depend on it. Its results must not be several: XLA would take the tuple apart on that
  stream too, and wait there. So keys and values have a launch each.
  """
  with set_xla_metadata(_xla_stream_annotation="1", inlineable="false"):
    return tuple(
      _move_pages(old, new, source, target, count) for old, new in zip(host, device, strict=True)
    )


@jax.jit
def _move_pages(host, device, source, target, count):
  return mosaic.move_pages((host,), (device,), source, target, count)[0]


def offload_pages(
  device: Pools, host: Pools, source: jax.Array, target: jax.Array, count: jax.Array
) -> Pools:
  """The host pools with page target[i] replaced by page source[i] of the device pools, i < count.

  The way back of `recall_pages`, with the same arguments; donate the host pools. There is no kernel
  of our own: on a GPU XLA makes one that gathers from the device and writes pinned memory in place.
  New tokens f[B, K, D] are offloaded as pools f[B * K, 1, D].

  Raises:
    ValueError: pools or ids that do not fit.
  """
  check_moves("offload_pages", device, host, source, target, count)
  if source.shape[0] == 0:
    return tuple(host)
  args = (device, host, source, target, count)
  return lax.platform_dependent(*args, cpu=_offload_by_loop, default=_offload_by_scatter)


def _offload_by_loop(device, host, source, target, count):
  return _by_loop(device, host, source, target, count, HOST)


def _by_loop(origin, into, source, target, count, space):
  """A page a step.

  On a CPU (two cores, two pools of f32, us for 0, 64, 512 and 2,048 pages) this took 12, 43, 575
  and 2,113 for pages of 4 KiB and 12, 14, 63 and 766 for tokens of 256 bytes, before `_kept`. Steps
  of one gather of 8 to 256 pages took 1.6 to 10 times as long, and for tokens 0.8 to 8 times; a
  `lax.switch` of gathers of 64 to 2,048 pages took 1.6 to 7 times and 1 to 8 times as long.
  """

  source, target = (
    jnp.clip(ids, 0, pools[0].shape[0] - 1) for ids, pools in ((source, origin), (target, into))
  )
  count = jnp.minimum(count, source.shape[0])
  nothing = jnp.minimum(count, 0)  # where a step runs at all; XLA cannot know

  def move(i, into):
    return tuple(
      _moved(old, pool, source[i], target[i], nothing, space)
      for old, pool in zip(origin, into, strict=True)
    )

  return lax.fori_loop(0, count, move, into)


def _moved(old, pool, source, target, nothing, space):
  page = jax.device_put(lax.dynamic_slice_in_dim(old, source, 1), space)
  return lax.dynamic_update_slice_in_dim(pool, _kept(page, nothing), target, axis=0)


def _kept(page, nothing):
  """The page as it is, by an operation that does nothing and makes its copy a loop of vectors.

  LLVM unrolls a loop of 64 loads and stores before it looks for vectors, and 64 single stores took
  480 ns a token (K and V of 64 f32, from 100 MB) where vectors take 190; of pages of 16 tokens it
  made 1.9 us where it makes 1.5 now.
  """
  bits = jnp.dtype(f"uint{8 * page.dtype.itemsize}")
  same = lax.bitcast_convert_type(page, bits) | nothing.astype(bits)
  return lax.bitcast_convert_type(same, page.dtype)


def _offload_by_scatter(device, host, source, target, count):
  place = jnp.where(jnp.arange(target.shape[0]) < count, target, host[0].shape[0])
  pages = [pool.at[source].get(mode="clip", wrap_negative_indices=False) for pool in device]
  how = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
  return tuple(pool.at[place].set(x, **how) for pool, x in zip(host, pages, strict=True))


def recall_pages_reference(host, device, source, target, count):
  """One page at a time, over pools that all lie on the device."""
  for i in range(min(int(count), source.shape[0])):
    device = [new.at[target[i]].set(old[source[i]]) for old, new in zip(host, device, strict=True)]
  return tuple(device)
