"""Conversations on a real model: a turn's row begins with what the turns before it have left.

    histories = Tiers(HistoryFiles(folder, stamp_of(runner, tokenizer_hash)))
    backend = ConversationBackend(runner, params, histories)
    placement = Placement(host_bytes, PreviousAnswer(host_bytes), histories.evict)
    queue = DualQueue(placement, histories)
    for finished in converse(turns, backend, WallClock(), queue):
      print(finished.request.user, finished.outcome, finished.ttft_s)

A turn is a `Request` whose user is its conversation and whose prompt is only what is new. When it
is done, its prompt and its answer, without the stop token, belong to the history; a turn that ends
otherwise leaves the history as it was. The last token of an answer has no keys and values, as no
step was given it; it is read with the next prompt, as is whatever the store has lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from kvjax.bidaw.conversations import Where
from kvjax.bidaw.objects import ACTIVATIONS, KEYS_VALUES, Stamp
from kvjax.bidaw.scheduler import DualQueue
from kvjax.bidaw.tiers import Tiers
from kvjax.engine.batching import JaxBackend
from kvjax.engine.clock import Clock
from kvjax.engine.continuing import check_continues
from kvjax.engine.kept import filled, keeps_activations, on_host, taken, zeros
from kvjax.engine.preparing import Runner
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.engine.sampling import Sampling
from kvjax.engine.serving import Made, serve
from kvjax.engine.sharded import to_host
from kvjax.engine.slots import admit
from kvjax.types import Params


def stamp_of(runner: Runner, tokenizer: str = "", tenant: str = "") -> Stamp:
  """The stamp of what a runner's rows have.

  Args:
    runner: whose model has a content hash, as `models.load` gives it.
    tokenizer: hash of what made the token ids.
    tenant: whose conversations.

  Raises:
    ValueError: it is not known which weights the model has.
  """
  config = runner.model.config
  if not config.content_hash:
    raise ValueError(
      "the model has no content_hash; load it with models.load, or give its config one"
    )
  if config.family == "opt":
    positions = "learned, keys without"
  else:
    positions = f"rotary {config.rope_theta} {config.rope_scaling}, keys turned at true positions"
  dtype, layers = runner.decode_config.dtype, config.num_layers
  shape, tensors = (layers, config.num_kv_heads, config.head_dim), KEYS_VALUES
  if keeps_activations(runner):
    shape, tensors = (layers, 1, config.embed_dim), ACTIVATIONS
  return Stamp(config.content_hash, tokenizer, positions, dtype, shape, tenant, tensors)


class _Row(NamedTuple):
  """A turn that has a slot.

  Attributes:
    request: the turn.
    tokens: ids of the row, grown in place: history, prompt, and what was fed since.
    first: position from which nothing is kept elsewhere.
  """

  request: Request
  tokens: list[int]
  first: int


class _Left(NamedTuple):
  """A turn that has left its slot, with what is kept of its new tokens."""

  row: _Row
  blocks: list[jax.Array]


class ConversationBackend(JaxBackend):
  """A `JaxBackend` whose requests are turns; see the module.

  Whoever drives it tells each request that has ended, by `ended`; until then no other turn of the
  same user is started, and one that is forced upon it is lost, with a reason.

  Args:
    runner: from `prepare`: policy dense on store resident; `keeping(dense)` for histories that are
      activations (`kvjax.engine.kept`).
    params: weights of its model.
    histories: what conversations have, of the runner's stamp.
    sampling: how tokens are chosen.
    seed: of the sampling.

  Raises:
    ValueError: rows of this runner cannot go on from what they had, or have another stamp.
  """

  def __init__(
    self,
    runner: Runner,
    params: Params,
    histories: Tiers,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    seed: int = 0,
  ):
    super().__init__(runner, params, sampling=sampling, seed=seed)
    check_continues(runner)
    stamp = histories.files.stamp
    expected = stamp_of(runner, stamp.tokenizer, stamp.tenant)
    if stamp != expected:
      raise ValueError(f"histories of {stamp} are not for this runner; it needs {expected}")
    self.histories = histories
    self._rows: dict[int, _Row] = {}  # by slot
    self._left: dict[int, _Left] = {}  # by user
    self._turns: dict[int, int] = {}  # user -> id of the request that was started

  def warm_up(self) -> None:
    """Compiles all that turns need; before any has a slot."""
    stamp = self.histories.files.stamp
    history = zeros(self._runner, stamp.token_shape, stamp.numpy_dtype)
    self._admit(0, [0] * (len(history) + 1), [history])
    self.step({})
    for block in taken(self._runner, self.cache, 0, 0, 1):
      block.block_until_ready()
    super().stop(0)

  def why_not(self, request: Request) -> str | None:
    """Why the turn is not for this model and cache, or does not fit behind its history."""
    return super().why_not(request) or self._too_long(request)

  def fits(self, request: Request) -> bool:
    """Whether no other turn of its user has begun and not ended."""
    return self._turns.get(request.user, request.id) == request.id

  def start(self, slot: int, request: Request) -> Made:
    """Puts the history's row into the slot, and reads what has no keys and values yet."""
    begin = time.perf_counter()
    if not self.fits(request):
      return self._refused(slot, f"another turn of user {request.user} has not ended")
    reason = self._too_long(request)
    if reason is not None:
      return self._refused(slot, reason)
    self._turns[request.user] = request.id
    self._left.pop(request.user, None)  # of the same turn, which was preempted
    history = self.histories.history(request.user)
    tokens = [*history.tokens.tolist(), *request.prompt]
    token = self._admit(slot, tokens, history.chunks)
    self._rows[slot] = _Row(request, tokens, history.kv_tokens)
    return self._made({slot: token}, begin)

  def step(self, tokens: Mapping[int, int]) -> Made:
    """One token of each slot that is named."""
    made = super().step(tokens)
    for slot, token in tokens.items():
      self._rows[slot].tokens.append(token)
    return made

  def stop(self, slot: int) -> None:
    """The row ends; what is new of it is on its way to the host, in case its turn is done."""
    row = self._rows.pop(slot, None)
    if row is not None:
      blocks = taken(self._runner, self.cache, slot, row.first, len(row.tokens))
      self._left[row.request.user] = _Left(row, blocks)
    super().stop(slot)

  def ended(self, finished: Finished) -> None:
    """A request has ended; if it is done, its turn is part of the history from now on."""
    request = finished.request
    if self._turns.get(request.user) != request.id:
      return
    del self._turns[request.user]
    row, blocks = self._left.pop(request.user)
    if finished.outcome is not Outcome.DONE:
      return
    new = len(row.request.prompt) + len(finished.tokens)
    known = len(self.histories.history(request.user).tokens)
    tokens = [*row.tokens[: known + len(request.prompt)], *finished.tokens]
    assert len(tokens) == known + new
    read = known + len(request.prompt) - row.first
    left = on_host(self._runner, blocks, len(row.tokens) - row.first, read)
    self.histories.end_turn(request.user, tokens, row.first, left)

  def _admit(self, slot: int, tokens, chunks) -> int:
    last, one = filled(self._alone, self._params, tokens, chunks)
    args = self._params, self.cache, one, last, self._keys[1], np.int32(slot)
    token, self.cache = admit(self._runner, self._sampling, *args)
    return int(to_host(token)[0])

  def _refused(self, slot: int, reason: str) -> Made:
    return Made({}, lost={slot: reason})

  def _too_long(self, request: Request) -> str | None:
    past, own = len(self.histories.history(request.user).tokens), len(request.prompt)
    total = past + own + request.max_new_tokens
    limit = min(self._runner.prefill_config.capacity_tokens, self._runner.model.config.max_tokens)
    if total <= limit:
      return None
    return (
      f"the conversation of user {request.user} has {past} tokens; with the {own} of this prompt "
      f"and {request.max_new_tokens} new ones that is {total}, and a slot holds {limit}; begin "
      "another conversation or ask for fewer"
    )


def converse(
  turns: Iterable[Request],
  backend: ConversationBackend,
  clock: Clock,
  queue: DualQueue[Request],
  *,
  queue_limit: int | None = None,
) -> Iterator[Finished]:
  """`kvjax.engine.serving.serve` for turns: histories come and go, and the disk is looked after.

  Args:
    turns: by arrival time.
    backend: computes.
    clock: tells the time; that of the wall, as the disk is real.
    queue: says who is next; its disk is the backend's histories, which its placement evicts from.
    queue_limit: most turns that may wait while no slot is free; None for any number.
  """
  for finished in serve(turns, backend, clock, queue, queue_limit=queue_limit):
    _end(finished, backend, queue)
    yield finished


def _end(finished: Finished, backend: ConversationBackend, queue: DualQueue[Request]) -> None:
  request, histories = finished.request, backend.histories
  backend.ended(finished)
  if finished.outcome is not Outcome.DONE:
    queue.gave_up(request, finished.ended_s)
    return
  size = histories.size_bytes(request.user)
  where = queue.ended(request, finished.ended_s, len(finished.tokens), size)
  if where is not Where.HOST:
    histories.evict(request.user)
