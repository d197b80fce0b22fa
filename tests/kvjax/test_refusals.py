"""What is refused by the name of the policy, before anything is compiled."""

from __future__ import annotations

import dataclasses

import jax
import jax.monitoring
import pytest

from kvjax import POLICIES, STORES, CacheConfig, make_policy, prepare
from tests.kvjax import matrix

MODEL = matrix.tiny_model(matrix.SHAPES[0])[0]  # 3 layers, 2 KV heads
ONE_LAYER = matrix.tiny_model(matrix.SHAPES[0], 1)[0]
CACHE = CacheConfig(1, 160)
# One token, or page, under what each policy always attends to.
TOO_SMALL = {
  "arkvale": {"budget_tokens": 63, "sink_pages": 2, "window_pages": 2},
  "clusterkv": {"budget_tokens": 32, "sinks": 16},
  "duo": {"budget_tokens": 64, "sinks": 64},
  "flexicache": {"budget_tokens": 31, "period": 16},
  "flexicache_adaptive": {"budget_tokens": 79},
  "h2o": {"budget_tokens": 33, "recent": 32},
  "infinigen": {"budget_tokens": 1},
  "lserve": {"budget_tokens": 15, "page_size": 16},
  "morphkv": {"budget_tokens": 33, "window": 32},
  "omnikv": {"budget_tokens": 31, "selector": "uniform", "window": 16},
  "pyramidkv": {"budget_tokens": 32, "window": 32},
  "quest": {"budget_tokens": 15},
  "snapkv": {"budget_tokens": 32, "window": 32},
  "streaming": {"budget_tokens": 16, "sinks": 16},
  "tova": {"budget_tokens": 1},
}


@pytest.fixture(autouse=True)
def compiled():
  """What was compiled in this test, which must be nothing when it ends."""
  events: list[str] = []

  def listen(event: str, *_, **__) -> None:
    if "backend_compile" in event:
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield events
  jax.monitoring.unregister_event_duration_listener(listen)
  assert not events


def test_what_is_compiled_is_seen(compiled):
  jax.jit(lambda x: x * 3)(jax.numpy.ones(7))
  assert compiled
  compiled.clear()


def _refused(call, policy, message):
  with pytest.raises(ValueError, match=message) as caught:
    call()
  assert policy in str(caught.value) and "\n" not in str(caught.value)


def test_every_policy_with_a_budget_is_here():
  assert set(TOO_SMALL) == set(POLICIES) - {"dense"}


@pytest.mark.parametrize("policy", TOO_SMALL)
def test_a_budget_smaller_than_the_protected_tokens(policy):
  _refused(lambda: make_policy(policy, **TOO_SMALL[policy]), policy, "budget")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropping_policy_on_a_recalling_store(policy):
  made = make_policy(policy)
  for store in set(STORES) - set(made.stores):
    _refused(lambda store=store: prepare(MODEL, made, store, CACHE), policy, "cannot run on store")
  recalling = set(STORES) - {"compact"}
  if policy == "streaming":
    assert set(made.stores) == {"compact", "resident"}
  elif made.keep is not None:
    assert made.stores == ("compact",)
  else:
    assert made.stores[0] == "resident" and set(made.stores) <= recalling


def test_a_policy_that_looks_ahead_on_one_layer():
  made = make_policy("infinigen")
  _refused(lambda: prepare(ONE_LAYER, made, "resident", CACHE), "infinigen", "one layer ahead")


@pytest.mark.parametrize(
  ("policy", "options", "message"),
  [
    ("arkvale", {"lists": 3}, "3 lists do not divide the 2 KV heads"),
    ("duo", {"full_heads": ((0, 2),)}, "KV head 2 of layer 0"),
    ("flexicache", {"unstable_heads": ((0, 2),)}, "KV head 2 of layer 0"),
    (
      "lserve",
      {"streaming_heads": ((3, 0),), "budget_tokens": 1024, "page_size": 16},
      "KV head 0 of layer 3",
    ),
  ],
)
def test_heads_that_do_not_divide_or_are_not_there(policy, options, message):
  made = make_policy(policy, **options)
  _refused(lambda: prepare(MODEL, made, made.stores[0], CACHE), policy, message)


@pytest.mark.parametrize("policy", [name for name in POLICIES if make_policy(name).joins_heads])
def test_heads_that_may_not_be_split(policy):
  made, mesh = make_policy(policy), jax.sharding.AbstractMesh((1, 2), ("data", "model"))
  _refused(
    lambda: prepare(MODEL, made, made.stores[0], CACHE, mesh=mesh), policy, "joins the heads"
  )


def test_heads_of_a_model_that_do_not_divide():
  with pytest.raises(ValueError, match="num_heads 9 is not a multiple of num_kv_heads 2"):
    dataclasses.replace(MODEL.config, num_heads=9)
