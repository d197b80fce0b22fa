"""Conversations on a model: what went to host memory, to disk or through a restart is as it was."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, generate, make_policy, prepare
from kvjax.bidaw import DualQueue, Placement, lru
from kvjax.bidaw.files import HistoryFiles
from kvjax.bidaw.tiers import Tiers
from kvjax.engine import steps
from kvjax.engine.clock import WallClock
from kvjax.engine.continuing import continue_chunk, fill_from, kv_of
from kvjax.engine.conversing import ConversationBackend, converse, stamp_of
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Sampling
from models import build
from tests.kvjax import matrix
from tests.models import tiny

NEW, CAPACITY = 5, 320
FAMILIES = ("llama", "opt")


@cache
def model_of(family: str):
  config = dataclasses.replace(
    tiny.FAMILIES[family], max_tokens=CAPACITY, vocab_size=160, content_hash=f"tiny {family}"
  )
  model = build(config)
  return model, model.init(jax.random.key(1), jnp.float32)


@cache
def runner_of(family: str, policy: str = "dense"):
  """One slot: that steps of one row and of two round alike is not what is asked here."""
  config = CacheConfig(1, CAPACITY, matrix.PAGE)
  return prepare(model_of(family)[0], make_policy(policy), "resident", config, chunk_tokens=64)


class Stand:
  """A backend with its histories, which can be closed and opened again."""

  def __init__(self, folder, family="llama", host_bytes=1 << 30):
    self.runner, self.params = runner_of(family), model_of(family)[1]
    self.folder, self.host_bytes, self.ids = folder, host_bytes, 0
    self.open()

  def open(self):
    self.tiers = Tiers(HistoryFiles(self.folder, stamp_of(self.runner)))
    self.backend = ConversationBackend(self.runner, self.params, self.tiers)
    self.queue_anew()

  def queue_anew(self):
    """A placement that knows of nothing in host memory."""
    for user in list(self.tiers._host):
      self.tiers.evict(user)
    self.placement = Placement(self.host_bytes, lru(), self.tiers.evict)
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


def uninterrupted(family: str):
  """Answers of a row that has never left the device, and its keys and values.

  Each answer is also that of a generation that reads everything before it as one prompt.
  """
  one, params = runner_of(family), model_of(family)[1]
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_as_if_it_had_never_left(family, stand):
  answers, stream, kv = uninterrupted(family)
  served = stand(family)
  for turn, prompt in enumerate(PROMPTS):
    other = served.turns([(1, prompt[:3]), (7, prompt)])
    assert list(other[1].tokens) == answers[turn]
    if turn in (0, 3):
      served.queue_anew()  # to disk
    elif turn == 2:
      served.restart()
  history = served.tiers.history(7)
  assert history.tokens.tolist() == stream
  np.testing.assert_array_equal(np.concatenate(history.chunks), kv)
  assert not served.tiers.take_faults()
  stamp = served.tiers.files.stamp
  on_disk = served.tiers.files.read(7, history.tokens)
  np.testing.assert_array_equal(np.concatenate(on_disk), kv)
  assert kv.nbytes == len(kv) * stamp.token_bytes
