"""Runs that are cut short, gone on with or shared: every example is answered once, and the same."""

from __future__ import annotations

import json
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from eval import cli, grid, harness, lines, predictions, processes, results, resume, summary
from kvjax import Generation
from tests.eval import questions


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return questions.write_model(tmp_path_factory.mktemp("model"))


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
    grid.main(
      args, lambda loaded: (questions.examples() if examples is None else examples, {"book": data})
    )
    return list(asked)

  return run


def _run_files(folder):
  texts = (folder / "predictions.jsonl").read_text().splitlines()
  rows = results.read_rows(folder)
  free = {"compile_s": None}
  return sorted(texts), [row | free for row in rows]


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
  return lines.key_of(prediction), prediction["pred"], prediction["score"]


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


def test_files_of_policies_are_part_of_the_run(ask, tmp_path, monkeypatch):
  policy, profile = tmp_path / "mine.py", tmp_path / "measured.npz"
  helper = tmp_path / "helper_of_mine.py"  # which it imports
  monkeypatch.syspath_prepend(tmp_path)
  helper.write_text("from kvjax.policies.dense import dense")
  code = "from helper_of_mine import dense\ndef mine(*, profile='', late=0):\n  return dense()"
  policy.write_text(code)
  profile.write_bytes(b"1")
  specs = [f"{policy}:profile={profile}"]
  assert ask(policies=specs)
  assert {str(policy), str(profile), str(helper)} < set(_manifest(tmp_path)["data"])
  assert ask(policies=specs) == []
  profile.write_bytes(b"2")
  with pytest.raises(ValueError, match=f"another run: the data {profile} was"):
    ask(policies=specs)
  profile.write_bytes(b"1")
  helper.write_text("from kvjax.policies.dense import dense  # another")
  with pytest.raises(ValueError, match=f"another run: the data {helper} was"):
    ask(policies=specs)
  helper.write_text("from kvjax.policies.dense import dense")
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
  complaint = r"another process is writing to .*run; wait for it, or"
  with resume.sole_writer(tmp_path / "run"), pytest.raises(ValueError, match=complaint):
    ask()
  assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
  assert len(ask()) == 6  # what the first had locked is free again


def test_a_run_that_begins_is_the_only_one_too(ask, tmp_path, monkeypatch):
  append_lines, tried = results.append_lines, []

  def append(path, found):
    append_lines(path, found)
    with (
      pytest.raises(ValueError, match="another process is writing"),
      resume.sole_writer(path.parent),
    ):
      pass
    tried.append(path)

  monkeypatch.setattr(results, "append_lines", append)
  assert len(ask()) == len(tried) == 8


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
    texts, rows = _run_files(tmp_path / "run")
    assert [_key(line) for line in texts] == expected and len(rows) == 4
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
  examples = questions.examples()
  with pytest.raises(ValueError, match=complaint):
    ask(examples=[change(examples[0]), *examples[1:]])
  with pytest.raises(ValueError, match="no examples"):
    ask(examples=[])
  assert not (tmp_path / "run").exists()
