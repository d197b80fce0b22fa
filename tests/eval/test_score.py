"""Scoring predictions alone: official files and our own, tables, and what is refused."""

from __future__ import annotations

import json

import pytest
from absl import flags

from eval import cli, score


def _write(folder, records):
  path = folder / "predictions.jsonl"
  lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  return path


def _longbench(pred, answers, length=10, **fields):
  return {"pred": pred, "answers": answers, "all_classes": None, "length": length} | fields


def _own(policy, pred, task="qasper", budget=64, **fields):
  answer = {"policy": policy, "store": "resident", "budget_tokens": budget, "task": task}
  answer |= {"id": pred, "page_size": 16, "score": 0.0, "stopped": True, "prompt_tokens": 1}
  answer |= {"output_tokens": 1, "ttft_s": None, "step_s": [], "batch": pred}
  return answer | _longbench(pred, ["Oslo"]) | fields


def _leval(pred, gt, evaluation="exam", name="my-model_pred"):
  return {"query": "q", "gt": gt, "prompt": "p", name: pred, "evaluation": evaluation}


def _run(monkeypatch, capsys, *arguments):
  """Exit code, standard output, standard error of the command in this process."""
  values = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", values)
  flags.DEFINE_enum("suite", "longbench", ["longbench", "leval"], "", flag_values=values)
  for name in ("task", "predictions", "out_dir"):
    flags.DEFINE_string(name, None, "", flag_values=values)
  values(["score", *arguments])
  code = cli._guarded(lambda _: score.main(values), [])
  return code, *capsys.readouterr()


def test_longbench(tmp_path):
  path = _write(tmp_path, [_longbench("Oslo", ["Oslo", "x"]), _longbench("Oslo city", ["Oslo"])])
  rows = score.score("longbench", "hotpotqa", path)
  assert rows == [{"task": "hotpotqa", "records": 2, "score": 83.33}]


def test_longbench_by_length(tmp_path):
  records = [_longbench("Oslo", ["Oslo"], 10), _longbench("Rome", ["Oslo"], 20)]
  path = _write(tmp_path, [*records, _longbench("Oslo", ["Oslo"], 9000)])
  row = score.score("longbench", "hotpotqa_e", path)[0]
  assert row["score"] == 66.67
  assert [row[name] for name in ("0-4k", "4-8k", "8k+")] == [50.0, None, 100.0]


def test_longbench_classes(tmp_path):
  path = _write(tmp_path, [_longbench("a b", ["b"], all_classes=["a", "b"])])
  assert score.score("longbench", "trec", path)[0]["score"] == 50.0
  with pytest.raises(ValueError, match="line 1: 'all_classes' is null, expected list"):
    score.score("longbench", "lsht", _write(tmp_path, [_longbench("a", ["a"])]))


def test_our_own_are_grouped(tmp_path):
  records = [_own("dense", "Oslo", budget=None), _own("quest", "Rome"), _own("quest", "Oslo")]
  path = _write(
    tmp_path, [*records, _own("quest", "Oslo", budget=128), _own("quest", "1", "lookup")]
  )
  rows = score.score("longbench", None, path)
  shown = [(row["policy"], row["budget_tokens"], row["records"], row["score"]) for row in rows]
  assert shown == [("dense", None, 1, 100.0), ("quest", 64, 2, 50.0), ("quest", 128, 1, 100.0)]
  assert {row["task"] for row in rows} == {"qasper"}
  for suite, task, missing in (("leval", None, "leval"), ("longbench", "qmsum", "qmsum")):
    with pytest.raises(ValueError, match=f"no predictions of {missing}; its tasks are lookup, qas"):
      score.score(suite, task, path)


def test_a_killed_run_is_scored_as_far_as_it_came(tmp_path):
  path = _write(tmp_path, [_own("quest", "Oslo"), _own("quest", "Oslo"), _own("quest", "Rome")])
  with path.open("a") as file:
    file.write('{"policy": "que')
  (row,) = score.score("longbench", None, path)
  assert (row["records"], row["score"]) == (2, 50.0)
  path = _write(tmp_path, [_own("quest", "Oslo"), "{"])
  with pytest.raises(ValueError, match="line 2: not JSON"):
    score.score("longbench", None, path)


