"""Times of the tile sizes that kernels may be given; the best of them is marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.arg_specs import Shape, named, small
from pallas_kernels.mosaic import decode_attention, project_qkv_to_pages
from pallas_kernels.softmax import output
from scripts.gpu_checks import inputs
from scripts.gpu_checks.case import Case, Setting
from scripts.gpu_checks.timing import loops, seconds_of_trip

SECONDS = 50
ATTENTION = [{"splits": s, "stages": n} for s in (None, 1, 2, 4, 8) for n in (2, 3, 4)]
COLUMNS = [{"columns": n} for n in (16, 32, 64)]


def cases(setting: Setting) -> Iterator[Case]:
  """A kernel and a shape each; all its choices are tried."""
  for name in ("llama-3.1-8b",) if setting.interpret else ("llama-3.1-8b", "qwen2.5-7b"):
    shape = small(named(name)) if setting.interpret else named(name)
    for kernel, time in (("selected", _selected), ("dense", _dense)):
      yield Case(f"{kernel} {name}", partial(_best, ATTENTION, time, shape, setting))
    yield Case(f"project {name}", partial(_best, COLUMNS, _project, shape, setting))


def _best(choices, time: Callable, shape: Shape, setting: Setting):
  """Seconds of every choice, or why it does not run."""
  tried: dict[str, float | str] = {}
  made = inputs.make(shape, full=True)
  for choice in choices[:1] if setting.interpret else choices:
    name = " ".join(f"{key}={value}" for key, value in choice.items())
    try:
      choice = choice | {"interpret": setting.interpret}
      tried[name] = time(shape, made, choice, loops(setting, 16))
    except Exception as error:  # too much shared memory, most often; the others are tried
      tried[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
  times = {name: x for name, x in tried.items() if isinstance(x, float)}
  if not times:
    raise RuntimeError(f"none of the choices runs; of the first: {next(iter(tried.values()))}")
  best = min(times, key=times.__getitem__)
  return {"seconds": times[best], "best": best, "tried": tried}


def _selected(shape, made, choice, often):
  def attend(q, *fixed):
    return output(decode_attention.selected_parts(q, *fixed, **choice)).astype(q.dtype)

  fixed = made.keys, made.values, made.pages, made.mask
  return seconds_of_trip(attend, made.q + 0, *fixed, **often)


def _dense(shape, made, choice, often):
  def attend(q, *fixed):
    return output(decode_attention.paged_parts(q, *fixed, **choice)).astype(q.dtype)

  fixed = made.keys, made.values, made.table, made.lengths
  return seconds_of_trip(attend, made.q + 0, *fixed, **often)


def _project(shape, made, choice, often):
  e, width = shape.embed_dim, shape.kv_heads * shape.head_dim
  x = jnp.ones((shape.batch, e), shape.dtype)
  weights = tuple(jnp.ones((e, width), shape.dtype) for _ in range(2))
  pages = made.table[:, :, 0]

  def project(pools, x, weights):
    keys, values = pools
    args = (x, weights, (None, None), None, keys, values, pages, pages * 0)
    return project_qkv_to_pages.project_to_pages(*args, **choice)

  pools = jax.jit(lambda a, b: (a + 0, b + 0))(made.keys, made.values)
  return seconds_of_trip(project, pools, x, weights, **often)
