"""NLL by decode steps: against one forward pass, by position, and the command around it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval import plots_perplexity, run_perplexity, scoring
from kvjax import CacheConfig, decode_step, make_policy, prepare
from kvjax.engine import steps
from kvjax.engine.generate import prefill
from models import Loaded, load
from tests.kvjax import matrix
from tests.models import naive, tiny
from tests.models.llama2c import load_stories
from tests.models.test_golden import STORIES
from tests.models.test_tokenizer import INFO, TOKENS

MODEL, PARAMS = matrix.tiny_model(matrix.SHAPES[0], num_layers=2)
QUEST = {"policy": "quest", "dense_layers": 1}
LOADED = Loaded("tiny", MODEL, PARAMS, None, "hash", None)
PREFIX, STEPS = 70, scoring.BLOCK + 9  # a whole block and a part of one
STRETCHES = [row[: PREFIX + STEPS + 1] for row in matrix.tokens_of([160, 160])]


def _runner(policy="dense", batch_size=1, capacity=PREFIX + STEPS, model=MODEL, **options):
  made = make_policy(policy, page_size=16, **options)
  config = CacheConfig(batch_size, capacity, 16, base_tokens=capacity)
  return prepare(model, made, made.stores[0], config, chunk_tokens=64)


def _forward(ids, model=MODEL, params=PARAMS):
  """Log-probabilities f32[S - 1, V] of what follows each token, in one pass."""
  return np.asarray(jax.nn.log_softmax(naive.logits(model, params, jnp.asarray([ids]))[0, :-1]))


def _expected(ids, **model):
  return -_forward(ids, **model)[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def rows():
  """Dense, quest with room for all, and quest with little."""
  runners = [_runner(), _runner(**QUEST, budget_tokens=256), _runner(**QUEST, budget_tokens=32)]
  return run_perplexity.measure(LOADED, runners, STRETCHES, PREFIX)


def test_dense_steps_give_what_one_forward_pass_gives(rows):
  expected = [_expected(ids)[PREFIX:] for ids in STRETCHES]
  np.testing.assert_allclose(rows[0]["token_nll"], expected, atol=1e-4)
  assert rows[0]["nll"] == pytest.approx(np.mean(expected), abs=1e-4)
  assert rows[0]["perplexity"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)


def test_quest_with_the_whole_budget_is_dense_and_with_less_is_not(rows):
  dense, full, little = rows
  np.testing.assert_allclose(full["token_nll"], dense["token_nll"], atol=2e-5)
  assert full["nll_delta"] == pytest.approx(0, abs=1e-5)
  assert np.abs(np.subtract(little["token_nll"], dense["token_nll"])).max() > 1e-3
  assert little["nll_delta"] == pytest.approx(little["nll"] - dense["nll"], abs=1e-5)


def test_parts_are_equal_and_their_mean_is_the_whole(rows):
  parts = rows[2]["by_position"]
  assert len(parts) == run_perplexity.BUCKETS
  assert (parts[0]["from"], parts[-1]["to"]) == (PREFIX + 1, PREFIX + 1 + STEPS)
  assert [one["to"] for one in parts[:-1]] == [one["from"] for one in parts[1:]]
  sizes = [one["to"] - one["from"] for one in parts]
  assert max(sizes) - min(sizes) <= 1
  assert np.average([one["nll"] for one in parts], weights=sizes) == pytest.approx(rows[2]["nll"])
  start, end = parts[3]["from"] - PREFIX - 1, parts[3]["to"] - PREFIX - 1
  assert parts[3]["nll"] == pytest.approx(np.array(rows[2]["token_nll"])[:, start:end].mean())


def test_few_tokens_have_few_parts():
  nll = np.array([[1.0, 2.0, 4.0]])
  found = run_perplexity.by_position(nll, 10)
  assert [(one["from"], one["to"], one["nll"]) for one in found] == [
    (10, 11, 1.0),
    (11, 12, 2.0),
    (12, 13, 4.0),
  ]


def test_rows_of_a_batch_do_not_matter_to_each_other():
  """Ragged prompts and ragged texts behind them; one row has nothing to be scored."""
  prompts = [STRETCHES[0][:PREFIX], STRETCHES[1][:9], STRETCHES[1][:20]]
  rows = [STRETCHES[0][PREFIX : PREFIX + 5], STRETCHES[1][9:90], []]
  runner = _runner(batch_size=3, capacity=PREFIX + 81)
  last, cache = prefill(runner, PARAMS, prompts)
  found = scoring.follow(runner, PARAMS, last, cache, rows)
  assert [len(one) for one in found.log_probs] == [5, 81, 0]
  for prompt, row, scored, greedy in zip(prompts, rows, *found[:2], strict=True):
    log_probs = _forward([*prompt, *row])[len(prompt) - 1 :]
    if row:
      np.testing.assert_allclose(scored, log_probs[np.arange(len(row)), row], atol=1e-4)
      assert greedy.tolist() == (log_probs.argmax(-1) == row).tolist()


def test_the_golden_tokens_of_a_real_model_are_greedy():
  """stories260K's 200 greedy tokens, made by another implementation, and their NLL."""
  model, params = load_stories()
  ids = STORIES["greedy_ids_from_bos"][:200]
  runner = _runner(model=model, capacity=len(ids))
  last, cache = prefill(runner, params, [ids[:50]])
  scored = scoring.follow(runner, params, last, cache, [ids[50:]])
  assert scored.greedy[0].all()
  expected = _expected(ids, model=model, params=params)[49:]
  np.testing.assert_allclose(-scored.log_probs[0], expected, atol=1e-4)


