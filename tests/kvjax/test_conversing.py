"""Conversations on a model: what went to host memory, to disk or through a restart is as it was."""

from __future__ import annotations

import dataclasses
import logging
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, generate, make_policy, prepare
from kvjax.bidaw import DualQueue, Placement, Where, lru
from kvjax.bidaw.files import HistoryFiles, Kind, Piece
from kvjax.bidaw.tensor_cache import keeping
from kvjax.bidaw.tiers import Tiers
from kvjax.engine import steps
from kvjax.engine.clock import WallClock
from kvjax.engine.continuing import continue_chunk, fill_from, kv_of
from kvjax.engine.conversing import ConversationBackend, converse, stamp_of
from kvjax.engine.kept import filled
from kvjax.engine.requests import Outcome, Request
from kvjax.engine.sampling import Sampling
from kvjax.engine.serving import Server, serve
from kvjax.engine.slots import with_batch
from models import build
from tests.kvjax import matrix
from tests.kvjax.test_bidaw_files import Stalled, damage, full_disk
from tests.models import tiny

NEW, CAPACITY = 5, 320
FORMS = (("llama", False), ("opt", False), ("opt", True))  # family, whether activations are kept


@cache
def model_of(family: str):
  config = dataclasses.replace(
    tiny.FAMILIES[family], max_tokens=CAPACITY, vocab_size=160, content_hash=f"tiny {family}"
  )
  model = build(config)
  return model, model.init(jax.random.key(1), jnp.float32)


@cache
def runner_of(family: str, policy: str = "dense", *, slots=1, activations=False, **options):
  """One slot: that steps of one row and of two round alike is not what is asked here."""
  config, chosen = CacheConfig(slots, CAPACITY, matrix.PAGE), make_policy(policy, **options)
  chosen = keeping(chosen) if activations else chosen
  return prepare(model_of(family)[0], chosen, "resident", config, chunk_tokens=64)


class Stand:
  """A backend with its histories, which can be closed and opened again."""

  def __init__(self, folder, family="llama", **options):
    self.runner, self.params = runner_of(family, **options), model_of(family)[1]
    self.folder, self.ids = folder, 0
    self.open()

  def open(self):
    self.tiers = Tiers(HistoryFiles(self.folder, stamp_of(self.runner)))
    self.backend = ConversationBackend(self.runner, self.params, self.tiers)
    self.queue_anew()

  def queue_anew(self):
    """A placement that knows of nothing in host memory."""
    for user in list(self.tiers._host):
      self.tiers.evict(user)
    self.placement = Placement(1 << 30, lru(), self.tiers.evict)
    self.queue = DualQueue(self.placement, self.tiers)
    for user, size in self.tiers.found():
      self.placement.found(user, size)

  def restart(self):
    self.tiers.close()
    self.open()

  def turns(self, prompts, new=NEW):
    """prompts: (user, ids) of turns that arrive at once."""
    self.ids += len(prompts)
    first = self.ids - len(prompts)
    asked = [Request(first + i, tuple(p), new, user) for i, (user, p) in enumerate(prompts)]
    ended = converse(asked, self.backend, WallClock(), self.queue)
    return {finished.request.id - first: finished for finished in ended}


@pytest.fixture
def stand(tmp_path):
  made = []

  def make(*args, **options):
    made.append(Stand(tmp_path, *args, **options))
    return made[-1]

  yield make
  for each in made:
    each.tiers.close()


# Lengths at which histories end within chunks of 64, at their ends, and in a second segment.
PROMPTS = [matrix.tokens_of([n], seed=n)[0] for n in (7, 52, 60, 1, 100)]


