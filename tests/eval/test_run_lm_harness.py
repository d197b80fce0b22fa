"""eval.run_lm_harness: two tasks of our own under every policy, whole and cut short."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import pytest

from eval import run_lm_harness
from kvjax import make_policy
from models import load

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra lm_eval)")

from lm_eval.tasks import TaskManager

from eval import lm_batches
from eval.lm_harness import KvjaxLM
from tests.eval.lm_harness_model import TASKS, generate_texts, go_offline, one_pass, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """The path of a tiny model."""
  return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(model):
  return load(str(model))


@pytest.fixture(scope="module")
def dense(loaded):
  return KvjaxLM(loaded, batch_size=2)


@pytest.fixture
def offline(monkeypatch, tmp_path):
  go_offline(monkeypatch, tmp_path)


class Args:
  """Flags of the command."""

  def __init__(self, **values):
    self.__dict__ = {
      **{
        "policies": ["streaming", "dense"],
        "stores": [],
        "budget_tokens": ["32"],
        "page_size": 16,
      },
      **{"tasks": ["kvjax_choice", "kvjax_continue"], "include_path": str(TASKS), "limit": None},
      **{"num_fewshot": None, "batch_size": 2, "apply_chat_template": False},
      **values,
    }


def test_the_command_runs_the_tasks_under_every_policy(
  loaded, model, dense, tmp_path, offline, monkeypatch, capsys
):
  monkeypatch.setattr(run_lm_harness.cli, "flag_values", dict)
  run_lm_harness.main(Args(model=str(model), out_dir=str(tmp_path / "out")))
  lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
  rows = {(row["policy"], row["metric"]): row for row in map(json.loads, lines)}
  assert len(lines) == len(rows) == 6 and "kvjax_choice" in capsys.readouterr().out
  docs = [json.loads(line) for line in (TASKS / "choice.jsonl").read_text().splitlines()]
  right = 0
  for doc in docs:
    asked = f"Question: {doc['question']}\nAnswer:"
    sums = [one_pass(loaded, asked, f" {choice}")[0] for choice in doc["choices"]]
    right += int(np.argmax(sums)) == doc["answer"]
  row = rows["dense", "acc"]
  assert row["score"] == row["value"] == right / len(docs) and row["num_examples"] == len(docs)
  assert rows["streaming", "acc"]["dense_score"] == row["score"]
  assert rows["streaming", "acc"]["budget_tokens"] == 32 and row["decode_tokens_per_s"] > 0
  written = (tmp_path / "out" / rows["dense", "exact_match"]["samples"]).read_text().splitlines()
  samples = sorted(map(json.loads, written), key=lambda one: one["doc_id"])
  texts = [json.loads(line)["text"] for line in (TASKS / "continue.jsonl").read_text().splitlines()]
  assert [one["resps"][0][0] for one in samples] == generate_texts(dense, texts, max_gen_toks=8)


@functools.cache
def _policies():
  """Made once, so that what is compiled for them is found again."""
  both = make_policy("dense"), make_policy("streaming", budget_tokens=32)
  return [(made, made.stores[0]) for made in both]


@pytest.fixture
def run(loaded, model, tmp_path, offline, monkeypatch):
  """Runs the command, cut short at a batch if wanted; returns the policies of what was asked."""
  asked, given, prefill = [], {}, lm_batches.scoring.start
  monkeypatch.setattr(run_lm_harness, "load", lambda name: loaded)
  monkeypatch.setattr(
    run_lm_harness, "choose_policies", lambda args: _policies()[: len(args.policies)]
  )
  monkeypatch.setattr(  # of all that the harness has, the list takes seconds
    run_lm_harness, "_tasks", lambda args: TaskManager(None, args.include_path, False)
  )

  def counted(runner, params, prompts):
    if max(map(len, prompts)) > 1:  # not to compile
      asked.append(runner.policy.name)
      if len(asked) == given["fails_at"]:
        raise KeyboardInterrupt
    return prefill(runner, params, prompts)

  monkeypatch.setattr(lm_batches.scoring, "start", counted)

  def start(fails_at=0, flags=None, **changes):
    asked.clear()
    given["fails_at"] = fails_at
    monkeypatch.setattr(run_lm_harness.cli, "flag_values", lambda: flags or {"limit": None})
    changes = {"model": str(model), "out_dir": str(tmp_path / "out")} | changes
    run_lm_harness.main(Args(**changes))
    return list(asked)

  return start


def _written(tmp_path, name):
  return [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]


def _without_times(rows):
  timed = ("_s_", "_per_s", "compile_s", "speedup")
  return [{n: v for n, v in row.items() if not any(t in n for t in timed)} for row in rows]


def test_a_run_that_is_cut_short_asks_no_request_twice(run, tmp_path, capsys):
  whole = run()
  lines, rows = _written(tmp_path, "measured.jsonl"), _written(tmp_path, "results.jsonl")
  before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
  assert run() == []
  assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
  batches = len({(line["policy"], line["batch"]) for line in lines if line["ttft_s"] is not None})
  assert len(whole) == batches == 8  # of four questions and three texts, two at a time
  for fails_at, torn in ((2, 0), (4, 9), (8, 0)):
    (tmp_path / "out").rename(tmp_path / f"out-{fails_at}-{torn}")
    with pytest.raises(KeyboardInterrupt) as caught:
      run(fails_at)
    path = tmp_path / "out" / "measured.jsonl"
    kept = path.read_bytes()
    counted = f"{len(kept.splitlines())} answers are in {tmp_path / 'out'}, go on with"
    assert counted in caught.value.__notes__[0]
    path.write_bytes(kept[: len(kept) - torn])
    whole_lines = kept.splitlines()[: -1 if torn else None]
    capsys.readouterr()
    assert run() == whole[fails_at - 1 - bool(torn) :]
    assert f"; {len(whole_lines)} requests are answered already" in capsys.readouterr().out
    assert path.read_bytes().splitlines()[: len(whole_lines)] == whole_lines
    again = _written(tmp_path, "measured.jsonl")
    assert [(one["id"], one["answer"]) for one in again] == [(o["id"], o["answer"]) for o in lines]
    assert _without_times(_written(tmp_path, "results.jsonl")) == _without_times(rows)
  with pytest.raises(KeyboardInterrupt):
    run(1, out_dir=str(tmp_path / "none"))
  assert not (tmp_path / "none").exists()


def test_times_of_a_row(run, tmp_path):
  run()
  lines = _written(tmp_path, "measured.jsonl")
  rows = {(one["policy"], one["task"]): one for one in _written(tmp_path, "results.jsonl")}
  for (policy, task), row in rows.items():
    mine = [line for line in lines if (line["policy"], line["task"]) == (policy, task)]
    ttft_s = {line["batch"]: line["ttft_s"] for line in mine if line["ttft_s"] is not None}
    step_s = {line["batch"]: line["step_s"] for line in mine}
    tokens = sum(line["prompt_tokens"] for line in mine if line["ttft_s"] is not None)
    assert row["prefill_tokens_per_s"] == pytest.approx(tokens / sum(ttft_s.values()))
    steps = [second for seconds in step_s.values() for second in seconds]
    made = sum(line["output_tokens"] - 1 + line["stopped"] for line in mine)
    assert row["decode_tokens_per_s"] == pytest.approx(made / sum(steps))
    assert row["tpot_s_p90"] == pytest.approx(np.percentile(steps, 90))
    assert row["ttft_s_p99"] > 0 and row["compile_s"] == mine[0]["compile_s"] > row["tpot_s_p50"]
  assert rows["streaming", "kvjax_choice"]["speedup_vs_dense"] > 0
  assert rows["dense", "kvjax_choice"]["limit_hits"] is None
  texts = [line for line in lines if isinstance(line["answer"], str) and line["policy"] == "dense"]
  assert rows["dense", "kvjax_continue"]["limit_hits"] == sum(not one["stopped"] for one in texts)


def test_another_run_or_a_damaged_line_is_refused(run, tmp_path, monkeypatch):
  short = {"tasks": ["kvjax_continue"], "policies": ["dense"], "limit": 1}
  assert run(**short) == ["dense"]
  path = tmp_path / "out" / "measured.jsonl"
  line = path.read_bytes()
  with pytest.raises(ValueError, match=r"another run: --limit was None there and is 2 now"):
    run(flags={"limit": 2}, **short)
  folder = tmp_path / "tasks"
  shutil.copytree(TASKS, folder)
  changed = (folder / "continue.jsonl").read_text().replace("a", "e")
  (folder / "continue.jsonl").write_text(changed)
  with monkeypatch.context() as patch:
    patch.chdir(folder)
    with pytest.raises(ValueError, match="another run: the data kvjax_continue was"):
      run(**short, include_path=str(folder))
  assert path.read_bytes() == line and run(**short) == []
  for damaged, complaint in (
    (line[:40] + b"\n", "not JSON"),
    (line.replace(b'"answer"', b'"said"'), "no field 'answer'"),
    (b'{"answer": [null, true], ' + line[1:].replace(b'"answer"', b'"x"'), "answer is not a list"),
  ):
    path.write_bytes(damaged)
    with pytest.raises(
      ValueError, match=rf"measured\.jsonl, line 1: {complaint}.*; mend or delete"
    ):
      run(**short)


def test_an_unknown_task_is_one_line(model, tmp_path, offline):
  with pytest.raises(ValueError, match="--tasks: the harness has no tins; `lm_eval ls tasks`"):
    run_lm_harness.main(Args(model=str(model), out_dir=str(tmp_path / "out"), tasks=["tins"]))
  assert not (tmp_path / "out").exists()


def test_a_task_that_comes_twice_is_refused(tmp_path):
  with pytest.raises(ValueError, match="--tasks=a,b,a: one comes twice; name each of them once"):
    run_lm_harness.main(Args(out_dir=str(tmp_path / "out"), tasks=["a", "b", "a"]))


def test_the_digest_of_a_task_is_of_its_content():
  text = run_lm_harness._text({"b": {"z", "y", "x"}, "a": object()})
  assert text == '{"a": "<object object>", "b": ["x", "y", "z"]}'
