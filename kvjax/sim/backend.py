"""A backend that computes nothing: it says how long a model would take on a machine.

    backend = SimBackend(config, machine("a800"), slots=16, histories=store.where)
    for finished in serve(requests(workload, config.max_tokens), backend, VirtualClock()):
      ...

What it says is simulated; so is whatever comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvjax.config import ModelConfig
from kvjax.engine.requests import Request
from kvjax.engine.serving import Made, Skipped
from kvjax.sim import costs
from kvjax.sim.engine_costs import EngineCosts
from kvjax.sim.hardware import Machine

NO_TOKEN = -1  # what a simulated model says; no stop token
_USABLE = 0.9  # of the device's memory, for weights, keys and values; the rest is work space


class History(NamedTuple):
  """What a conversation has before its next question.

  Attributes:
    tokens: in all.
    in_host_tokens: the first of them, whose keys and values are in host memory; the others must be
      read again.
  """

  tokens: int = 0
  in_host_tokens: int = 0


class SimBackend:
  """A model on a machine, in the time that `kvjax.sim.costs` gives it.

  Or on a real engine, in the seconds that were measured of it (`EngineCosts`).

  A request starts with what its conversation has: keys and values in host memory come over the
  link, one layer after another while those before them compute, and everything else is read with
  the prompt. Like a real backend's, a start has the device for itself. Keys and values are written
  back to the host on the other direction of the link, in no time. Of a conversation that is longer
  than the context the oldest tokens are left out.

  Args:
    config: the model's shape.
    machine: from `hardware`.
    slots: requests that are decoded at once.
    histories: user -> what the conversation has now; without it every prompt stands alone.
    as_activations: what the host keeps.
    engine: what starts and steps take; None for what the machine would.

  Attributes:
    reserved_tokens: that requests in slots may come to have, at most `room_tokens`.
    room_tokens: that the device has room for.
    context_tokens: of a conversation, at most.

  Raises:
    ValueError: the weights leave no room on the device, or there are no slots.
  """

  def __init__(
    self,
    config: ModelConfig,
    machine: Machine,
    slots: int,
    histories: Callable[[int], History] = lambda user: History(),
    *,
    as_activations: bool = False,
    engine: EngineCosts | None = None,
  ):
    numbers = config.num_layers * costs.layer_numbers(config) + costs.head_numbers(config)
    weights, device = numbers * machine.item_bytes, machine.device_bytes
    token = costs.kv_bytes(config, 1, machine.item_bytes)
    room_tokens = int((_USABLE * device - weights) // token)
    if slots < 1 or room_tokens < 1:
      raise ValueError(
        f"{slots} slots and {weights / 1e9:.1f} GB of weights on {machine.name} with "
        f"{device / 1e9:.1f} GB; expected a slot and room for keys and values"
      )
    self.room_tokens, self.context_tokens = room_tokens, min(config.max_tokens, room_tokens)
    self._config, self._machine, self._slots, self._histories = config, machine, slots, histories
    # A machine's step takes longer by the same with every token; the rest hangs on the rows.
    rows_s = [costs.decode_step_s(config, machine, [0] * n) for n in range(1, slots + 1)]
    many = 10**9
    self._token_s = (costs.decode_step_s(config, machine, [many]) - rows_s[0]) / many
    self._rows_s = [0.0, *rows_s]
    self._engine, self._as_activations = engine, as_activations
    self.reserved_tokens = 0
    self._reserved: dict[int, int] = {}  # slot -> tokens it may come to have
    self._skipped = 0  # steps that were skipped
    self._since = 0  # steps since the latest start or end
    self._tokens: dict[int, int] = {}  # slot -> tokens whose keys and values it has, less those
    self._attended = 0  # tokens of all slots, in truth

  @property
  def slots(self) -> int:
    """Requests that are decoded at once."""
    return self._slots

  def why_not(self, request: Request) -> str | None:
    """Why a request could not even be served without its history."""
    own = len(request.prompt) + request.max_new_tokens
    if own <= self.context_tokens:
      return None
    return f"{own} tokens of prompt and answer; a slot has at most {self.context_tokens}"

  def fits(self, request: Request) -> bool:
    """Whether the device has room for its history, prompt and whole answer beside the others'."""
    return self.reserved_tokens + self._needs(request) <= self.room_tokens

  def start(self, slot: int, request: Request) -> Made:
    """History and prompt are read; see the class for the time."""
    prompt, needs = len(request.prompt), self._needs(request)
    past = needs - prompt - request.max_new_tokens
    reloaded = min(past, self._histories(request.user).in_host_tokens)
    read = past - reloaded + prompt
    self._since, self._reserved[slot] = 0, needs
    self.reserved_tokens += needs
    self._tokens[slot] = past + prompt - self._skipped
    self._attended += past + prompt
    return Made({slot: NO_TOKEN}, self._start_s(reloaded, read))

  def step(self, tokens: Mapping[int, int]) -> Made:
    """One token of each slot that is named."""
    for slot in tokens:
      self._tokens[slot] += 1
    self._attended += len(tokens)
    since, self._since = self._since, self._since + 1
    if self._engine is not None:
      longest = max(self._tokens.values())
      seconds = self._engine.stepping_s(len(tokens), longest, since)
      return Made(dict.fromkeys(tokens, NO_TOKEN), seconds)
    attended = self._attended
    if len(tokens) < len(self._tokens):  # some sit out
      attended = sum(self._tokens[slot] + self._skipped for slot in tokens)
    return Made(dict.fromkeys(tokens, NO_TOKEN), self._step_s(len(tokens), attended))

  def skip(self, most_steps: int, within_s: float) -> Skipped:
    """Steps of all slots, each of which takes longer than the one before by the same.

    A measured engine makes one: in which time others pass, only its clock knows.
    """
    if self._engine is not None:
      return Skipped(1, NO_TOKEN, self.step(dict.fromkeys(self._tokens, NO_TOKEN)).seconds)
    rows = len(self._tokens)
    longer_s, first_s = rows * self._token_s, self._step_s(rows, self._attended + rows)

    def seconds(steps: int) -> float:
      return steps * first_s + steps * (steps - 1) / 2 * longer_s

    steps = most_steps
    if within_s <= first_s:
      steps = 1
    elif seconds(most_steps) > within_s:  # longer_s / 2 * steps^2 + rest * steps - within_s = 0
      rest = first_s - longer_s / 2
      steps = math.ceil(2 * within_s / (rest + math.sqrt(rest * rest + 2 * longer_s * within_s)))
      steps -= steps > 1 and seconds(steps - 1) >= within_s  # of rounding
      steps = min(steps + (seconds(steps) < within_s), most_steps)
    self._skipped += steps
    self._attended += steps * rows
    return Skipped(steps, NO_TOKEN, seconds(steps))

  def stop(self, slot: int) -> None:
    """The slot is free."""
    self._since = 0
    self.reserved_tokens -= self._reserved.pop(slot)
    self._attended -= self._tokens.pop(slot) + self._skipped

  def reloading(self, slot: int) -> bool:
    """Never: a start waits for what it reloads."""
    del slot
    return False

  def _needs(self, request: Request) -> int:
    own = len(request.prompt) + request.max_new_tokens
    return min(self._histories(request.user).tokens + own, self.context_tokens)

  def _step_s(self, rows: int, attended: int) -> float:
    return self._rows_s[rows] + attended * self._token_s

  def _start_s(self, reloaded: int, read: int) -> float:
    """On a machine two stages, link and compute, through which the layers go one after another."""
    if self._engine is not None:
      return self._engine.starting_s(reloaded, read)
    layers, item_bytes = self._config.num_layers, self._machine.item_bytes
    kept_bytes = costs.activation_bytes if self._as_activations else costs.kv_bytes
    num_bytes = kept_bytes(self._config, reloaded, item_bytes)
    link = costs.transfer_s(self._machine, num_bytes, parts=layers)
    compute = costs.prefill_s(self._config, self._machine, read, past_tokens=reloaded)
    if self._as_activations:
      compute += costs.rebuild_s(self._config, self._machine, reloaded)
    return max(link, compute) + min(link, compute) / layers