def test_more_tokens_than_a_policy_has_room_for():
  runner = _runner("snapkv", budget_tokens=48, new_tokens=8)
  last, cache = prefill(runner, PARAMS, [STRETCHES[0][:PREFIX]])
  with pytest.raises(ValueError, match="policy 'snapkv' has room for; raise its option new_tokens"):
    scoring.follow(runner, PARAMS, last, cache, [STRETCHES[0][PREFIX:]])


def test_no_copy_of_the_pools():
  """A block of steps needs as little memory beside its cache as one step does."""
  runner = _runner(**QUEST, budget_tokens=32, capacity=8192)
  cache = jax.eval_shape(lambda: steps.empty_cache(runner))
  number = jax.ShapeDtypeStruct((), jnp.int32)
  tokens = jax.ShapeDtypeStruct((1, scoring.BLOCK + 1), jnp.int32)
  block = scoring._block.lower(runner, PARAMS, cache, tokens, number).compile().memory_analysis()
  token = jax.ShapeDtypeStruct((1,), jnp.int32)
  step = decode_step.lower(runner, PARAMS, cache, token).compile().memory_analysis()
  pool = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
  assert block.temp_size_in_bytes < step.temp_size_in_bytes + pool / 8
  assert block.alias_size_in_bytes >= runner.decode_bytes.total


@pytest.fixture(scope="module")
def command(tmp_path_factory):
  """Flags of a command that reads a tiny model and a text."""
  folder = tmp_path_factory.mktemp("inputs")
  config = dataclasses.replace(tiny.tied(), max_tokens=512, vocab_size=len(TOKENS), num_layers=1)
  model = tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=INFO)
  book = folder / "book.txt"
  book.write_text(" ".join(f"Line {n} of the tin." for n in range(60)), encoding="utf-8")
  return {"model": str(model), "text_file": str(book)}


def _args(command, folder, **changes):
  values = {
    **{"policies": ["streaming", "dense"], "stores": [], "budget_tokens": ["64"]},
    **{"page_size": 16, "prefix_tokens": 120, "tokens": 40, "num_texts": 2},
  }
  return type("Args", (), values | command | {"out_dir": str(folder / "out")} | changes)()


