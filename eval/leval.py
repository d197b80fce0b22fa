"""L-Eval: 20 tasks of questions about long documents, and how their answers are scored.

Scores are those of Evaluation/auto_eval.py of github.com/OpenLMLab/LEval (commit cd34b05), answer
by answer. Documents that the authors have judged by people or by GPT-4 are left out, as that script
does. `eval.leval_prompts` puts the questions.

The data comes as its authors give it, under GPL-3.0 and no part of this project: TASK.jsonl in a
folder, or in the folders of their repository or of their data set on the hub.

sci_fi asks twice, whether a statement is true in the story and in the real world. In official files
an answer is "True [fact: False]"; here each half is an example of its own, so that their mean is
the official score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from eval import exam, metrics

FIELDS = {"input": str, "instructions": list[str], "outputs": list[str], "evaluation": str}
METRICS = ("exam", "f1", "rouge")  # of the field evaluation; others need a judge
FOLDERS = (  # where TASK.jsonl may lie
  *("", "Closed-ended-tasks", "Open-ended-tasks", "closed", "open"),
  *("LEval-data/Closed-ended-tasks", "LEval-data/Open-ended-tasks"),
  *("LEval/Exam", "LEval/Generation"),
)


class Task(NamedTuple):
  """What differs between tasks.

  Attributes:
    metric: name of the metric.
    compare: prediction and reference -> 0 to 1.
    wording: how a question is put: "continue" behind the document alone, "exam" or "open".
  """

  metric: str
  compare: Callable[[str, str], float]
  wording: str


def _options(several: bool) -> Callable[[str, str], float]:
  return lambda given, right: exam.exact_match(
    exam.letters(given, several), exam.right_letters(right)
  )


def _number(given: str, right: str) -> float:
  return exam.exact_match(exam.number(given), exam.number(right))


def _code(given: str, right: str) -> float:
  return exam.exact_match(exam.code_answer(given, right), exam.code_value(right))


def _rouge_l(given: str, right: str) -> float:
  return metrics.rouge(given, right)["rougeL"]


_F1, _ROUGE = (
  (
    *("financial_qa", "legal_contract_qa", "multidoc_qa", "narrative_qa", "natural_question"),
    "scientific_qa",
  ),
  (
    *("gov_report_summ", "meeting_summ", "news_summ", "paper_assistant", "patent_summ"),
    *("review_summ", "tv_show_summ"),
  ),
)
TASKS = {
  "coursera": Task("exact_match", _options(several=True), "exam"),
  "quality": Task("exact_match", _options(several=False), "exam"),
  "tpo": Task("exact_match", _options(several=False), "exam"),
  "gsm100": Task("exact_match", _number, "continue"),
  "codeU": Task("exact_match", _code, "continue"),
  "topic_retrieval_longchat": Task("exact_match", exam.exact_match, "continue"),
  "sci_fi": Task("exact_match", exam.judgements, "exam"),
  **{name: Task("f1", metrics.qa_f1, "open") for name in _F1},
  **{name: Task("rougeL", _rouge_l, "open") for name in _ROUGE},
}
NAMES = tuple(TASKS)


def task_of(name: str) -> Task:
  """The task of a name.

  Raises:
    ValueError: no such task.
  """
  if name not in TASKS:
    raise ValueError(f"unknown task {name!r}, expected some of {', '.join(TASKS)}")
  return TASKS[name]


def score(name: str, prediction: str, references: Sequence[str]) -> float:
  """How right an answer is, 0 to 1; ROUGE-L where the metric is ROUGE.

  The official total of a ROUGE task is the geometric mean of the means of ROUGE-1, 2 and L, which
  no record has: `eval.score` computes it.

  Raises:
    ValueError: no such task, or a prediction or reference of the wrong kind.
  """
  compare = task_of(name).compare
  return max((compare(prediction, reference) for reference in references), default=0.0)


def find(data_dir: Path, name: str) -> Path:
  """The file of a task, in one of `FOLDERS`.

  Raises:
    ValueError: no such task, or no such file.
  """
  task_of(name)
  data_dir = data_dir.expanduser()
  paths = (data_dir / folder / f"{name}.jsonl" for folder in FOLDERS)
  found = next((path for path in paths if path.is_file()), None)
  if found is None:
    raise ValueError(
      f"{data_dir / name}.jsonl is missing, also in {', '.join(FOLDERS[1:5])}; --data_dir has to "
      "hold L-Eval's own files, which --download fetches"
    )
  return found
