"""kvpress' names for methods stand for ours, and no other names do."""

from __future__ import annotations

import pytest

from kvjax import POLICIES, make_policy
from kvjax.policies import KVPRESS, split_spec


@pytest.mark.parametrize(
  ("theirs", "ours"),
  [
    ("SnapKVPress", "snapkv"),
    ("PyramidKVPress", "pyramidkv"),
    ("TOVAPress", "tova"),
    ("StreamingLLMPress", "streaming"),
    ("streaming_llm", "streaming"),
    ("ObservedAttentionPress", "h2o"),
    ("observed_attention", "h2o"),
    ("DuoAttentionPress", "duo"),
    ("duo_attention", "duo"),
    ("no_press", "dense"),
    ("snapkv", "snapkv"),
  ],
)
def test_a_name_of_kvpress_is_our_policy(theirs, ours):
  policy = make_policy(theirs, budget_tokens=128, page_size=16)
  same = make_policy(ours, budget_tokens=128, page_size=16)
  fields = ("name", "stores", "asked_tokens", "budget_tokens", "joins_heads")
  assert [getattr(policy, one) for one in fields] == [getattr(same, one) for one in fields]
  assert policy.register.__qualname__ == same.register.__qualname__


def test_every_alias_is_of_a_policy_and_hides_none():
  assert set(KVPRESS.values()) <= set(POLICIES)
  assert not set(KVPRESS) & set(POLICIES)


def test_options_are_ours():
  assert split_spec("SnapKVPress:window=8") == ("snapkv", {"window": "8"})
  assert make_policy("streaming_llm:sinks=8", budget_tokens=64).name == "streaming:sinks=8"
  with pytest.raises(ValueError, match="policy 'snapkv' has no option window_size"):
    make_policy("SnapKVPress:window_size=8")


@pytest.mark.parametrize(
  "name", ["KnormPress", "expected_attention", "adakv_snapkv", "snapKVPress"]
)
def test_a_method_that_is_not_here_is_told_what_is(name):
  with pytest.raises(ValueError, match=f"unknown policy '{name}'; expected one of arkvale") as told:
    make_policy(name)
  message = str(told.value)
  assert "\n" not in message
  assert all(one in message for one in ("snapkv", "SnapKVPress", "observed_attention"))
