"""How LongBench and L-Eval compare an answer with what was expected: text in, 0 to 1 out.

Each function gives what the official code gives, with its quirks, to the last bit: LongBench's
metrics.py (github.com/THUDM/LongBench, commit 2e00731) and L-Eval's Evaluation/f1.py and rouge.py
(github.com/OpenLMLab/LEval, commit cd34b05). `eval.exam` has L-Eval's metric for questions with one
right answer. What is done to an answer first (its first line and so on) and which of several
references counts is in `eval.longbench` and `eval.leval`.

The packages rouge, rouge-score and jieba are loaded when a metric first needs them.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import logging
import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

# The official list, so that the same characters are dropped.
_ZH_PUNCTUATION = (
  "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"  # noqa: RUF001
  "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_DROPPED = str.maketrans("", "", string.punctuation)
_DROPPED_ZH = str.maketrans("", "", string.punctuation + _ZH_PUNCTUATION)
_NUMBER = re.compile(r"\d+")
# Python frames that the official script leaves to the rouge package: the usual limit of 1,000, less
# the script, its scorer and its metric, of which Chinese tasks have two.
_FRAMES, _FRAMES_ZH = 1000 - 3, 1000 - 4


def qa_f1(prediction: str, answer: str) -> float:
  """F1 of the words that both have, of normalised texts; L-Eval's f1 is the same."""
  return _f1(normalize(prediction.lower()).split(), normalize(answer.lower()).split())


def qa_f1_zh(prediction: str, answer: str) -> float:
  """F1 of the words that jieba finds in Chinese texts, without punctuation and blanks."""
  return _f1(_words_zh(prediction), _words_zh(answer))


def rouge_l(prediction: str, answer: str) -> float:
  """F of ROUGE-L as the package rouge 1.0.1 has it, which is not Google's.

  It cuts sentences at full stops and counts different words of the longest common subsequences. A
  text without a word gives 0, as does whatever else the package cannot do. The latter is part of
  the benchmark: it follows a common subsequence recursively, so that sentences with about 1,000
  words together (long Chinese ones, which have no full stop) exceed Python's limit and give 0.
  """
  return _rouge_l(prediction, answer, _FRAMES)


def rouge_l_zh(prediction: str, answer: str) -> float:
  """`rouge_l` of the words that jieba finds in Chinese texts."""
  return _rouge_l(_cut_zh(prediction), _cut_zh(answer), _FRAMES_ZH)


def rouge(prediction: str, reference: str) -> dict[str, float]:
  """F of Google's ROUGE without stemming, as L-Eval takes it: rouge1, rouge2, rougeL."""
  scores = _rouge_scorer().score(reference, prediction)
  return {name: float(score.fmeasure) for name, score in scores.items()}


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
  """One, divided by the number of classes that the prediction names, if the right one is there.

  Classes that are part of the right one's name do not count. Of two such neighbours the official
  code passes over the second, since it removes from the list that it goes through; so does this.

  Raises:
    ValueError: there are no classes.
  """
  if not classes:
    raise ValueError("no classes to choose from; the record needs all_classes")
  named = [name for name in classes if name in prediction]
  for name in named:
    if name in answer and name != answer:
      named.remove(name)
  return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
  """Share of the numbers in the prediction that are the answer."""
  numbers = _NUMBER.findall(prediction)
  return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
  """Share of the numbers in the prediction that are N, where the answer is "Paragraph N".

  Raises:
    ValueError: the answer is something else.
  """
  return count(prediction, _paragraph(r"Paragraph (\d+)", answer))


def retrieval_zh(prediction: str, answer: str) -> float:
  """`retrieval` for answers of the kind "段落N"."""
  return count(prediction, _paragraph(r"段落(\d+)", answer))


def code_similarity(prediction: str, answer: str) -> float:
  """Likeness of a line of code and the first one of a prediction, in whole hundredths.

  The first line without a backtick, # or // counts. Twice the matching characters, divided by all
  of them (difflib); empty texts are alike if both are.
  """
  lines = prediction.lstrip("\n").split("\n")
  line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
  if line == answer:
    return 1.0
  if not line or not answer:
    return 0.0
  return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def normalize(text: str) -> str:
  """Without punctuation, articles in lower case, and blanks but for one between words."""
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.translate(_DROPPED)).split())


def _f1(given: Sequence[str], expected: Sequence[str]) -> float:
  same = (Counter(given) & Counter(expected)).total()
  if not same:
    return 0.0
  precision, recall = same / len(given), same / len(expected)
  return 2 * precision * recall / (precision + recall)


def _rouge_l(prediction: str, answer: str, frames: int) -> float:
  package = _package("rouge").Rouge(metrics=["rouge-l"])
  with _limited(frames):
    try:
      return package.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except Exception:
      return 0.0


def _cut_zh(text: str) -> str:
  return " ".join(_jieba().cut(text, cut_all=False))


def _words_zh(text: str) -> list[str]:
  words = _jieba().cut(text, cut_all=False)
  bare = ("".join(word.lower().translate(_DROPPED_ZH).split()) for word in words)
  return [word for word in bare if word]


def _paragraph(pattern: str, answer: str) -> str:
  found = re.search(pattern, answer)
  if found is None:
    raise ValueError(f"the answer {answer!r} does not name a paragraph, expected {pattern!r}")
  return found[1]


@contextlib.contextmanager
def _limited(frames: int) -> Generator[None]:
  """Leaves so many Python frames to what is called within, however deep the caller is."""
  before, frame, depth = sys.getrecursionlimit(), sys._getframe(2), 0
  while frame is not None:
    frame, depth = frame.f_back, depth + 1
  sys.setrecursionlimit(depth + frames)
  try:
    yield
  finally:
    sys.setrecursionlimit(before)


def _package(name: str) -> Any:
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # old packages: deprecated imports, escapes
      return importlib.import_module(name)
  except ImportError as error:
    missing = name.partition(".")[0]
    raise ValueError(
      f"this metric needs the package {missing}; install it with pip install kvjax[eval]"
    ) from error


@functools.cache
def _jieba() -> Any:
  jieba = _package("jieba")
  jieba.setLogLevel(logging.WARNING)  # it tells at length that it reads its dictionary
  return jieba


@functools.cache
def _rouge_scorer() -> Any:
  scorer = _package("rouge_score.rouge_scorer")
  return scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
