"""The simulated backend against sums by hand, alone and under the serving loop."""

from __future__ import annotations

import dataclasses

import pytest

from kvjax.engine.clock import VirtualClock
from kvjax.engine.requests import Outcome, Request
from kvjax.engine.serving import serve
from kvjax.sim import MACHINES, costs, machine
from kvjax.sim.backend import NO_TOKEN, History, SimBackend
from kvjax.sim.engine_costs import EngineCosts, start_parts
from kvjax.sim.generator import INTERACTIVE, generate
from kvjax.sim.workloads import requests
from models import abstract
from tests.kvjax.test_sim import CONFIG, PLAIN

LAYERS, TOKEN_BYTES, WEIGHTS = 2, 256, 2 * 3072 + 1600


def _backend(slots=2, histories=lambda user: History(), room_tokens=1000, context=4096):
  """On a device that has room for so many tokens beside the weights, work space set aside."""
  device_bytes = (WEIGHTS * 4 + TOKEN_BYTES * (room_tokens + 0.5)) / 0.9
  config = dataclasses.replace(CONFIG, max_tokens=context)
  return SimBackend(config, PLAIN._replace(device_bytes=device_bytes), slots, histories)


def _request(prompt=10, new=5, user=0, number=0, arrival_s=0.0):
  return Request(number, (0,) * prompt, new, user=user, arrival_s=arrival_s)


@pytest.mark.parametrize("tokens", [0, 30, 300, 900])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_start_by_hand(tokens, share):
  """What is in host memory comes over the link at 0.1 MB/s, the rest is read with the prompt."""
  there = int(tokens * share)
  backend = _backend(histories=lambda user: History(tokens, there))
  made = backend.start(0, _request())
  link = 2 * 0.5 + there * TOKEN_BYTES / 1e5 if there else 0  # half a second to begin each layer
  compute = costs.prefill_s(CONFIG, PLAIN, 10 + tokens - there, past_tokens=there)
  # The second layer of the faster stage waits for the slower one, whose first it waited for.
  by_hand = {True: link + compute / LAYERS, False: compute + link / LAYERS}[link > compute]
  assert made.seconds == pytest.approx(by_hand)
  assert made.tokens == {0: NO_TOKEN} and not made.lost


def test_a_step_by_hand():
  """Every slot attends to its history, its prompt and what it has been given since."""
  backend = _backend(histories=lambda user: History(100 * user, 0))
  backend.start(0, _request(user=0))
  backend.start(1, _request(prompt=20, user=2))
  for lengths in ({0: 11, 1: 221}, {0: 12, 1: 222}):
    made = backend.step({0: NO_TOKEN, 1: NO_TOKEN})
    expected = costs.decode_step_s(CONFIG, PLAIN, list(lengths.values()))
    assert made.seconds == pytest.approx(expected) and made.tokens.keys() == lengths.keys()
  assert backend.step({1: NO_TOKEN}).seconds == pytest.approx(
    costs.decode_step_s(CONFIG, PLAIN, [223])
  )
  backend.stop(1)
  assert backend.step({0: NO_TOKEN}).seconds == pytest.approx(
    costs.decode_step_s(CONFIG, PLAIN, [13])
  )


ENGINE = EngineCosts(
  chunk_tokens=64,
  segments=(16, 16),
  start_s=1.0,
  chunk_s=0.5,
  restore_s=0.25,
  attend_s=0.125,
  step_s=2.0,
  row_s=0.125,
  token_s=0.0625,
  cold_s=4.0,
  store_s=8.0,
  lost_beside_read=0.0,
  wake_s=0.0,
)


@pytest.mark.parametrize(
  ("kept", "tokens", "parts"),
  [
    (0, 1, (1, 0, 0)),
    (0, 64, (1, 0, 0)),
    (0, 65, (2, 0, 1)),
    (63, 64, (1, 1, 0)),
    (64, 65, (1, 1, 1)),
    (130, 200, (2, 3, 2 + 3)),
  ],
)
def test_what_a_start_of_a_real_engine_does(kept, tokens, parts):
  """What is read begins at the chunk in which what is kept ends; each attends to all before it."""
  assert start_parts(64, kept, tokens) == parts


@pytest.mark.parametrize(
  ("past", "there", "prompt", "seconds"),
  [
    (0, 0, 10, 1.0 + 0.5),
    (65, 65, 10, 1.0 + 0.5 + 0.25 + 0.125),
    (131, 131, 62, 1.0 + 2 * 0.5 + 3 * 0.25 + 5 * 0.125),  # 130 of 193 are kept: chunks 2 and 3
    (131, 0, 10, 1.0 + 3 * 0.5 + (0 + 1 + 2) * 0.125),
  ],
)
def test_a_start_of_a_measured_engine(past, there, prompt, seconds):
  machine = PLAIN._replace(device_bytes=1e18)
  backend = SimBackend(CONFIG, machine, 2, lambda user: History(past, there), engine=ENGINE)
  made = backend.start(0, _request(prompt=prompt))
  assert made.seconds == pytest.approx(seconds)


