"""FlexiCache on a machine as numbers: a backend of the serving loop that computes nothing.

A step costs what `kvjax.sim.costs` says: every head attends to its budget; page bounds are read of
unstable heads, and in every period-th step of a row of its stable ones too. What such a ranking
promotes comes over one link, one row after another, and is there for the row's next step. Until
then the row sits steps out and the others go on, as in the original; or the step waits for it
(`sits_out=False`), as it does in kvjax's own store. Between two prompts there is a step of those
that decode, as the original's token budget of a step leaves room for one prompt or two.

On the device a row has all pages of its unstable heads, the budget and a page of its stable ones,
and the bounds of all pages; while its prompt is read, all pages. What goes back to the host goes on
the other direction of the link, in no time. Dense attention is the same without any of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvjax.config import ModelConfig
from kvjax.engine.requests import Request
from kvjax.engine.serving import Made
from kvjax.sim import Machine, costs
from kvjax.sim.backend import NO_TOKEN

_USABLE = 0.9  # of the device's memory, for weights, keys and values; as `SimBackend`


class Tiers(NamedTuple):
  """What FlexiCache does.

  Attributes:
    budget_tokens: that a head attends to.
    page_size: C.
    fraction: of the heads that are unstable.
    period: steps between two rankings of the others.
    promoted_ratio: of a stable head's budget, what a ranking brings from the host.
    sits_out: a row whose pages are coming sits steps out; otherwise the step waits.
  """

  budget_tokens: int
  page_size: int
  fraction: float
  period: int
  promoted_ratio: float
  sits_out: bool = True


class _Row:
  """A request in a slot."""

  def __init__(self, tokens: int, device_bytes: float, host_bytes: float, now: float):
    self.tokens, self.steps = tokens, 0
    self.device_bytes, self.host_bytes = device_bytes, host_bytes
    self.made_s = now  # when it made its newest token
    self.ready_s = now  # when what its next step needs is there
    self.reloads = False


class TieredBackend:
  """A model whose keys and values lie in two tiers, or all on the device.

  Attributes:
    token_s: seconds between two tokens of a row, of all of them.
    reloaded_s: the same, of tokens whose step needed what the ranking before it promoted.
    reload_s: seconds from a ranking until what it promoted was there.
    steps: that were made.
    rows: in all of these steps together.

  Args:
    config: the model's shape.
    machine: from `kvjax.sim.hardware`.
    slots: requests that are decoded at once.
    tiers: what FlexiCache does; None for dense attention.

  Raises:
    ValueError: the weights leave no room on the device.
  """

  def __init__(self, config: ModelConfig, machine: Machine, slots: int, tiers: Tiers | None = None):
    numbers = config.num_layers * costs.layer_numbers(config) + costs.head_numbers(config)
    self._room_bytes = _USABLE * machine.device_bytes - numbers * machine.item_bytes
    if self._room_bytes <= 0:
      raise ValueError(
        f"{numbers * machine.item_bytes / 1e9:.1f} GB of weights leave no room on {machine.name} "
        f"with {machine.device_bytes / 1e9:.1f} GB"
      )
    self._config, self._machine, self._slots, self._tiers = config, machine, slots, tiers
    self._token_bytes = costs.kv_bytes(config, 1, machine.item_bytes)
    self._rows: dict[int, _Row] = {}
    self._now_s = self._link_free_s = 0.0
    self._read_one = False  # a prompt since the last step
    self.token_s: list[float] = []
    self.reloaded_s: list[float] = []
    self.reload_s: list[float] = []
    self.steps = self.rows = 0

  @property
  def slots(self) -> int:
    """Requests that are decoded at once."""
    return self._slots

  @property
  def device_bytes(self) -> float:
    """Of keys, values and bounds that requests in slots may come to have."""
    return sum(row.device_bytes for row in self._rows.values())

  @property
  def room_bytes(self) -> float:
    """At most that many."""
    return self._room_bytes

  def why_not(self, request: Request) -> str | None:
    """Why the request could not be served even alone."""
    tokens = len(request.prompt) + request.max_new_tokens
    if tokens > self._config.max_tokens or not self._has_room(request, 0, 0):
      return f"{tokens} tokens of prompt and answer, which {self._machine.name} has no room for"
    return None

  def fits(self, request: Request) -> bool:
    """Whether it is a prompt's turn, and both tiers have room for it and its whole answer."""
    if self._read_one and self._rows:
      return False
    host = sum(row.host_bytes for row in self._rows.values())
    return self._has_room(request, self.device_bytes, host)

  def start(self, slot: int, request: Request) -> Made:
    """Reads a prompt, which has the device for itself."""
    prompt = len(request.prompt)
    seconds = costs.prefill_s(self._config, self._machine, prompt)
    self._now_s += seconds
    sizes = self._sizes(prompt + request.max_new_tokens)
    self._rows[slot], self._read_one = _Row(prompt, *sizes, self._now_s), True
    return Made({slot: NO_TOKEN}, seconds)

  def step(self, tokens: Mapping[int, int]) -> Made:
    """One token of each slot that is named, once all that they need is there."""
    rows, begun, self._read_one = [self._rows[slot] for slot in tokens], self._now_s, False
    self._now_s = max([self._now_s, *(row.ready_s for row in rows)])
    for row in rows:
      row.tokens += 1
      row.steps += 1
    attended, ranked = zip(*map(self._reads, rows), strict=True)
    self._now_s += costs.decode_step_s(
      self._config, self._machine, attended, ranked_bytes=sum(ranked)
    )
    self.steps, self.rows = self.steps + 1, self.rows + len(rows)
    for row in rows:
      self._made(row)
    return Made(dict.fromkeys(tokens, NO_TOKEN), self._now_s - begun)

  def stop(self, slot: int) -> None:
    """The slot is free; what is on its way for it has the link until it has come."""
    del self._rows[slot]

  def reloading(self, slot: int) -> bool:
    """What the slot's next step needs is still on its way, and the others need not wait for it."""
    sits_out = self._tiers is not None and self._tiers.sits_out
    return sits_out and self._rows[slot].ready_s > self._now_s

  def _has_room(self, request: Request, device_bytes: float, host_bytes: float) -> bool:
    prompt = len(request.prompt)
    device, host = self._sizes(prompt + request.max_new_tokens)
    first = prompt * self._token_bytes  # until the first ranking all of it is on the device
    return (
      device_bytes + max(device, first) <= self._room_bytes
      and host_bytes + host <= self._machine.host_bytes
    )

  def _sizes(self, tokens: int) -> tuple[float, float]:
    """Bytes on the device and on the host of a row of so many tokens."""
    tiers, whole = self._tiers, tokens * self._token_bytes
    if tiers is None:
      return whole, 0
    stable, kept = 1 - tiers.fraction, min(tokens, tiers.budget_tokens + tiers.page_size)
    resident = tiers.fraction * whole + stable * kept * self._token_bytes
    return resident + self._bounds(tokens), stable * whole

  def _bounds(self, tokens: int) -> float:
    """Bytes of the bounds of all pages."""
    assert self._tiers is not None
    return -(-tokens // self._tiers.page_size) * self._token_bytes

  def _reads(self, row: _Row) -> tuple[int, float]:
    """Tokens that a head of the row attends to in this step, and bytes that ranking reads."""
    if self._tiers is None or row.tokens <= self._tiers.budget_tokens:
      return row.tokens, 0
    share = 1 if self._ranks(row) or row.steps == 1 else self._tiers.fraction
    return self._tiers.budget_tokens, share * self._bounds(row.tokens)

  def _ranks(self, row: _Row) -> bool:
    """Whether stable heads are ranked in this step, so that something may be promoted."""
    tiers = self._tiers
    return tiers is not None and row.tokens > tiers.budget_tokens and row.steps % tiers.period == 0

  def _made(self, row: _Row) -> None:
    """The row has its token; what its ranking promotes begins to come."""
    self.token_s.append(self._now_s - row.made_s)
    if row.reloads:
      self.reloaded_s.append(self.token_s[-1])
    row.made_s, row.reloads = self._now_s, self._ranks(row)
    tiers = self._tiers
    if not row.reloads or tiers is None:
      return
    share = tiers.promoted_ratio * (1 - tiers.fraction)
    num_bytes = share * tiers.budget_tokens * self._token_bytes
    begin = max(self._now_s, self._link_free_s)
    row.ready_s = self._link_free_s = begin + costs.transfer_s(self._machine, num_bytes)
    self.reload_s.append(row.ready_s - self._now_s)
