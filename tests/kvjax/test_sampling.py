"""From logits to tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Sampling, generate, make_policy, prepare
from kvjax.engine.sampling import sample
from tests.kvjax import matrix

LOGITS = jnp.log(jnp.array([0.05, 0.4, 0.3, 0.15, 0.1]))


def _draws(sampling, count=4000, logits=LOGITS):
  keys = jnp.broadcast_to(jax.random.key(0), (count,))
  batch = jnp.broadcast_to(logits, (count, len(logits)))
  tokens = sample(batch, sampling, keys, jnp.arange(count))
  assert tokens.dtype == jnp.int32
  return np.bincount(tokens, minlength=len(logits)) / count


def test_greedy_takes_the_first_of_the_best():
  logits = jnp.array([[0.0, 3.0, 3.0], [-1.0, -2.0, -5.0]])
  keys = jnp.broadcast_to(jax.random.key(0), (2,))
  assert sample(logits, Sampling(), keys, jnp.arange(2)).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
  expected = jax.nn.softmax(LOGITS / temperature)
  np.testing.assert_allclose(_draws(Sampling(temperature)), expected, atol=0.03)


@pytest.mark.parametrize(
  ("top_p", "kept"), [(1.0, 5), (0.96, 5), (0.9, 4), (0.69, 2), (0.41, 2), (0.39, 1), (1e-6, 1)]
)
def test_top_p_is_the_smallest_set_that_reaches_the_mass(top_p, kept):
  probabilities = np.array([0.05, 0.4, 0.3, 0.15, 0.1])
  best = np.argsort(-probabilities)[:kept]
  expected = np.where(np.isin(np.arange(5), best), probabilities, 0)
  np.testing.assert_allclose(_draws(Sampling(1.0, top_p)), expected / expected.sum(), atol=0.03)
  assert np.count_nonzero(_draws(Sampling(1.0, top_p))) == kept


def test_temperature_comes_before_top_p():
  """At temperature 0.25 the best token holds 0.72 of the mass and is enough for 0.7."""
  assert np.count_nonzero(_draws(Sampling(0.25, 0.7))) == 1
  assert np.count_nonzero(_draws(Sampling(1.0, 0.7 - 1e-3))) == 2


def test_a_row_says_the_same_whatever_its_batch_mates():
  model, params = matrix.tiny_model(matrix.SHAPES[0])
  policy, sampling = make_policy("quest", budget_tokens=32), Sampling(1.0, 0.95)
  prompts = matrix.tokens_of((70, 5, 33), seed=20)

  def said(rows, seed):
    runner = runners[len(rows)]
    return generate(runner, params, rows, max_new_tokens=12, sampling=sampling, seed=seed).tokens

  runners = {
    count: prepare(model, policy, "resident", CacheConfig(count, 128), chunk_tokens=64)
    for count in (1, 3)
  }
  together = said(prompts, 1)
  assert together == [said([prompt], 1)[0] for prompt in prompts]
  assert together == said(prompts[::-1], 1)[::-1]
  assert together != said(prompts, 2)


def test_an_answer_that_may_not_be_empty():
  """The most likely token is no first one; it is one again afterwards."""
  model, params = matrix.tiny_model(matrix.SHAPES[0])
  runner = prepare(model, make_policy("dense"), "resident", CacheConfig(1, 64), chunk_tokens=64)
  prompt = matrix.tokens_of([20])

  def said(prompts, **options):
    return generate(runner, params, prompts, max_new_tokens=2, **options).tokens[0]

  first, _ = said(prompt)
  other, then = said(prompt, sampling=Sampling(not_first=(first,)))
  assert other != first
  assert [other, then] == [other, said([[*prompt[0], other]])[0]]
  assert said(prompt, stop_ids=[first]) == []
  second = Sampling(not_first=(first, other))
  assert said(prompt, sampling=second, stop_ids=[first, other])[0] not in (first, other)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ((-0.1,), "temperature -0.1 must be finite and not negative; 0 is greedy decoding"),
    ((float("nan"),), "temperature nan must be finite and not negative; 0 is greedy decoding"),
    ((float("inf"),), "temperature inf must be finite and not negative; 0 is greedy decoding"),
    ((1.0, 0.0), "top_p 0.0 must be above 0 and at most 1"),
    ((1.0, 1.5), "top_p 1.5 must be above 0"),
  ],
)
def test_options_that_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    Sampling(*options)
