"""Batches, and runs that are cut short or shared: every example is answered once, and the same."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from eval import cli, grid, harness, loop, predictions, processes, results, resume, summary, tasks
from kvjax import Generation, generate, make_policy
from models import load
from tests.models import tiny
from tests.models.test_tokenizer import INFO, TOKENS

NEW_TOKENS = (9, 4)  # of the two tasks


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  config = dataclasses.replace(tiny.tied(), vocab_size=len(TOKENS))
  folder = tmp_path_factory.mktemp("model")
  return tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=INFO)


@pytest.fixture(scope="module")
def loaded(path):
  return load(str(path))


def _examples(stop_ids=()):
  """Two tasks of five and two examples, ragged, not in the order of their lengths."""
  rng = random.Random(0)
  lengths = {"lookup": (40, 7, 90, 33, 64), "chain": (21, 50)}
  return [
    tasks.Example(
      task,
      f"{task[0]}{place}",
      [rng.randrange(4, len(TOKENS)) for _ in range(length)],
      ("a", "z"),
      new_tokens - place % 2,
      5,
      stop_ids=stop_ids,
    )
    for (task, sizes), new_tokens in zip(lengths.items(), NEW_TOKENS, strict=True)
    for place, length in enumerate(sizes)
  ]


def _policies():
  options = {"dense_layers": 0}
  return [
    (make_policy("dense"), "resident"),
    (make_policy("quest", budget_tokens=16, **options), "resident"),
  ]


def _measured(made):
  found, compile_s = [], {}
  for fresh in loop.answers(made, loop.batches_of(made), set(), compile_s, quiet=True):
    found += fresh
  return {predictions.key_of(one): one for one in found}, loop.rows_of(made, found, compile_s)


@pytest.fixture(scope="module")
def policies():
  return _policies()  # made once, so that what is compiled for them is found again


@pytest.fixture(scope="module")
def alone(loaded, policies):
  return _measured(loop.make(loaded, policies, _examples()))


def _said(answers):
  return {
    key: (one["pred"], one["score"], one["stopped"], one["output_tokens"])
    for key, one in answers.items()
  }


@pytest.mark.parametrize("share_prefill", [False, True])
def test_batch_mates_do_not_matter(loaded, policies, alone, share_prefill):
  made = loop.make(loaded, policies, _examples(), batch_size=2, share_prefill=share_prefill)
  answers, rows = _measured(made)
  assert len(answers) == 14 and len({one["pred"] for one in answers.values()}) > 7
  assert _said(answers) == _said(alone[0])
  batches = {one["batch"] for one in answers.values()}
  assert batches == {"l2", "l0", "l1", "c1"}  # the longest first; of five the last is alone
  assert [row["score"] for row in rows] == [row["score"] for row in alone[1]]
  assert {row["batch_size"] for row in rows} == {2}
  assert all((row["ttft_s_p50"] is None) == share_prefill for row in rows)


def test_tokens_that_end_a_task(loaded, policies):
  """An answer that holds one ends before it; the others go on to their limit."""
  runner = loop.make(loaded, policies[:1], _examples()).runners[0]
  whole = {
    one.id: generate(runner, loaded.params, [one.prompt_ids], max_new_tokens=one.new_tokens).tokens[
      0
    ]
    for one in _examples()
  }
  first = {tokens[0] for tokens in whole.values()}  # which may not be a stop token
  stop = next(token for token in whole["l0"] if token not in first)
  answers = _measured(loop.make(loaded, policies[:1], _examples((stop,))))[0]
  for one in answers.values():
    tokens = whole[one["id"]]
    cut = tokens[: tokens.index(stop)] if stop in tokens else tokens
    assert one["pred"] == loaded.tokenizer.decode(cut)
    assert one["stopped"] == (stop in tokens) and one["output_tokens"] == len(cut)
  assert {one["stopped"] for one in answers.values()} == {True, False}


def test_a_runner_compiles_before_the_clock_runs_for_each_way_to_end(loaded, policies, monkeypatch):
  seen = []

  def generate(runner, params, prompts, *, max_new_tokens, sampling=None, **options):
    seen.append((max_new_tokens > 3, sampling))
    return Generation([[5, 6, 7]] * len(prompts), [False] * len(prompts), 1.0, [0.5], None)

  monkeypatch.setattr(harness, "generate", generate)
  ends = {"lookup": (7,), "chain": ()}
  examples = [one._replace(stop_ids=ends[one.task], new_tokens=9) for one in _examples()]
  _measured(loop.make(loaded, policies[:1], examples))
  compiled = [sampling for asked, sampling in seen if not asked]
  assert len(compiled) == 2 == len(set(compiled))
  first = {sampling: asked for asked, sampling in reversed(seen)}
  assert list(first.values()) == [False, False]


def _prediction(batch, ttft_s, step_s, output_tokens, stopped, **fields):
  times = {"batch": batch, "ttft_s": ttft_s, "step_s": step_s, "prompt_tokens": 10}
  return times | {"output_tokens": output_tokens, "stopped": stopped} | fields


def test_times_of_a_batch_count_once():
  together = [
    _prediction("0", 2.0, [0.5, 0.5], 3, False),  # the first of the prefill, then two steps
    _prediction("0", 2.0, [0.5, 0.5], 1, True),  # the first of the prefill, a stop token
    _prediction("9", 4.0, [1.0], 2, False),
  ]
  speeds = harness.speeds(together)
  assert speeds["prefill_tokens_per_s"] == 30 / 6.0
  assert speeds["ttft_s_p50"] == 2.0 and speeds["tpot_s_p50"] == 0.5
  assert speeds["decode_tokens_per_s"] == (2 + 1 + 1) / 2.0
  assert harness.speeds([_prediction("0", None, [], 0, True)]) == {}


class _Args(types.SimpleNamespace):
  """Parsed flags that are not global."""

  policies, stores, budget_tokens = ["dense", "quest:dense_layers=0"], [], ["16"]
  page_size, batch_size, share_prefill = 16, 2, False
  num_processes, process_id, coordinator_address = 1, 0, None


class _Cut(BaseException):
  """A process that is killed runs nothing of ours any more."""


@pytest.fixture
def ask(monkeypatch, path, tmp_path):
  """Runs the command with a model that says what it is asked to; returns what was asked."""
  monkeypatch.setattr(cli, "flag_values", lambda: {"tasks": ["lookup", "chain"], "out_dir": "x"})
  asked, of_thread = [], threading.local()

  def generate(runner, params, prompts, *, max_new_tokens, **options):
    if max_new_tokens > 3:  # not to compile
      asked.append((runner.policy.name, tuple(map(len, prompts))))
      of_thread.left -= 1
      if of_thread.left == 0:
        raise _Cut
    tokens = [[*prompt, *prompt][:max_new_tokens] for prompt in prompts]
    return Generation(tokens, [False] * len(prompts), 0.5, [0.25] * (max_new_tokens - 1), None)

  monkeypatch.setattr(harness, "generate", generate)
  monkeypatch.setattr(summary, "draw", lambda rows, title, out_dir: [])

  def run(fails_at=0, examples=None, data="ab", **flags):
    asked.clear()
    of_thread.left = fails_at
    args = _Args(model=str(path), out_dir=str(tmp_path / "run"), **flags)
    grid.main(args, lambda loaded: (_examples() if examples is None else examples, {"book": data}))
    return list(asked)

  return run


def _run_files(folder):
  lines = (folder / "predictions.jsonl").read_text().splitlines()
  rows = results.read_rows(folder)
  free = {"compile_s": None}
  return sorted(lines), [row | free for row in rows]


def test_a_run_that_is_cut_short_anywhere_ends_as_if_it_had_not_been(ask, tmp_path, capsys):
  """Eight batches; after each of them, in the midst of a line and between lines of a batch."""
  folder = tmp_path / "run"
  whole_run = ask()
  assert len(whole_run) == 8 and len(set(whole_run)) == 8
  expected = _run_files(folder)
  assert len(expected[0]) == 14 and len(expected[1]) == 4
  for fails_at in (2, 5, 8):
    for torn in (0, 1, 300, 900):
      for file in folder.iterdir():
        file.unlink()
      with pytest.raises(_Cut):
        ask(fails_at)
      with (folder / "predictions.jsonl").open("r+b") as file:
        file.truncate(max(0, file.seek(0, 2) - torn))
      kept = len(predictions.read_run(folder))
      assert "Traceback" not in capsys.readouterr().err
      again = ask()
      assert f"{kept} are answered already" in capsys.readouterr().out or not kept
      assert len(again) <= len(whole_run) - fails_at + 1 + (2 if torn else 0)
      assert set(again) | set(whole_run[: fails_at - 1]) == set(whole_run)
      found = _run_files(folder)
      assert [_key(line) for line in found[0]] == [_key(line) for line in expected[0]]
      same = ("score", "limit_hits", "num_examples", "policy", "task", "decode_tokens_per_s")
      assert [[r[n] for n in same] for r in found[1]] == [[r[n] for n in same] for r in expected[1]]
      assert len(_manifest(tmp_path)["resumed"]) == 1


def _key(line):
  prediction = json.loads(line)
  return predictions.key_of(prediction), prediction["pred"], prediction["score"]


def test_a_finished_run_prints_its_tables_and_asks_nothing(ask, tmp_path, capsys):
  ask()
  before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
  first = capsys.readouterr().out
  assert ask() == []
  again = capsys.readouterr().out
  assert first.endswith(again) and "quest:dense_layers=0@16" in again
  assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_run_that_only_lost_its_rows_makes_them_again(ask, tmp_path):
  ask()
  rows = _run_files(tmp_path / "run")[1]
  (tmp_path / "run" / "results.jsonl").unlink()
  assert ask() == []
  assert _run_files(tmp_path / "run")[1] == rows


def test_rows_follow_the_answers_and_keep_the_seconds_of_compiling(ask, tmp_path):
  ask()
  rows = results.read_rows(tmp_path / "run")
  results.write_rows(tmp_path / "run", [row | {"score": 0.25, "x": 1} for row in rows])
  assert ask() == []
  assert results.read_rows(tmp_path / "run") == rows and rows[0]["compile_s"] is not None


def test_a_row_is_there_as_soon_as_its_task_is_complete(ask, tmp_path):
  with pytest.raises(_Cut):
    ask(7)  # the first batch of the second task
  rows = results.read_rows(tmp_path / "run")
  assert [(row["task"], row["policy"]) for row in rows] == [
    ("lookup", "dense"),
    ("lookup", "quest:dense_layers=0"),
  ]
  assert rows[1]["dense_score"] == rows[0]["score"]


def test_nothing_is_left_of_a_run_without_an_answer(ask, tmp_path):
  with pytest.raises(_Cut):
    ask(1)
  assert not (tmp_path / "run").exists()


def test_another_run_in_the_folder(ask, tmp_path, monkeypatch, path):
  ask()
  with pytest.raises(
    ValueError, match=r"another run: the data book was 'ab' there and is 'cd' now"
  ):
    ask(data="cd")
  manifest = tmp_path / "run" / "manifest.json"
  changed = json.loads(manifest.read_text())
  changed["model"]["sha256"] = "other"
  manifest.write_text(json.dumps(changed))
  with pytest.raises(ValueError, match="another run: the model's sha256 was 'other' there and is"):
    ask()
  monkeypatch.setattr(cli, "flag_values", lambda: {"tasks": ["chain"], "out_dir": "y"})
  with pytest.raises(
    ValueError, match=r"--tasks was \['lookup', 'chain'\] there and is \['chain'\]"
  ):
    ask()


@pytest.mark.parametrize("name", ["device", "backend"])
def test_another_machine_does_not_go_on(ask, tmp_path, name):
  ask()
  path = tmp_path / "run" / "manifest.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {name: "another"}))
  with pytest.raises(ValueError, match=f"another run: {name} was 'another' there and is"):
    ask()


def test_files_of_policies_are_part_of_the_run(ask, tmp_path):
  policy, profile = tmp_path / "mine.py", tmp_path / "measured.npz"
  code = (
    "from kvjax.policies.dense import dense\ndef mine(*, profile='', late=0):\n  return dense()"
  )
  policy.write_text(code)
  profile.write_bytes(b"1")
  specs = [f"{policy}:profile={profile}"]
  assert ask(policies=specs)
  assert {str(policy), str(profile)} < set(_manifest(tmp_path)["data"])
  assert ask(policies=specs) == []
  profile.write_bytes(b"2")
  with pytest.raises(ValueError, match=f"another run: the data {profile} was"):
    ask(policies=specs)
  profile.write_bytes(b"1")
  policy.write_text(code + "  # another")
  with pytest.raises(ValueError, match=f"another run: the data {policy} was"):
    ask(policies=specs)


def _manifest(tmp_path):
  return json.loads((tmp_path / "run" / "manifest.json").read_text())


def test_data_may_have_moved(ask, monkeypatch):
  for place in ("a", "b"):
    moved = dict.fromkeys(("data_dir", "text_file", "text_dir"), place)
    monkeypatch.setattr(cli, "flag_values", lambda moved=moved: {"tasks": ["lookup"]} | moved)
    assert bool(ask()) == (place == "a")


def test_only_one_process_at_a_time(ask, tmp_path):
  with pytest.raises(_Cut):
    ask(3)
  before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
  with resume.sole_writer(tmp_path / "run"):
    with pytest.raises(ValueError, match=r"another process is writing to .*run; wait for it, or"):
      ask()
    with pytest.raises(ValueError, match="another process is writing"):
      _together(ask)
  assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
  assert len(ask()) == 6  # what the first had locked is free again


def test_what_changed_since_the_run_began_is_told(ask, tmp_path, capsys):
  with pytest.raises(_Cut):
    ask(3)
  path = tmp_path / "run" / "manifest.json"
  manifest = _manifest(tmp_path)
  path.write_text(json.dumps(manifest | {"commit": "an older one"}))
  ask()
  assert "warning: this is not as when the run began: commit" in capsys.readouterr().err
  (resumed,) = _manifest(tmp_path)["resumed"]
  assert resumed["commit"] == manifest["commit"] and "device" not in resumed


def test_a_full_disk_ends_the_run_and_keeps_what_was_answered(ask, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    done = []

    def full(path, found):
      if len(done) == 3:
        raise OSError("disk full")
      done.append(found)
      append_lines(path, found)

    append_lines = results.append_lines
    patch.setattr(results, "append_lines", full)
    with pytest.raises(OSError, match="disk full") as error:
      ask()
  kept = predictions.read_run(tmp_path / "run")
  assert len(kept) == sum(map(len, done)) == 6
  where = tmp_path / "run"
  (note,) = error.value.__notes__
  assert note == f"6 answers are in {where}, go on with the same command and --out_dir={where}"
  assert len(ask()) == 8 - 3


def _together(ask, fails_at=0):
  """Two processes, played by threads; what fails in one of them ends both, as it does for real."""
  meetings = [threading.Barrier(2, timeout=60) for _ in range(3)]
  turns = [iter(meetings), iter(meetings)]

  def one(process):
    try:
      ask(fails_at if process else 0, num_processes=2, process_id=process)
    except _Cut:
      meetings[-1].abort()
      return "cut"
    except threading.BrokenBarrierError:
      return "alone"
    return "done"

  with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as threads:
    patch.setattr(processes, "join", lambda args: None)
    patch.setattr(processes, "wait", lambda name, args: next(turns[args.process_id]).wait())
    return list(threads.map(one, range(2)))


def test_processes_share_a_run_and_go_on_with_it(ask, tmp_path, capsys):
  ask()
  expected = [_key(line) for line in _run_files(tmp_path / "run")[0]]
  for cut in (0, 1, 2, 4):
    shutil.rmtree(tmp_path / "run")
    if cut:
      assert _together(ask, cut) == ["alone", "cut"]
      names = {file.name for file in (tmp_path / "run").iterdir()}
      assert {"manifest.json", "predictions-0.jsonl"} <= names and "results.jsonl" not in names
    capsys.readouterr()
    assert _together(ask) == ["done", "done"]
    assert capsys.readouterr().out.count("predictions.jsonl, manifest.json are in") == 1
    lines, rows = _run_files(tmp_path / "run")
    assert [_key(line) for line in lines] == expected and len(rows) == 4
    assert not list((tmp_path / "run").glob("predictions-*"))


def test_one_process_ends_what_two_began(ask, tmp_path):
  assert _together(ask, 3) == ["alone", "cut"]
  kept = len(predictions.read_run(tmp_path / "run"))
  assert 0 < kept < 14
  ask()
  assert [file.name for file in (tmp_path / "run").glob("predictions*")] == ["predictions.jsonl"]
  assert len(predictions.read_run(tmp_path / "run")) == 14


@pytest.mark.parametrize(
  ("change", "complaint"),
  [
    (lambda one: one._replace(task="lockup"), "unknown task 'lockup'"),
    (lambda one: one._replace(id="l1"), "task lookup: two examples have the id 'l1'"),
    (lambda one: one._replace(new_tokens=500), "prompt and answer of 540 tokens exceed the 128"),
    (lambda one: one._replace(stop_ids=(7,)), "task lookup: its examples end at different tokens"),
  ],
)
def test_bad_examples(ask, tmp_path, change, complaint):
  examples = _examples()
  with pytest.raises(ValueError, match=complaint):
    ask(examples=[change(examples[0]), *examples[1:]])
  with pytest.raises(ValueError, match="no examples"):
    ask(examples=[])
  assert not (tmp_path / "run").exists()
