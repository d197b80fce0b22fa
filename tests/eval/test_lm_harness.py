"""kvjax as a model of lm-evaluation-harness, with the real package and two tasks of our own."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval import run_lm_harness
from kvjax import CacheConfig, generate, make_policy, prepare
from models import load
from tests.models import naive, tiny
from tests.models.test_tokenizer import CHATML, INFO, TOKENS

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra lm_eval)")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from eval import lm_batches
from eval.lm_harness import KvjaxLM

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "data" / "lm_harness"
PAIRS = [
  ("the tin in the hall, and the other tin in the house behind the hill where it", " was 12"),
  ("the tin in the hall, and the other tin in the house behind the hill where it", " is"),
  ("the tin in the hall, and the other tin in the house behind the hill where it", " in the tin"),
  ("in the ", "tin"),
  ("", "the tin in the"),
  ("12", " tins"),
]
TEXTS = ["the tin", "in the beginning there was a tin, and in the tin there was another", "12 in"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """The path of a tiny model."""
  config = dataclasses.replace(tiny.tied(), max_tokens=256, vocab_size=len(TOKENS), num_layers=1)
  extra = INFO | {"tokenizer.chat_template": CHATML}
  path = tmp_path_factory.mktemp("model") / "tiny.gguf"
  return tiny.write_gguf(path, config, tiny.tensors(config), extra=extra)


@pytest.fixture(scope="module")
def loaded(model):
  return load(str(model))


@pytest.fixture(scope="module")
def dense(loaded):
  return KvjaxLM(loaded, batch_size=2)


def _likelihoods(lm, pairs=PAIRS):
  requests = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
  return lm.loglikelihood(requests, disable_tqdm=True)


def _generate(lm, contexts=TEXTS, **asked):
  asked = {"until": ["\n"], "max_gen_toks": 12} | asked
  requests = [
    Instance("generate_until", {}, (text, asked), place) for place, text in enumerate(contexts)
  ]
  return lm.generate_until(requests, disable_tqdm=True)


def _forward(loaded, ids):
  logits = naive.logits(loaded.model, loaded.params, jnp.asarray([ids]))[0]
  return np.asarray(jax.nn.log_softmax(logits))


def _expected(loaded, context, continuation):
  """As the harness defines it: spaces at the end of a context belong to the continuation."""
  words = loaded.tokenizer
  whole = words.encode(context + continuation)
  before = len(words.encode(context.rstrip()))
  if not context:
    whole, before = [words.bos_id, *whole], 1
  wanted = whole[before:]
  log_probs = _forward(loaded, whole)[before - 1 : -1]
  found = log_probs[np.arange(len(wanted)), wanted].sum()
  return found, (log_probs.argmax(-1) == wanted).all()


def test_dense_likelihoods_are_those_of_one_forward_pass(loaded, dense):
  for (found, greedy), pair in zip(_likelihoods(dense), PAIRS, strict=True):
    expected = _expected(loaded, *pair)
    assert found == pytest.approx(expected[0], abs=1e-4)
    assert greedy == expected[1]


def test_a_greedy_continuation_is_told(loaded, dense):
  ids = loaded.tokenizer.encode(TEXTS[1])
  best = int(_forward(loaded, ids)[-1].argmax())
  (_, greedy), (_, other) = dense._loglikelihood_tokens(
    [(None, ids, [best]), (None, ids, [(best + 1) % len(TOKENS)])], disable_tqdm=True
  )
  assert greedy and not other


def test_order_and_batches_change_nothing(loaded, dense):
  found = _likelihoods(dense)
  alone = KvjaxLM(loaded, batch_size=1)
  for lm in (dense, alone):
    for (one, greedy), (other, same) in zip(
      reversed(_likelihoods(lm, PAIRS[::-1])), found, strict=True
    ):
      assert one == pytest.approx(other, abs=1e-4) and greedy == same
    assert _generate(lm, TEXTS[::-1])[::-1] == _generate(dense)
  assert dense.machine.runner.prefill_config.batch_size == 2


def test_the_policy_decides_what_every_token_is_predicted_from(loaded, dense):
  """The one letter of a multiple choice too."""
  context = TEXTS[1] * 2
  pairs = [(context, " t"), (context, " the tin")]
  assert len(loaded.tokenizer.encode(" t")) == 1
  exact = [found for found, _ in _likelihoods(dense, pairs)]
  little = KvjaxLM(loaded, "streaming", budget_tokens=16)
  full = KvjaxLM(loaded, "streaming", budget_tokens=1024)
  for one, other in zip(_likelihoods(full, pairs), exact, strict=True):
    assert one[0] == pytest.approx(other, abs=1e-4)
  for one, other in zip(_likelihoods(little, pairs), exact, strict=True):
    assert abs(one[0] - other) > 1e-3


def test_long_contexts_are_cut_from_the_left(loaded, caplog):
  lm = KvjaxLM(loaded, max_length=20)
  context, continuation = list(range(3, 60)), [70, 71, 72]
  ((found, _),) = lm._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
  kept = context[-18:]
  assert "a context of 57 tokens was cut from the left to 18" in caplog.text
  log_probs = _forward(loaded, [*kept, *continuation])[17:20]
  assert found == pytest.approx(log_probs[np.arange(3), continuation].sum(), abs=1e-4)
  with pytest.raises(ValueError, match="a continuation has 21 tokens, and max_length is 20"):
    lm._loglikelihood_tokens([(None, [1], list(range(21)))])


def test_rolling_likelihoods_predict_each_token_once(loaded):
  lm = KvjaxLM(loaded, max_length=16, batch_size=2)
  ids, bos = loaded.tokenizer.encode(TEXTS[1]), loaded.tokenizer.bos_id
  assert 32 < len(ids) < 48  # three windows
  requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in (TEXTS[1], "12")]
  found = lm.loglikelihood_rolling(requests, disable_tqdm=True)
  first = _forward(loaded, [bos, *ids[:15]])[np.arange(16), ids[:16]].sum()
  second = _forward(loaded, ids[15:31])[np.arange(16), ids[16:32]].sum()
  tail = len(ids) - 32
  third = _forward(loaded, ids[-17:-1])[-tail:][np.arange(tail), ids[32:]].sum()
  assert found[0] == pytest.approx(first + second + third, abs=1e-3)
  short = loaded.tokenizer.encode("12")
  expected = _forward(loaded, [bos, *short])[np.arange(len(short)), short].sum()
  assert found[1] == pytest.approx(expected, abs=1e-4)


def test_greedy_texts_are_those_of_generate(loaded, dense):
  runner = prepare(loaded.model, make_policy("dense"), "resident", CacheConfig(1, 128))
  for text, found in zip(TEXTS, _generate(dense), strict=True):
    ids = loaded.tokenizer.encode(text)
    made = generate(
      runner, loaded.params, [ids], max_new_tokens=12, stop_ids=loaded.tokenizer.eos_ids
    )
    assert found == loaded.tokenizer.decode(made.tokens[0]).partition("\n")[0]
    assert found


def test_texts_end_before_what_ends_them(dense):
  whole = _generate(dense, until=[])
  stop = whole[1][4:6]
  cut = _generate(dense, until=[stop, "never said"])
  assert cut == [text.partition(stop)[0] for text in whole]
  assert len(cut[1]) < len(whole[1])


def test_sampling_depends_on_seed_context_and_repetition_only(loaded, dense):
  asked = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "until": []}
  found = _generate(dense, [TEXTS[0], TEXTS[2], TEXTS[0]], **asked)
  assert found[0] != found[2]
  other = KvjaxLM(loaded, batch_size=1)
  assert _generate(other, [TEXTS[2], TEXTS[0]], **asked) == [found[1], found[0]]
  seeded = KvjaxLM(loaded, batch_size=1, seed=1)
  assert _generate(seeded, [TEXTS[2], TEXTS[0]], **asked) != [found[1], found[0]]


def test_chat(loaded, dense):
  messages = [{"role": "user", "content": "Which tin?"}]
  assert dense.apply_chat_template(messages) == loaded.tokenizer.chat(messages)
  assert dense.chat_template(True) == CHATML and loaded.name in dense.tokenizer_name
  started = [*messages, {"role": "assistant", "content": "The tin"}]
  text = dense.apply_chat_template(started, add_generation_prompt=False)
  assert text.endswith("assistant\nThe tin")


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"batch_size": "auto"}, "batch_size 'auto': kvjax needs a positive number"),
    ({"policy": "qest"}, "unknown policy 'qest'"),
    ({"pretrained": "random:stories260k"}, "has no tokenizer to read tasks with"),
  ],
)
def test_bad_arguments(loaded, options, message):
  with pytest.raises(ValueError, match=message):
    KvjaxLM(**{"pretrained": loaded} | options)


@pytest.mark.parametrize(
  ("asked", "message"),
  [
    ({"num_beams": 4}, "generation asks for num_beams, which kvjax lacks"),
    ({"do_sample": True, "top_k": 4}, "generation asks for top_k, which kvjax lacks"),
    ({"max_gen_toks": 256}, "max_gen_toks 256 leave no room for a context: max_length is 256"),
  ],
)
def test_bad_generations(dense, asked, message):
  with pytest.raises(ValueError, match=message):
    _generate(dense, **asked)


@pytest.fixture
def offline(monkeypatch, tmp_path):
  """The harness reads two local files and asks nobody."""
  for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    monkeypatch.setenv(name, "1")
  monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
  monkeypatch.chdir(TASKS)


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
    sums = [_expected(loaded, asked, f" {choice}")[0] for choice in doc["choices"]]
    right += int(np.argmax(sums)) == doc["answer"]
  row = rows["dense", "acc"]
  assert row["score"] == row["value"] == right / len(docs) and row["num_examples"] == len(docs)
  assert rows["streaming", "acc"]["dense_score"] == row["score"]
  assert rows["streaming", "acc"]["budget_tokens"] == 32 and row["decode_tokens_per_s"] > 0
  written = (tmp_path / "out" / rows["dense", "exact_match"]["samples"]).read_text().splitlines()
  samples = sorted(map(json.loads, written), key=lambda one: one["doc_id"])
  texts = [json.loads(line)["text"] for line in (TASKS / "continue.jsonl").read_text().splitlines()]
  assert [one["resps"][0][0] for one in samples] == _generate(dense, texts, max_gen_toks=8)


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


def test_the_harness_own_way(model, tmp_path):
  """Its own command, with its own flags, on a model that it only knows through our module."""
  environment = os.environ | {
    **{"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")},
    **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
  }
  arguments = f"pretrained={model},policy=quest:dense_layers=0,budget_tokens=32"
  command = [sys.executable, "-m", "eval.lm_harness", "--model", "kvjax", "--model_args", arguments]
  command += ["--tasks", "kvjax_choice", "--include_path", str(TASKS), "--batch_size", "2"]
  command += ["--output_path", str(tmp_path / "out.json"), "--limit", "2"]
  done = subprocess.run(
    command, cwd=TASKS, env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  assert "kvjax_choice" in done.stdout and "acc_norm" in done.stdout
  written = json.loads(next(tmp_path.glob("out*.json")).read_text())
  assert written["config"]["policy"] == "quest:dense_layers=0"
  assert written["config"]["budget_tokens"] == 32 and written["results"]["kvjax_choice"]


def test_simple_evaluate_by_name(model, tmp_path, offline):
  """Chat template and few-shot examples go through the harness."""
  found = simple_evaluate(
    model="kvjax",
    model_args=f"pretrained={model},policy=snapkv,budget_tokens=64",
    tasks=["kvjax_continue"],
    task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
    apply_chat_template=True,
    log_samples=True,
    limit=1,
  )
  assert found is not None
  asked = found["samples"]["kvjax_continue"][0]["arguments"]
  assert str(asked).count("<|im_start|>assistant") == 1
