"""LongBench: 21 tasks over long texts, and 13 of them with even lengths (LongBench-E).

Scores are those of eval.py and metrics.py of github.com/THUDM/LongBench, version 1 (commit
2e00731), answer by answer. `eval.longbench_prompts` puts the questions. The data comes as its
authors give it: a folder with TASK.jsonl, and TASK_e.jsonl of LongBench-E, whose tasks are called
TASK_e here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from eval import metrics

FIELDS = {
  "input": str,
  "context": str,
  "answers": list[str],
  "length": int,
  "all_classes": list[str] | None,
}
BUCKETS = ("0-4k", "4-8k", "8k+")  # of LongBench-E, by the records' length in words


class Task(NamedTuple):
  """What differs between tasks.

  Attributes:
    metric: name of the metric.
    compare: prediction and one answer -> 0 to 1; with the classes as a third, where it classifies.
    new_tokens: most tokens of an answer.
    chat: the prompt goes through the model's chat template. Tasks with examples in their prompt,
      and those that complete code, are better off without, say the authors.
    first_line: only the first line of an answer counts, empty ones before it left out.
  """

  metric: str
  compare: Callable[..., float]
  new_tokens: int
  chat: bool = True
  first_line: bool = False


TASKS = {
  "narrativeqa": Task("f1", metrics.qa_f1, 128),
  "qasper": Task("f1", metrics.qa_f1, 128),
  "multifieldqa_en": Task("f1", metrics.qa_f1, 64),
  "multifieldqa_zh": Task("f1", metrics.qa_f1_zh, 64),
  "hotpotqa": Task("f1", metrics.qa_f1, 32),
  "2wikimqa": Task("f1", metrics.qa_f1, 32),
  "musique": Task("f1", metrics.qa_f1, 32),
  "dureader": Task("rouge_l", metrics.rouge_l_zh, 128),
  "gov_report": Task("rouge_l", metrics.rouge_l, 512),
  "qmsum": Task("rouge_l", metrics.rouge_l, 512),
  "multi_news": Task("rouge_l", metrics.rouge_l, 512),
  "vcsum": Task("rouge_l", metrics.rouge_l_zh, 512),
  "trec": Task("classification", metrics.classification, 64, chat=False, first_line=True),
  "triviaqa": Task("f1", metrics.qa_f1, 32, chat=False, first_line=True),
  "samsum": Task("rouge_l", metrics.rouge_l, 128, chat=False, first_line=True),
  "lsht": Task("classification", metrics.classification, 64, chat=False, first_line=True),
  "passage_count": Task("count", metrics.count, 32),
  "passage_retrieval_en": Task("retrieval", metrics.retrieval, 32),
  "passage_retrieval_zh": Task("retrieval", metrics.retrieval_zh, 32),
  "lcc": Task("code_similarity", metrics.code_similarity, 64, chat=False),
  "repobench-p": Task("code_similarity", metrics.code_similarity, 64, chat=False),
}
_WITH_LENGTHS = (
  *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec"),
  *("triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
TASKS_E = tuple(f"{name}_e" for name in _WITH_LENGTHS)
NAMES = (*TASKS, *TASKS_E)


def task_of(name: str) -> Task:
  """The task of a name, with or without "_e".

  Raises:
    ValueError: no such task.
  """
  if name not in NAMES:
    raise ValueError(f"unknown task {name!r}, expected some of {', '.join(NAMES)}")
  return TASKS[plain(name)]


def score(name: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
  """How right an answer is, 0 to 1: the best comparison with any of the right answers.

  Raises:
    ValueError: no such task, no classes where they are needed, or an answer of the wrong kind.
  """
  task = task_of(name)
  if task.first_line:
    prediction = prediction.lstrip("\n").partition("\n")[0]
  options = (classes,) if task.metric == "classification" else ()
  return max((task.compare(prediction, answer, *options) for answer in answers), default=0.0)


def bucket(length: int) -> str:
  """Which of `BUCKETS` a record of so many words belongs to."""
  return BUCKETS[(length >= 4000) + (length >= 8000)]


def find(data_dir: Path, name: str) -> Path:
  """The file of a task.

  Raises:
    ValueError: no such task, or no such file.
  """
  task_of(name)
  path = data_dir.expanduser() / f"{name}.jsonl"
  if not path.is_file():
    raise ValueError(
      f"{path} is missing; --data_dir has to hold LongBench's own files, which --download fetches"
    )
  return path


def plain(name: str) -> str:
  """The name without the "_e" of LongBench-E."""
  return name.removesuffix("_e")
