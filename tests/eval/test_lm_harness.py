"""kvjax as a model of lm-evaluation-harness, with the real package: likelihoods and texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvjax import CacheConfig, generate, make_policy, prepare
from models import load
from tests.models.test_tokenizer import CHATML, TOKENS

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra lm_eval)")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from eval.lm_harness import KvjaxLM
from tests.eval.lm_harness_model import (
  TASKS,
  TEXTS,
  forward,
  generate_texts,
  go_offline,
  likelihoods,
  one_pass,
  write_model,
)

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
  ("the tin in the hall, and the other tin in the house behind the hill where it", " was 12"),
  ("the tin in the hall, and the other tin in the house behind the hill where it", " is"),
  ("the tin in the hall, and the other tin in the house behind the hill where it", " in the tin"),
  ("in the ", "tin"),
  ("", "the tin in the"),
  ("12", " tins"),
]


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


def test_dense_likelihoods_are_those_of_one_forward_pass(loaded, dense):
  for (found, greedy), pair in zip(likelihoods(dense, PAIRS), PAIRS, strict=True):
    expected = one_pass(loaded, *pair)
    assert found == pytest.approx(expected[0], abs=1e-4)
    assert greedy == expected[1]


def test_a_greedy_continuation_is_told(loaded, dense):
  ids = loaded.tokenizer.encode(TEXTS[1])
  best = int(forward(loaded, ids)[-1].argmax())
  (_, greedy), (_, other) = dense._loglikelihood_tokens(
    [(None, ids, [best]), (None, ids, [(best + 1) % len(TOKENS)])], disable_tqdm=True
  )
  assert greedy and not other


def test_order_and_batches_change_nothing(loaded, dense):
  found = likelihoods(dense, PAIRS)
  alone = KvjaxLM(loaded, batch_size=1)
  for lm in (dense, alone):
    for (one, greedy), (other, same) in zip(
      reversed(likelihoods(lm, PAIRS[::-1])), found, strict=True
    ):
      assert one == pytest.approx(other, abs=1e-4) and greedy == same
    assert generate_texts(lm, TEXTS[::-1])[::-1] == generate_texts(dense)
  assert dense.machine.runner.prefill_config.batch_size == 2


def test_the_policy_decides_what_every_token_is_predicted_from(loaded, dense):
  """The one letter of a multiple choice too."""
  context = TEXTS[1] * 2
  pairs = [(context, " t"), (context, " the tin")]
  assert len(loaded.tokenizer.encode(" t")) == 1
  exact = [found for found, _ in likelihoods(dense, pairs)]
  little = KvjaxLM(loaded, "streaming", budget_tokens=16)
  full = KvjaxLM(loaded, "streaming", budget_tokens=1024)
  for one, other in zip(likelihoods(full, pairs), exact, strict=True):
    assert one[0] == pytest.approx(other, abs=1e-4)
  for one, other in zip(likelihoods(little, pairs), exact, strict=True):
    assert abs(one[0] - other) > 1e-3


def test_long_contexts_are_cut_from_the_left(loaded, caplog):
  lm = KvjaxLM(loaded, max_length=20)
  context, continuation = list(range(3, 60)), [70, 71, 72]
  ((found, _),) = lm._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
  kept = context[-18:]
  assert "a context of 57 tokens was cut from the left to 18" in caplog.text
  log_probs = forward(loaded, [*kept, *continuation])[17:20]
  assert found == pytest.approx(log_probs[np.arange(3), continuation].sum(), abs=1e-4)
  with pytest.raises(ValueError, match="a continuation has 21 tokens, and max_length is 20"):
    lm._loglikelihood_tokens([(None, [1], list(range(21)))])


def test_rolling_likelihoods_predict_each_token_once(loaded):
  lm = KvjaxLM(loaded, max_length=16, batch_size=2)
  ids, bos = loaded.tokenizer.encode(TEXTS[1]), loaded.tokenizer.bos_id
  assert 32 < len(ids) < 48  # three windows
  requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in (TEXTS[1], "12")]
  found = lm.loglikelihood_rolling(requests, disable_tqdm=True)
  first = forward(loaded, [bos, *ids[:15]])[np.arange(16), ids[:16]].sum()
  second = forward(loaded, ids[15:31])[np.arange(16), ids[16:32]].sum()
  tail = len(ids) - 32
  third = forward(loaded, ids[-17:-1])[-tail:][np.arange(tail), ids[32:]].sum()
  assert found[0] == pytest.approx(first + second + third, abs=1e-3)
  short = loaded.tokenizer.encode("12")
  expected = forward(loaded, [bos, *short])[np.arange(len(short)), short].sum()
  assert found[1] == pytest.approx(expected, abs=1e-4)


def test_greedy_texts_are_those_of_generate(loaded, dense):
  runner = prepare(loaded.model, make_policy("dense"), "resident", CacheConfig(1, 128))
  for text, found in zip(TEXTS, generate_texts(dense), strict=True):
    ids = loaded.tokenizer.encode(text)
    made = generate(
      runner, loaded.params, [ids], max_new_tokens=12, stop_ids=loaded.tokenizer.eos_ids
    )
    assert found == loaded.tokenizer.decode(made.tokens[0]).partition("\n")[0]
    assert found


def test_texts_end_before_what_ends_them(dense):
  whole = generate_texts(dense, until=[])
  stop = whole[1][4:6]
  cut = generate_texts(dense, until=[stop, "never said"])
  assert cut == [text.partition(stop)[0] for text in whole]
  assert len(cut[1]) < len(whole[1])


def test_sampling_depends_on_seed_context_and_repetition_only(loaded, dense):
  asked = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "until": []}
  found = generate_texts(dense, [TEXTS[0], TEXTS[2], TEXTS[0]], **asked)
  assert found[0] != found[2]
  other = KvjaxLM(loaded, batch_size=1)
  assert generate_texts(other, [TEXTS[2], TEXTS[0]], **asked) == [found[1], found[0]]
  seeded = KvjaxLM(loaded, batch_size=1, seed=1)
  assert generate_texts(seeded, [TEXTS[2], TEXTS[0]], **asked) != [found[1], found[0]]


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
    generate_texts(dense, **asked)


@pytest.fixture
def offline(monkeypatch, tmp_path):
  go_offline(monkeypatch, tmp_path)


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
