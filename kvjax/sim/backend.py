"""A backend that computes nothing: it says how long a model would take on a machine.

    backend = SimBackend(config, machine("a800"), slots=16, histories=store.where)
    for finished in serve(requests(workload, config.max_tokens), backend, VirtualClock()):
      ...

What it says is simulated; so is whatever comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvjax.config import ModelConfig
from kvjax.engine.requests import Request
from kvjax.engine.serving import Made
from kvjax.sim import costs
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

  Raises:
    ValueError: the weights leave no room on the device, or there are no slots.
  """

  def __init__(
    self,
    config: ModelConfig,
    machine: Machine,
    slots: int,
    histories: Callable[[int], History] = lambda user: History(),
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
    # A step's time grows by the same with every token; the rest hangs on the number of rows.
    rows = range(1, slots + 1)
    self._rows_s = [0.0, *(costs.decode_step_s(config, machine, [0] * n) for n in rows)]
    many = 10**9
    self._token_s = (costs.decode_step_s(config, machine, [many]) - self._rows_s[1]) / many
    self._reserved: dict[int, int] = {}  # slot -> tokens it may come to have
    self._tokens: dict[int, int] = {}  # slot -> tokens whose keys and values it has

  @property
  def slots(self) -> int:
    """Requests that are decoded at once."""
    return self._slots

  @property
  def reserved_tokens(self) -> int:
    """That requests in slots may come to have, at most `room_tokens`."""
    return sum(self._reserved.values())

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
    prompt = len(request.prompt)
    self._reserved[slot] = self._needs(request)
    past = self._reserved[slot] - prompt - request.max_new_tokens
    reloaded = min(past, self._histories(request.user).in_host_tokens)
    read = past - reloaded + prompt
    self._tokens[slot] = past + prompt
    return Made({slot: NO_TOKEN}, self._start_s(reloaded, read))

  def step(self, tokens: Mapping[int, int]) -> Made:
    """One token of each slot that is named."""
    attended = 0
    for slot in tokens:
      self._tokens[slot] += 1
      attended += self._tokens[slot]
    seconds = self._rows_s[len(tokens)] + attended * self._token_s
    return Made(dict.fromkeys(tokens, NO_TOKEN), seconds)

  def stop(self, slot: int) -> None:
    """The slot is free."""
    del self._reserved[slot], self._tokens[slot]

  def reloading(self, slot: int) -> bool:
    """Never: a start waits for what it reloads."""
    del slot
    return False

  def _needs(self, request: Request) -> int:
    own = len(request.prompt) + request.max_new_tokens
    return min(self._histories(request.user).tokens + own, self.context_tokens)

  def _start_s(self, reloaded: int, read: int) -> float:
    """Two stages, link and compute, through which the layers go one after another."""
    layers, item_bytes = self._config.num_layers, self._machine.item_bytes
    num_bytes = costs.kv_bytes(self._config, reloaded, item_bytes)
    link = costs.transfer_s(self._machine, num_bytes, parts=layers)
    compute = costs.prefill_s(self._config, self._machine, read, past_tokens=reloaded)
    return max(link, compute) + min(link, compute) / layers