@cache
def uninterrupted(family: str, activations: bool = False):
  """Answers of a row that has never left the device, and its keys and values.

  Each answer is also that of a generation that reads everything before it as one prompt.
  """
  one, params = runner_of(family, activations=activations), model_of(family)[1]
  key = jax.random.key(0)[None]
  answers, stream, held, state = [], [], 0, None
  for prompt in PROMPTS:
    stream += prompt
    if state is None:
      last, state = fill_from(one, params, stream, ())
    else:
      last = jnp.zeros((1, one.model.config.embed_dim))
      for start in range(held // 64 * 64, len(stream), 64):
        chunk = np.zeros((1, 64), np.int32)
        chunk[0, : len(stream[start : start + 64])] = stream[start : start + 64]
        counts = np.array([min(64, len(stream) - start)], np.int32)
        args = params, state, last, chunk, counts, np.int32(start), np.int32(held)
        last, state = continue_chunk(one, *args)
    token = steps.first_token(one, Sampling(), params, last, key, state.lengths)
    answers.append([int(token[0])])
    while len(answers[-1]) < NEW:
      token, state = steps.next_token(one, Sampling(), params, state, token, key, np.ones(1, bool))
      answers[-1].append(int(token[0]))
    whole = generate(one, params, [stream], max_new_tokens=NEW)
    assert answers[-1] == whole.tokens[0]
    stream += answers[-1]
    held = len(stream) - 1
  kv = np.concatenate(kv_of(one, state, 0, 0, held))[:held]
  return answers, stream, kv


def kv_in(served: Stand, tokens: np.ndarray, chunks) -> np.ndarray:
  """Keys and values f[n, L, 2, K, D] of a history, which a row begins with."""
  one, held = with_batch(served.runner, 1), sum(map(len, chunks))
  _, state = filled(one, served.params, tokens.tolist(), chunks)
  return np.concatenate(kv_of(one, state, 0, 0, held))[:held]


@pytest.mark.parametrize(("family", "activations"), FORMS)
def test_a_conversation_goes_on_as_if_it_had_never_left(family, activations, stand):
  answers, stream, kv = uninterrupted(family, activations)
  assert answers == uninterrupted(family)[0]
  served = stand(family, activations=activations)
  for turn, prompt in enumerate(PROMPTS):
    other = served.turns([(1, prompt[:3]), (7, prompt)])
    assert list(other[1].tokens) == answers[turn]
    if turn in (0, 3):
      served.queue_anew()  # to disk
    elif turn == 2:
      served.restart()
  history = served.tiers.history(7)
  assert history.tokens.tolist() == stream
  np.testing.assert_array_equal(kv_in(served, history.tokens, history.chunks), kv)
  assert not served.tiers.take_faults()
  stamp = served.tiers.files.stamp
  served.tiers.flush()
  on_disk = served.tiers.files.read(7, history.tokens)
  np.testing.assert_array_equal(np.concatenate(on_disk), np.concatenate(history.chunks))
  assert sum(chunk.nbytes for chunk in on_disk) == len(kv) * stamp.token_bytes
  config = served.runner.model.config
  numbers = config.num_layers * config.embed_dim + 2 if activations else kv[0].size
  assert stamp.token_bytes == 4 * numbers


def test_activations_of_turns_that_were_decoded_together(stand):
  """Prompts are read alone and answers made in steps of two rows: from disk, turn after turn, what
  is rebuilt of both has the bits of keys and values that were kept as such."""
  prompts, found = [PROMPTS[1], PROMPTS[0], PROMPTS[4]], []
  for activations in (False, True):
    served = stand("opt", slots=2, activations=activations)
    for prompt in prompts:
      ended = served.turns([(1, prompt[:9]), (7, prompt)])
      assert all(one.outcome is Outcome.DONE for one in ended.values())
      served.queue_anew()
    histories = {user: served.tiers.history(user) for user in (1, 7)}
    for user, history in histories.items():
      chunks = served.tiers.files.read(user, history.tokens)
      assert not history.chunks and len(chunks) == len(prompts)
      found.append((history.tokens, kv_in(served, history.tokens, chunks)))
  for (tokens, kv), (same_tokens, same_kv) in zip(found[:2], found[2:], strict=True):
    assert len(kv) == len(tokens) - 1
    np.testing.assert_array_equal(tokens, same_tokens)
    np.testing.assert_array_equal(kv, same_kv)


def first_turns(served: Stand, count: int) -> None:
  answers = uninterrupted("llama")[0]
  for turn in range(count):
    (ended,) = served.turns([(7, PROMPTS[turn])]).values()
    assert list(ended.tokens) == answers[turn]
  served.tiers.flush()


def objects(served: Stand):
  return sorted(served.folder.rglob("7/*"))


@pytest.mark.parametrize(
  "fault", ["flipped", "all gone", "stalled", "full", "full, then restarted"]
)
def test_what_the_disk_has_lost_is_computed_anew(fault, stand, monkeypatch):
  """Three turns, a fault, and the rest: the same answers, a record, and all on disk at the end."""
  served = stand()
  first_turns(served, 3)
  ends = [int(path.name[10:]) for path in objects(served)]
  served.queue_anew()
  if fault == "flipped":
    damage(objects(served)[1], "flip", -1)
  elif fault == "all gone":
    for path in objects(served):
      damage(path, "gone", 1)
  elif fault == "stalled":
    store = served.tiers.files._store
    monkeypatch.setattr(served.tiers.files, "_timeout_s", 0.05)
    monkeypatch.setattr(served.tiers.files, "_store", Stalled(store, Piece(0, ends[0]).name))
  answers, stream, _ = uninterrupted("llama")
  for turn in (3, 4):
    with full_disk(4096 if fault.startswith("full") and turn == 3 else 1 << 40):
      (ended,) = served.turns([(7, PROMPTS[turn])]).values()
      assert list(ended.tokens) == answers[turn]
      served.tiers.flush()
    if fault == "stalled" and turn == 3:
      monkeypatch.undo()
    if turn == 3:
      served.restart() if "restarted" in fault else served.queue_anew()
  kinds = {"stalled": Kind.TIMED_OUT, "full": Kind.UNWRITTEN}
  expected = {kinds.get(fault, Kind.DAMAGED)} if "restarted" not in fault else set()
  assert {f.kind for f in served.tiers.take_faults()} == expected
  served.restart()
  history = served.tiers.history(7)
  assert history.tokens.tolist() == stream
  assert served.tiers.files.end(7) == len(stream) - 1 and not served.tiers.take_faults()


def test_others_are_served_while_a_history_is_read(stand, monkeypatch):
  """The read ends only after another user has had the whole answer."""
  served = stand()
  first_turns(served, 1)
  served.queue_anew()
  store = served.tiers.files._store
  stalled = Stalled(store, objects(served)[0].name)
  monkeypatch.setattr(served.tiers.files, "_store", stalled)
  asked = [Request(50, tuple(PROMPTS[1]), NEW, user=7), Request(51, tuple(PROMPTS[0]), NEW)]
  ended = converse(asked, served.backend, WallClock(), served.queue)
  other = next(ended)
  assert other.request.id == 51 and served.placement.where(7) is Where.READING
  assert list(other.tokens) == uninterrupted("llama")[0][0]
  stalled.promises[0].set_result(store.read(f"7/{objects(served)[0].name}").result())
  (own,) = ended
  assert list(own.tokens) == uninterrupted("llama")[0][1] and not served.tiers.take_faults()


def test_two_turns_of_one_user_come_one_after_another(stand):
  answers = uninterrupted("llama")[0]
  served = stand()
  ended = served.turns([(7, PROMPTS[0]), (7, PROMPTS[1]), (1, PROMPTS[2])])
  assert [list(ended[turn].tokens) for turn in (0, 1)] == answers[:2]
  asked = [Request(i, tuple(PROMPTS[i]), NEW, user=8) for i in (0, 1)]
  got = {}
  for finished in serve(asked, served.backend, WallClock()):  # any scheduler does
    served.backend.ended(finished)
    got[finished.request.id] = list(finished.tokens)
  assert got == {0: answers[0], 1: answers[1]}
  served.backend.start(0, Request(5, (1,), 1, user=9))
  refused = served.backend.start(0, Request(6, (1,), 1, user=9))
  assert refused.lost == {0: "another turn of user 9 has not ended"}


def test_turns_that_are_preempted_or_cancelled(stand):
  answers = uninterrupted("llama")[0]
  served = stand()
  first_turns(served, 1)
  before = served.tiers.history(7)
  server = Server(served.backend, WallClock(), served.queue)
  for id, end in ((100, server.cancel), (101, server.preempt)):
    server.submit(Request(id, tuple(PROMPTS[1]), NEW, user=7))
    server.step()
    assert end(id)
    while server.busy:
      server.step()
    for finished in server.take_ended():
      served.backend.ended(finished)
      served.queue.gave_up(finished.request, finished.ended_s)
      history = served.tiers.history(7)
      if finished.outcome is Outcome.CANCELLED:
        assert history.tokens.tolist() == before.tokens.tolist()
        assert list(map(id_of, history.chunks)) == list(map(id_of, before.chunks))
  assert list(finished.tokens) == answers[1] and finished.preemptions == 1
  assert history.kv_tokens == len(history.tokens) - 1 == 12 + len(PROMPTS[1]) + NEW - 1


id_of = id


def test_a_conversation_that_outgrows_the_context(stand):
  served = stand()
  served.turns([(7, PROMPTS[4])], new=100)
  (ended,) = served.turns([(7, PROMPTS[4])], new=21).values()
  assert ended.outcome is Outcome.UNFIT
  assert ended.reason == (
    "the conversation of user 7 has 200 tokens; with the 100 of this prompt and 21 new ones that "
    "is 321, and a slot holds 320; begin another conversation or ask for fewer"
  )
  ended = served.turns([(7, PROMPTS[4]), (7, PROMPTS[0])], new=14)  # the first leaves too little
  assert [ended[turn].outcome for turn in (0, 1)] == [Outcome.DONE, Outcome.FAILED]
  assert "has 314 tokens" in ended[1].reason
  assert len(served.tiers.history(7).tokens) == 314


def test_what_cannot_go_on_is_refused(stand):
  served = stand()
  params = model_of("llama")[1]
  with pytest.raises(ValueError, match="are not for this runner; it needs"):
    ConversationBackend(runner_of("opt"), model_of("opt")[1], served.tiers)
  with pytest.raises(ValueError, match="policy 'quest' on store 'resident' keeps more of a row"):
    ConversationBackend(runner_of("llama", "quest", dense_layers=1), params, served.tiers)
  assert stamp_of(runner_of("opt", activations=True)) != stamp_of(runner_of("opt"))
  with pytest.raises(ValueError, match=r"activations are 64 numbers .* keys and values 64"):
    runner_of("llama", activations=True)
  nameless = build(dataclasses.replace(model_of("llama")[0].config, content_hash=""))
  with pytest.raises(ValueError, match="has no content_hash; load it with"):
    stamp_of(runner_of("llama")._replace(model=nameless))


@pytest.mark.parametrize(("family", "activations"), FORMS[::2])
def test_after_warming_up_nothing_compiles(family, activations, stand, caplog):
  served = stand(family, activations=activations)
  served.backend.warm_up()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    served.turns([(1, PROMPTS[2])])
    served.queue_anew()
    (ended,) = served.turns([(1, PROMPTS[4])]).values()
  assert ended.outcome is Outcome.DONE
  assert not [line for line in map(str, caplog.messages) if line.startswith("Compiling")]
