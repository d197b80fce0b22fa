"""The batching engine: a fixed number of slots, each with a row of one cache, for `serving`.

Every step decodes the whole batch; rows without a request, or that sit the step out, write nothing,
move nothing, and stay as they are. What is compiled does not depend on who is there: after a first
request nothing compiles.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import KVCache
from kvjax.engine import steps
from kvjax.engine.generate import check_overflow, check_request, fill
from kvjax.engine.preparing import Runner
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Sampling
from kvjax.engine.serving import Made
from kvjax.engine.sharded import to_host
from kvjax.engine.slots import admit, empty_batch, release, with_batch
from kvjax.types import Params


class JaxBackend:
  """A model with a policy on a store, as `kvjax.engine.serving.Backend`.

  A slot holds prompt and new tokens up to the capacity of the cache. A request gets the tokens that
  `kvjax.generate` gives it alone, with the same sampling and seed. (Where rows share the device's
  blocks and see more than they selected, `op_block` without strict, what they see of it depends on
  their batch mates.) While a prompt is read nothing is decoded, and a cache for one row exists
  besides. The first request compiles, unless `warm_up` has done so.

  Attributes:
    cache: the state of the batch.

  Args:
    runner: from `prepare`; the batch size of its cache is the number of slots.
    params: weights of its model.
    sampling: how tokens are chosen.
    seed: of the sampling.

  Raises:
    ValueError: the runner is for several devices.
  """

  def __init__(
    self,
    runner: Runner,
    params: Params,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
  ):
    if runner.mesh is not None:
      raise ValueError("the batching engine runs on one device so far; prepare without a mesh")
    self.cache: KVCache = empty_batch(runner)
    self._runner, self._params, self._sampling = runner, params, sampling
    self._alone = with_batch(runner, 1)
    self._keys = {b: jnp.broadcast_to(jax.random.key(seed), b) for b in (1, self.slots)}

  @property
  def slots(self) -> int:
    """Rows of the cache."""
    return self._runner.decode_config.batch_size

  def warm_up(self) -> None:
    """Compiles all that requests need; before any has a slot."""
    self.start(0, Request(id=0, prompt=(0,), max_new_tokens=1))
    self.step({0: 0})
    self.stop(0)

  def why_not(self, request: Request) -> str | None:
    """Why the request is not for this model and cache."""
    try:
      check_request(self._alone, [request.prompt], request.max_new_tokens)
    except ValueError as error:
      return str(error)
    return None

  def fits(self, request: Request) -> bool:
    """A slot has room for every request that is not refused."""
    del request
    return True

  def start(self, slot: int, request: Request) -> Made:
    """Reads a prompt, chunk by chunk, and puts its row into the slot."""
    begin = time.perf_counter()
    last, one = fill(self._alone, self._params, [request.prompt])
    args = self._params, self.cache, one, last, self._keys[1], np.int32(slot)
    token, self.cache = admit(self._runner, self._sampling, *args)
    return self._made({slot: int(to_host(token)[0])}, begin)

  def step(self, tokens: Mapping[int, int]) -> Made:
    """One token of each slot that is named."""
    begin = time.perf_counter()
    newest, active = np.zeros(self.slots, np.int32), np.zeros(self.slots, bool)
    for slot, token in tokens.items():
      newest[slot], active[slot] = token, True
    args = self._params, self.cache, newest, self._keys[self.slots], active
    made, self.cache = steps.next_token(self._runner, self._sampling, *args)
    made = to_host(made)
    return self._made({slot: int(made[slot]) for slot in tokens}, begin)

  def stop(self, slot: int) -> None:
    """The row ends; what it held of the store's shared blocks is free."""
    self.cache = release(self._runner, self.cache, np.arange(self.slots) == slot)

  def reloading(self, slot: int) -> bool:
    """Never: what a step recalls it waits for itself."""
    del slot
    return False

  def _made(self, tokens: dict[int, int], begin: float) -> Made:
    lost = np.flatnonzero(to_host(self.cache.overflow))
    reasons = {}
    if lost.size:
      try:
        check_overflow(self._runner, self.cache)
      except RuntimeError as error:
        reasons = dict.fromkeys(lost.tolist(), str(error))
    return Made(tokens, time.perf_counter() - begin, reasons)
