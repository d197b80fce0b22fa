"""Profiles of heads: ours and those in the format of the published ones, and whose they may be."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.profiling import Profile, heads_json, load_heads
from kvjax.profiling.head_stability import METHOD
from models import build
from tests.kvjax import matrix

LAYERS, K, G = 4, 2, 2
MODEL, PARAMS = matrix.known_model(matrix.Shape(K, G, 16), LAYERS)
ROWS = matrix.tokens_of((246,))
HASH = MODEL.config.content_hash
UNSTABLE = [[0, 1], [3, 0]]
BUDGET = {"budget_tokens": 64, "page_size": 16}
# The format of the authors' file, with heads of our own.
PUBLISHED = {
  "who/Big-8B": {
    "unstable-2-profile-gov_report-topk-4": [[0, 0], [3, 1]],
    "unstable-2-profile-paper_assistant-topk-4": [[1, 0], [3, 1]],
    "unstable-2-profile-gov_report-topk-8": [[2, 0], [3, 1]],
  },
  "what/Other-24B": {"unstable-1-profile-gov_report-topk-16": [[0, 0]]},
}


def _profile(**changes):
  settings = {"pages": 4, "page_size": 16, "shape": [LAYERS, K], "period": 16, "data": []}
  scores = np.linspace(0, 1, LAYERS * K).reshape(LAYERS, K)
  arrays = {"unstable_heads": np.array(UNSTABLE, np.int32), "instability": scores}
  return Profile(METHOD, "tiny", HASH, settings | changes, arrays)


@pytest.fixture
def ours(tmp_path):
  path = tmp_path / "heads.json"
  path.write_text(heads_json(_profile()), encoding="utf-8")
  return path


@pytest.fixture
def published(tmp_path):
  path = tmp_path / "sets.json"
  path.write_text(json.dumps(PUBLISHED), encoding="utf-8")
  return path


def _prepare(policy, **changes):
  model = build(dataclasses.replace(MODEL.config, **changes))
  return prepare(model, policy, "resident", CacheConfig(1, 400))


def _refused(call, message):
  with pytest.raises(ValueError, match=message) as caught:
    call()
  assert "\n" not in str(caught.value)


def test_a_profile_comes_back_as_it_was(ours):
  found = load_heads(ours, 4, 16)
  assert found._replace(arrays={}) == _profile()._replace(arrays={})
  for name, array in _profile().arrays.items():
    np.testing.assert_array_equal(found.arrays[name], array)
  assert ours.read_text().count("\n") < 40  # a layer's scores on one line


def test_flexicache_takes_a_profile_in_every_form(ours, published):
  """Each attends as the policy that is given these heads."""

  def attended(spec="flexicache", budget_tokens=64, **options):
    policy = make_policy(spec, budget_tokens=budget_tokens, page_size=16, **options)
    assert policy.joins_heads == (spec != "flexicache" or bool(options))
    seen = matrix.teacher_forced(_prepare(policy), PARAMS, ROWS, (240,)).attended
    return np.stack([seen[layer] for layer in range(LAYERS)])

  plain, given = attended(), attended(unstable_heads=UNSTABLE)
  assert {(layer, head // G) for layer, head in _differing(plain, given)} == {(0, 1), (3, 0)}
  np.testing.assert_array_equal(attended(f"flexicache:profile={ours}"), given)
  _prepare(make_policy("flexicache", profile=_profile(), **BUDGET))
  with pytest.warns(UserWarning, match="who/Big-8B, paper_assistant: .* cannot be checked"):
    theirs = attended(f"flexicache:profile={published}#Big-8B/paper_assistant")
  heads = {(layer, head // G) for layer, head in _differing(plain, theirs)}
  assert {layer for layer, _ in heads} == {1, 3} and (1, 0) in heads
  with pytest.warns(UserWarning, match="the number of heads fits this model"):
    _prepare(make_policy(f"flexicache:profile={published}", budget_tokens=128))  # the only one


def _differing(one, other):
  """(layer, query head) of bool[L, steps, B, H, T]."""
  return np.argwhere((one != other).any(axis=(1, 2, 4))).tolist()


def test_a_profile_of_something_else_is_refused(ours, published):
  spec = f"flexicache:profile={ours}"
  _refused(
    lambda: make_policy(spec, budget_tokens=128),
    r"option profile: the profile is one of 4 pages of 16 tokens, and the budget is 8 of 16; give "
    "budget_tokens 64 or make one with",
  )
  _refused(lambda: make_policy("flexicache", profile=_profile(pages=7), **BUDGET), "one of 7 pages")
  policy = make_policy(spec, **BUDGET)
  _refused(lambda: _prepare(policy, content_hash="cd" * 32), "'flexicache': .*the model has cdcdcd")
  _refused(lambda: _prepare(policy, content_hash=""), "the weights of this model are unknown")
  _refused(
    lambda: _prepare(make_policy("flexicache", profile=_profile(shape=[9, 2]), **BUDGET)),
    "of tiny is one of KV heads 9 layers of 2, and the model has 4 layers of 2",
  )
  theirs = make_policy(f"flexicache:profile={published}#Big-8B/gov_report", **BUDGET)
  _refused(lambda: _prepare(theirs, num_layers=8), "KV heads 8 in all, and the model has 8 layers")
  _refused(lambda: _prepare(theirs, num_layers=2, num_heads=4, num_kv_heads=4), "has 2 layers of 4")
  _refused(
    lambda: make_policy(f"flexicache:profile={published}", **BUDGET),
    r"sets.json# is 2 published sets of 4 pages of 16 tokens, expected one of 16; there are sets",
  )
  _refused(
    lambda: make_policy(f"flexicache:profile={published}#Big-8B/none", **BUDGET),
    "is 0 published sets of 4 pages .*sets.json#what/Other-24B/gov_report of 16 pages",
  )
  _refused(
    lambda: make_policy(spec, unstable_heads=((0, 0),), **BUDGET),
    "policy 'flexicache' takes a profile or unstable_heads, not both",
  )


@pytest.mark.parametrize(
  "content",
  [
    "text",
    "[]",
    "{}}",
    '{"method": "head_stability"}',
    '{"who/Big-8B": {"unstable-3-profile-a-topk-4": [[0, 0]]}}',
    '{"who/Big-8B": {"heads": [[0, 0]]}}',
    '{"who/Big-8B": {"unstable-1-profile-a-topk-4": [[0, 0, 0]]}}',
    heads_json(_profile()).replace('"page_size"', '"pages_size"'),
    heads_json(_profile()).replace('"unstable_heads": [', '"unstable_heads": [ 5,'),
  ],
)
def test_what_is_no_profile_of_heads(content, tmp_path):
  path = tmp_path / "other.json"
  path.write_text(content, encoding="utf-8")
  _refused(
    lambda: make_policy(f"flexicache:profile={path}", **BUDGET),
    "policy 'flexicache', option profile: .*other.json is no profile of heads; make one with",
  )
  _refused(lambda: load_heads(tmp_path / "none.json", 4, 16), "none.json is not a file; make one")
