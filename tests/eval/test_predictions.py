"""The file of answers: whole lines, whatever happens; what is wrong with one that is not."""

from __future__ import annotations

import errno
import json

import pytest

from eval import lines, predictions, results

ANSWER = {
  "policy": "quest",
  "store": "resident",
  "budget_tokens": 64,
  "page_size": 16,
  "task": "lookup",
  "id": "3",
  "pred": "漢字\u2028 and a line\nmore",
  "answers": ["a"],
  "all_classes": None,
  "length": None,
  "score": 0.5,
  "stopped": True,
  "prompt_tokens": 40,
  "output_tokens": 3,
  "ttft_s": None,
  "step_s": [0.1, 0.2],
  "batch": "3",
}
OTHERS = [ANSWER | {"id": "4"}, ANSWER | {"policy": "dense", "budget_tokens": None}]


def test_what_is_written_is_read(tmp_path):
  path = tmp_path / "predictions.jsonl"
  results.append_lines(path, [ANSWER])
  results.append_lines(path, OTHERS)
  assert predictions.read(path) == [ANSWER, *OTHERS]
  assert len(path.read_bytes().splitlines()) == 3


def test_the_first_of_several_answers_counts(tmp_path):
  path = tmp_path / "predictions.jsonl"
  results.append_lines(path, [ANSWER, OTHERS[0], ANSWER | {"pred": "another"}])
  assert predictions.read(path) == [ANSWER, OTHERS[0]]


def test_a_line_that_was_being_written_is_cut_off(tmp_path):
  path = tmp_path / "predictions.jsonl"
  results.append_lines(path, [ANSWER, *OTHERS])
  whole = path.read_bytes()
  ends = [n for n, byte in enumerate(whole) if byte == ord("\n")]
  for size in (0, 1, ends[0], ends[0] + 1, ends[1] - 1, ends[1] + 2, len(whole) - 1, len(whole)):
    path.write_bytes(whole[:size])
    expected = [ANSWER, *OTHERS][: sum(end < size for end in ends)]
    assert predictions.read(path) == expected
    lines.cut_torn_line(path)
    assert whole.startswith(path.read_bytes())
    results.append_lines(path, OTHERS[:1])
    assert predictions.read(path) == (expected if OTHERS[0] in expected else [*expected, OTHERS[0]])
  lines.cut_torn_line(tmp_path / "none")
  assert not (tmp_path / "none").exists()


def test_a_full_disk_takes_a_batch_back(tmp_path, monkeypatch):
  path = tmp_path / "predictions.jsonl"
  results.append_lines(path, [ANSWER])

  def full(descriptor):
    raise OSError(errno.ENOSPC, "disk full")

  with monkeypatch.context() as patch:
    patch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full") as caught:
      results.append_lines(path, OTHERS)
  assert (caught.value.filename, caught.value.errno) == (str(path), errno.ENOSPC)
  assert predictions.read(path) == [ANSWER]
  results.append_lines(path, OTHERS)
  assert predictions.read(path) == [ANSWER, *OTHERS]


@pytest.mark.parametrize(
  ("line", "complaint"),
  [
    ("{", "not JSON"),
    ("", "not JSON"),
    ("\udcff", "not JSON"),
    ("[]", "not a JSON object"),
    (json.dumps({k: v for k, v in ANSWER.items() if k != "stopped"}), "no field 'stopped'"),
    (json.dumps(ANSWER | {"score": "high"}), "score is a str, expected float or int"),
    (json.dumps(ANSWER | {"id": 3}), "id is a int, expected str"),
    ("[" * 100_000, "not JSON"),
    (json.dumps(ANSWER | {"step_s": [0.1, "fast"]}), "step_s is not a list of float or int"),
    (json.dumps(ANSWER | {"step_s": [10**400]}), "step_s is not a list of float or int"),
    (json.dumps(ANSWER | {"answers": [None]}), "answers is not a list of str"),
    (json.dumps(ANSWER | {"output_tokens": True}), "output_tokens is a bool, expected int"),
  ],
)
def test_bad_lines(tmp_path, line, complaint):
  path = tmp_path / "predictions.jsonl"
  results.append_lines(path, [ANSWER])
  with path.open("ab") as file:
    file.write(line.encode(errors="surrogateescape") + b"\n")
  with pytest.raises(ValueError, match=f"predictions.jsonl, line 2: {complaint}; mend or") as error:
    predictions.read(path)
  assert "\n" not in str(error.value)


def test_files_of_processes_become_one(tmp_path):
  alone = predictions.file_of(tmp_path, 0, 1)
  parts = [predictions.file_of(tmp_path, process, 2) for process in range(2)]
  results.append_lines(alone, OTHERS[:1])
  results.append_lines(parts[0], OTHERS[1:])
  results.append_lines(parts[1], [ANSWER, OTHERS[0]])
  with parts[1].open("ab") as file:
    file.write(b'{"policy": "qu')
  found = predictions.read_run(tmp_path)
  assert found == [*OTHERS, ANSWER]
  predictions.merge(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["predictions.jsonl"] == [alone.name]
  assert predictions.read_run(tmp_path) == found
  predictions.merge(tmp_path)
  assert predictions.read(alone) == found
