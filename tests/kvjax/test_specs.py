"""Policies with their options in one word, as command lines name them."""

from __future__ import annotations

import pytest

from kvjax import CacheConfig, make_policy
from kvjax.policies import split_spec
from tests.kvjax import matrix

MODEL = matrix.tiny_model(matrix.SHAPES[0])[0]


def test_a_spec_is_a_name_and_texts():
  assert split_spec("quest") == ("quest", {})
  assert split_spec("quest:score=mean:candidates=4") == (
    "quest",
    {"score": "mean", "candidates": "4"},
  )
  assert split_spec("dir/own.py:path=a=b.npz") == ("dir/own.py", {"path": "a=b.npz"})


def test_the_options_of_a_spec_are_those_of_the_function():
  """Bytes show them: a mean has half the bytes of two bounds, a wider budget more pages."""
  spec = make_policy("snapkv:budget_tokens=40:window=8:new_tokens=16", page_size=16)
  same = make_policy("snapkv", budget_tokens=40, window=8, new_tokens=16, page_size=16)
  assert spec.budget_tokens == same.budget_tokens == 56
  assert spec.keeps is not None and same.keeps is not None
  assert spec.keeps(0, 3, 2, 160) == same.keeps(0, 3, 2, 160) == (56, 56)
  plan = make_policy("omnikv:filter_layers=(0,):wait_layers=0").register(MODEL.config, _cache())[0]
  assert plan.roles == ("dense", "select", "select")
  heads = make_policy("duo:full_heads=((0,1),(2,0))")
  assert heads.keeps is not None and heads.keeps(2, 3, 2, 400) == [400, 320]
  assert make_policy("infinigen:alpha=4").register(MODEL.config, _cache())[0].watched == (1,)


def test_its_name_is_the_spec_without_what_every_policy_has():
  assert make_policy("quest", budget_tokens=64).name == "quest"
  spec = "quest:score=outlier:candidates=4"
  assert make_policy(spec, budget_tokens=64, page_size=16).name == spec
  assert make_policy("quest:budget_tokens=64:score=mean:page_size=8").name == "quest:score=mean"
  assert make_policy("quest:budget_tokens=64").budget_tokens == 64


def test_a_file_takes_options_too(tmp_path):
  path = tmp_path / "own.py"
  path.write_text(
    "from kvjax.policies.quest import quest\n"
    "def own(budget_tokens=64, page_size=16, *, share=0.5, other: 'Unknown' = None):\n"
    "  made = quest(int(budget_tokens * share), page_size)\n"
    "  return made._replace(name='own')\n"
  )
  policy = make_policy(f"{path}:share=0.25", budget_tokens=256)
  assert policy.name == "own:share=0.25" and policy.budget_tokens == 64
  with pytest.raises(ValueError, match=r"own.py' has no option sher; it has budget_tokens"):
    make_policy(f"{path}:sher=0.25")


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("qest:score=mean", "unknown policy 'qest'; expected one of arkvale"),
    (
      "quest:scor=mean",
      "policy 'quest' has no option scor; it has budget_tokens, page_size, dense",
    ),
    ("quest:score", "policy 'quest:score': 'score' is no option; write quest:option=value"),
    ("quest:score=", "policy 'quest:score=': 'score=' is no option"),
    ("quest:", "policy 'quest:': '' is no option"),
    ("quest:=mean", "'=mean' is no option"),
    ("quest:group=max:group=none", "policy 'quest:group=max:group=none': option group comes twice"),
    ("quest:score=best", "policy 'quest:score=best': unknown score 'best'; expected one of minmax"),
    ("quest:score=3", "policy 'quest:score=3': unknown score '3'"),
    ("quest:candidates=many", "option candidates is 'many', expected int"),
    ("quest:candidates=2.5", "option candidates is '2.5', expected int"),
    ("quest:candidates=True", "option candidates is 'True', expected int"),
    ("quest:force_last=no", "option force_last is 'no', expected bool"),
    ("infinigen:alpha=high", "option alpha is 'high', expected float"),
    ("h2o:recent=few", r"option recent is 'few', expected int \| None"),
    (
      "omnikv:filter_layers=2",
      r"option filter_layers is '2', expected tuple\[int, \.\.\.\] \| None",
    ),
    ("omnikv:filter_layers=(2,'a')", "option filter_layers is"),
    ("duo:full_heads=(1,2)", "option full_heads is '\\(1,2\\)', expected"),
    ("duo:full_heads=((1,2,3),)", "option full_heads is"),
    ("duo:full_heads=abc", "option full_heads is 'abc'"),
    ("quest:page_size=two", "option page_size is 'two', expected int"),
    ("dense:page_size=two", "option page_size is 'two', expected int"),
    ("dense:score=mean", "policy 'dense' has no option score; it has none"),
    ("quest:budget_tokens=8", "policy 'quest:budget_tokens=8': budget_tokens 8 is under one page"),
  ],
)
def test_specs_that_are_refused(spec, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_policy(spec)
  assert "\n" not in str(caught.value)


def test_an_option_comes_from_one_place():
  with pytest.raises(ValueError, match="'quest:page_size=8': page_size is given apart from it too"):
    make_policy("quest:page_size=8", page_size=16)


def _cache():
  return CacheConfig(1, 64)
