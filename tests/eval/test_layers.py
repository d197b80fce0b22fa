"""What plans say of the layers that select."""

from __future__ import annotations

import dataclasses

from eval import layers
from kvjax import CacheConfig, make_policy, prepare
from models import build
from tests.models import tiny


def _runner(num_layers, spec, budget_tokens=32):
  model = build(dataclasses.replace(tiny.CONFIG, num_layers=num_layers))
  policy = make_policy(spec, budget_tokens=budget_tokens, page_size=16)
  return prepare(model, policy, policy.stores[0], CacheConfig(1, 64, 16))


def test_a_run_that_is_dense_under_another_name_says_so():
  runner = _runner(2, "quest")
  assert layers.selecting(runner) == "0 of 2 layers select: this run is dense"
  assert layers.selecting(_runner(3, "quest")) == "1 of 3 layers select"


def test_one_line_for_all_policies():
  specs = [("dense", 32), ("quest", 32), ("quest", 48), ("quest:dense_layers=0", 32), ("h2o", 32)]
  line = layers.summary([_runner(2, *one) for one in specs])
  expected = ("quest: 0 of 2", "quest:dense_layers=0: 2 of 2", "h2o: 2 of 2")
  assert [part.partition(" layers")[0] for part in line.split("; ")] == [*expected]
  assert layers.summary([_runner(2, "dense")]) == ""