@pytest.mark.parametrize("name", ["my-model_pred", "pred"])
def test_leval(tmp_path, name):
  records = [_leval("A. C.", "ACD", name=name), _leval("B", "B", name=name)]
  path = _write(tmp_path, [*records, _leval("B", "B", "LLM", name=name)])
  assert score.score("leval", "coursera", path) == [
    {"task": "coursera", "records": 2, "score": 62.5}
  ]


def test_leval_rouge_has_the_geometric_mean_of_means(tmp_path):
  records = [_leval("the cat sat", "the cat sat", "rouge"), _leval("a", "the cat sat", "rouge")]
  row = score.score("leval", "news_summ", _write(tmp_path, records))[0]
  assert row["rouge1"] == row["rouge2"] == row["rougeL"] == row["score"] == 50.0
  assert row["geometric_mean"] == 50.0


@pytest.mark.parametrize(
  ("suite", "task", "line", "message"),
  [
    ("longbench", "qasper", '{"pred": "a", "answ', "line 2 is not a whole JSON record"),
    ("longbench", "qasper", {"pred": "a"}, "line 2: the record has no 'answers'"),
    ("longbench", "passage_count_e", {"pred": "a", "answers": []}, "line 2: .*no 'length'"),
    ("longbench", "qaspr", {}, "unknown task 'qaspr'"),
    ("longbench", None, {}, "do not name their task; give --task"),
    ("longbench", "passage_retrieval_en", _longbench("1", ["1"]), "prediction 2 of passage_retri"),
  ],
)
def test_refusals(tmp_path, suite, task, line, message):
  path = _write(tmp_path, [_longbench("Paragraph 1", ["Paragraph 1"]), line])
  with pytest.raises(ValueError, match=message) as error:
    score.score(suite, task, path)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("suite", "task"), [("longbench", "qasper"), ("leval", "tpo"), ("leval", "news_summ")]
)
def test_nothing_to_compare_with(tmp_path, suite, task):
  path = _write(tmp_path, [_own("quest", "Oslo", task), _own("quest", "x", task, answers=[])])
  with pytest.raises(ValueError, match=f"prediction 2 of {task}: it has no answers, expected at"):
    score.score(suite, None, path)


def test_leval_refusals(tmp_path):
  with pytest.raises(ValueError, match=r"prediction 1 of sci_fi: .*no '.fact: "):
    score.score("leval", "sci_fi", _write(tmp_path, [_leval("True", "True [fact: True]")]))
  with pytest.raises(ValueError, match="no predictions whose evaluation is exam, f1, rouge"):
    score.score("leval", "tpo", _write(tmp_path, [_leval("A", "A", "human")]))
  with pytest.raises(ValueError, match="the record has no 'gt'"):
    score.score("leval", "tpo", _write(tmp_path, [{"x_pred": "A", "evaluation": "exam"}]))


def test_the_command(tmp_path, monkeypatch, capsys):
  path = _write(tmp_path, [_longbench("Oslo", ["Oslo"]), _longbench("Rome", ["Oslo"])])
  arguments = (f"--predictions={path}", "--task=hotpotqa", f"--out_dir={tmp_path / 'out'}")
  code, out, err = _run(monkeypatch, capsys, *arguments)
  assert code == 0 and not err
  assert out.splitlines()[0].split() == ["task", "records", "score"]
  assert out.splitlines()[2].split() == ["hotpotqa", "2", "50.00"]
  written = json.loads((tmp_path / "out" / "scores.json").read_text())
  assert written["scores"] == [{"task": "hotpotqa", "records": 2, "score": 50.0}]
  code, out, err = _run(monkeypatch, capsys, *arguments)
  assert code == 2 and not out and "already holds scores.json" in err