def test_the_command_writes_rows_a_manifest_and_a_picture(command, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(run_perplexity.cli, "flag_values", dict)
  run_perplexity.main(_args(command, tmp_path))
  out = tmp_path / "out"
  dense, streaming = map(json.loads, (out / "results.jsonl").read_text().splitlines())
  assert (dense["policy"], streaming["policy"]) == ("dense", "streaming")
  assert dense["metric"] == "nll" and dense["score"] is None and dense["nll_delta"] == 0
  assert (
    streaming["speedup_vs_dense"] > 0 and streaming["device_kv_bytes"] < dense["device_kv_bytes"]
  )
  assert np.shape(streaming["token_nll"]) == (2, 40)
  loaded = load(command["model"])
  assert loaded.tokenizer is not None
  ids = loaded.tokenizer.encode(Path(command["text_file"]).read_text("utf-8"))
  second = ids[len(ids) // 2 :][:161]
  expected = _expected(second, model=loaded.model, params=loaded.params)[120:]
  np.testing.assert_allclose(dense["token_nll"][1], expected, atol=1e-4)
  assert (out / "nll_by_position.png").read_bytes()[:4] == b"\x89PNG"
  printed = capsys.readouterr().out
  assert "streaming@64" in printed and "nll by position" in printed


# Made once, so that what is compiled for them is found again.
_load = functools.cache(load)


@functools.cache
def _made():
  both = make_policy("dense"), make_policy("streaming", budget_tokens=64)
  return [(made, made.stores[0]) for made in both]


@pytest.fixture
def run(command, tmp_path, monkeypatch):
  """Runs the command, cut short at a text if wanted; returns the policies that scored one."""
  monkeypatch.setattr(run_perplexity.plots_perplexity, "nll_by_position", lambda *args: None)
  monkeypatch.setattr(run_perplexity, "load", _load)
  monkeypatch.setattr(run_perplexity, "choose_policies", lambda args: _made())
  scored, score, given = [], run_perplexity.score, {}

  def counted(runner, *args):
    scored.append(runner.policy.name)
    if len(scored) == given["fails_at"]:
      raise KeyboardInterrupt
    return score(runner, *args)

  monkeypatch.setattr(run_perplexity, "score", counted)

  def start(fails_at=0, **changes):
    scored.clear()
    given["fails_at"] = fails_at
    flags = {name: str(value) for name, value in changes.items()}
    monkeypatch.setattr(run_perplexity.cli, "flag_values", lambda: flags)
    run_perplexity.main(_args(command, tmp_path, **changes))
    return list(scored)

  return start


def _files(tmp_path):
  return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_a_run_that_is_cut_short_ends_as_if_it_had_not_been(run, tmp_path, capsys):
  """Between two texts, between policies, and in the midst of a line."""
  assert run() == ["dense", "dense", "streaming", "streaming"]
  whole = _files(tmp_path)
  for fails_at, torn, again in ((2, 0, 3), (3, 0, 2), (4, 0, 1), (4, 9, 2)):
    (tmp_path / "out").rename(tmp_path / f"out-{fails_at}-{torn}")
    with pytest.raises(KeyboardInterrupt) as caught:
      run(fails_at)
    kept = f"{fails_at - 1} answers are in {tmp_path / 'out'}, go on with the same command"
    assert kept in caught.value.__notes__[0]
    path = tmp_path / "out" / "measured.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[: len(before) - torn])
    capsys.readouterr()
    assert run() == ["dense", "dense", "streaming", "streaming"][-again:]
    assert f"; {4 - again} are scored already" in capsys.readouterr().out
    lines = path.read_bytes().splitlines()
    assert lines[: 4 - again] == before.splitlines()[: 4 - again] and len(lines) == 4
    assert _scores(_files(tmp_path)) == _scores(whole)
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["resumed"]) == 1
  with pytest.raises(KeyboardInterrupt):
    run(1, out_dir=str(tmp_path / "none"))
  assert not (tmp_path / "none").exists()


def _scores(files):
  """Rows without their times."""
  rows = [json.loads(line) for line in files["results.jsonl"].splitlines()]
  timed = ("_s_", "_per_s", "compile_s", "speedup")
  return [{n: v for n, v in row.items() if not any(t in n for t in timed)} for row in rows]


def test_a_finished_run_scores_nothing_and_its_rows_are_made_of_its_lines(run, tmp_path, capsys):
  run()
  before = _files(tmp_path)
  first = capsys.readouterr().out
  (tmp_path / "out" / "results.jsonl").unlink()
  assert run() == []
  assert _files(tmp_path) == before and first.endswith(capsys.readouterr().out)


def test_times_of_a_row(run, tmp_path):
  run()
  lines = [json.loads(line) for line in _files(tmp_path)["measured.jsonl"].splitlines()]
  row = json.loads(_files(tmp_path)["results.jsonl"].splitlines()[1])
  of_row = [line for line in lines if line["policy"] == "streaming"]
  ttft_s = [line["ttft_s"] for line in of_row]
  steps = [second for line in of_row for second in line["step_s"]]
  assert len(steps) == 2 * 40 and row["ttft_s_p50"] == pytest.approx(np.median(ttft_s))
  assert row["prefill_tokens_per_s"] == pytest.approx(2 * 120 / sum(ttft_s))
  assert row["decode_tokens_per_s"] == pytest.approx(2 * 40 / sum(steps))
  assert row["tpot_s_p99"] == pytest.approx(np.percentile(steps, 99))
  assert row["compile_s"] == of_row[0]["compile_s"] > 0


def test_another_run_or_a_damaged_line_is_refused(run, command, tmp_path):
  run(tokens=40)
  before = _files(tmp_path)
  with pytest.raises(ValueError, match=r"another run: --tokens was '40' there and is '39' now"):
    run(tokens=39)
  book = tmp_path / "book.txt"
  book.write_text(Path(command["text_file"]).read_text("utf-8") + "more", "utf-8")
  with pytest.raises(ValueError, match=r"another run: --text_file|the data book\.txt was"):
    run(tokens=40, text_file=str(book))
  assert _files(tmp_path) == before
  path = tmp_path / "out" / "measured.jsonl"
  first, *rest = before["measured.jsonl"].splitlines(keepends=True)
  for damaged, complaint in (
    (first[:50] + b"\n", "not JSON"),
    (first.replace(b'"token_nll": [', b'"token_nll": [null, '), "token_nll is not a list of float"),
    (first.replace(b'"task"', b'"tusk"'), "no field 'task'"),
  ):
    path.write_bytes(b"".join([damaged, *rest]))
    with pytest.raises(
      ValueError, match=rf"measured\.jsonl, line 1: {complaint}.*; mend or delete"
    ):
      run(tokens=40)


def test_a_run_without_dense_is_drawn_and_reported(rows, tmp_path):
  keys = ("nll_delta", "nll_delta_stderr", "speedup_vs_dense")
  alone = [{key: value for key, value in rows[2].items() if key not in keys}]
  plots_perplexity.nll_by_position(alone, "title", tmp_path / "a.png")
  assert (tmp_path / "a.png").stat().st_size > 1000
  assert "quest@32" in run_perplexity.report(alone)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tokens": 600}, "make a text of 721 tokens, and tiny was trained for 512; ask for fewer"),
    ({"num_texts": 50}, "tokens, and --num_texts=50 of 161 need 8050; give a longer text"),
    ({"model": "random:stories260k"}, "has no tokenizer to read a text with"),
    ({"text_file": "nowhere.txt"}, "nowhere.txt is not a file"),
    ({"policies": ["KnormPress"]}, "unknown policy 'KnormPress'"),
  ],
)
def test_bad_input_is_one_line_and_leaves_nothing(command, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    run_perplexity.main(_args(command, tmp_path, **changes))
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "out").exists()