def test_steps_of_a_measured_engine():
  """They read whole segments, as far as the longest row goes, and are cold after a start or end."""
  machine = PLAIN._replace(device_bytes=1e18)
  one, many = (SimBackend(CONFIG, machine, 2, engine=ENGINE) for _ in range(2))

  def both(rows: int, reached: int, cold_s: float) -> None:
    expected = 2.0 + rows * 0.125 + reached * 0.0625 + cold_s
    assert one.step(dict.fromkeys(range(rows), NO_TOKEN)).seconds == pytest.approx(expected)
    steps, _, seconds = many.skip(40, 1e9)  # one only, however much time there is
    assert (steps, seconds) == (1, pytest.approx(expected))

  for backend in (one, many):
    for slot, prompt in enumerate((9, 14)):
      backend.start(slot, _request(prompt=prompt, new=50))
  both(2, 16, 4.0)
  both(2, 16, 2.0)  # the longest row is full at the edge of a segment
  both(2, 32, 1.0)
  for backend in (one, many):
    backend.stop(1)
  both(1, 16, 4.0)  # the longer one has gone
  for backend in (one, many):
    backend.start(1, _request(prompt=9, new=50))
  both(2, 16, 4.0)


def test_room_is_for_history_prompt_and_answer():
  """1,000 tokens: 985 + 10 + 5 fill them; another conversation waits until that has ended."""
  sizes = {0: 985, 1: 0, 2: 986}
  backend = _backend(histories=lambda user: History(sizes[user], 0))
  assert backend.fits(_request(user=0))
  backend.start(0, _request(user=0))
  assert backend.reserved_tokens == 1000 and not backend.fits(_request(prompt=1, new=1, user=1))
  backend.stop(0)
  assert backend.reserved_tokens == 0 and backend.fits(_request(prompt=995, user=1))
  assert backend.why_not(_request(prompt=995)) is None
  assert backend.why_not(_request(prompt=996)) == (
    "1001 tokens of prompt and answer; a slot has at most 1000"
  )


@pytest.mark.parametrize(("room", "context"), [(1000, 200), (200, 4096)])
def test_a_conversation_longer_than_the_context_loses_its_oldest(room, context):
  backend = _backend(histories=lambda user: History(5000, 5000), room_tokens=room, context=context)
  shorter = _backend(histories=lambda user: History(185, 185))
  assert backend.context_tokens == 200 and backend.fits(_request())
  assert backend.start(0, _request()) == shorter.start(0, _request())
  assert backend.reserved_tokens == 200
  assert backend.step({0: NO_TOKEN}) == shorter.step({0: NO_TOKEN})


def test_a_device_without_room_is_refused():
  with pytest.raises(
    ValueError, match=r"^2 slots and 0\.0 GB of weights on plain with 0\.0 GB; ex"
  ):
    _backend(room_tokens=0)
  with pytest.raises(ValueError, match="0 slots"):
    _backend(slots=0)
  opt = abstract("random:opt-66b")[0].config
  with pytest.raises(
    ValueError, match=r"GB of weights on NVIDIA A800 .* with 80\.0 GB; expected a"
  ):
    SimBackend(opt, machine("a800"), 8)


def test_served_in_virtual_time():
  """Two slots of three requests: the third starts when the first has ended."""
  asked = [_request(number=n, new=new, user=n) for n, new in enumerate((3, 9, 4))]
  done = list(serve(asked, _backend(), VirtualClock()))
  assert [(one.request.id, len(one.tokens)) for one in done] == [(0, 3), (2, 4), (1, 9)]
  assert all(one.outcome is Outcome.DONE for one in done)
  read = costs.prefill_s(CONFIG, PLAIN, 10)
  steps = [costs.decode_step_s(CONFIG, PLAIN, [a, a]) for a in (11, 12)]
  assert done[0].ttft_s == pytest.approx(read)
  assert done[0].ended_s == pytest.approx(2 * read + sum(steps))
  assert done[1].started_s == done[0].ended_s


def test_never_more_than_the_device_holds():
  """Slots in plenty: memory says how many are decoded at once, and everybody is served."""
  sizes = {user: 13 * user for user in range(40)}
  backend = _backend(slots=40, histories=lambda user: History(sizes[user], 0))
  most = 0

  class Watched(VirtualClock):
    def spend(self, seconds):
      nonlocal most
      most = max(most, backend.reserved_tokens)
      super().spend(seconds)

  done = list(serve([_request(number=n, user=n) for n in range(40)], backend, Watched()))
  assert len(done) == 40 and all(one.outcome is Outcome.DONE for one in done)
  assert 900 < most <= backend.room_tokens and backend.reserved_tokens == 0


@pytest.mark.parametrize("name", MACHINES)
def test_histories_in_memory_answer_sooner(name):
  """OPT-13B and an hour's conversations: kept in memory, read again, or not had at all."""
  config = abstract("random:opt-13b")[0].config
  workload = generate(INTERACTIVE, users=20, users_per_minute=2, seed=0)
  one = machine(name)._replace(device_bytes=80e9)
  means = []
  for keeps in (None, 1, 0):
    sizes: dict[int, int] = {}

    def where(user, keeps=keeps, sizes=sizes):
      return History() if keeps is None else History(sizes.get(user, 0), keeps * sizes.get(user, 0))

    backend, waits = SimBackend(config, one, 16, where), []
    for done in serve(requests(workload, config.max_tokens), backend, VirtualClock()):
      user = done.request.user
      sizes[user] = sizes.get(user, 0) + len(done.request.prompt) + len(done.tokens)
      assert done.ttft_s is not None
      waits.append(done.ttft_s)
    means.append(sum(waits) / len(waits))
  assert len(waits) == len(workload)
  assert means[0] < means[1] < means[2]
