"""L-Eval's exam metric: finds the answer within what a model wrote, and compares it.

Follows Evaluation/auto_eval.py and em.py of github.com/OpenLMLab/LEval (commit cd34b05), quirks
included; which finder belongs to which task is in `eval.leval`.
"""

from __future__ import annotations

import itertools
import re

from eval import metrics

_LETTERS = "ABCD"
_FACT = "[fact:"
# What surrounds a value in an answer about code, dropped in this order, within words too.
_SAID_OF_CODE = (
  *("will be", "of the code", "is", "would be", "the value of", "the result of", "printed"),
)
_CODE_WORDS = 3  # words that an answer may have beside those of the reference


def exact_match(prediction: str, reference: str) -> float:
  """1 or 0, or 0.25 for some of several right letters.

  * A reference of letters A to D only: all of them 1, no wrong one 0.25 (also for none at all).
  * Two numbers: equal or not.
  * Otherwise the prediction has to contain the reference, in either case, blanks aside.
  """
  right = metrics.normalize(reference)
  if all(letter in _LETTERS for letter in right):
    given = metrics.normalize(prediction)
    if given == right:
      return 1.0
    return 0.25 if set(given) <= set(right) else 0.0
  try:
    return float(float(prediction) == float(reference))
  except ValueError:
    return float(_squeezed(reference) in _squeezed(prediction))


def letters(text: str, several: bool) -> str:
  """The letters that an answer to a question with options A to D chooses.

  "None" for an empty answer and "A" for one without any letter: the official code guesses.

  Args:
    text: the answer.
    several: more than one option may be right (coursera). Otherwise the first capital A to D of the
      text counts, even as the beginning of a word ("According to the text, (C)" chooses A).
  """
  if not text.strip():
    return "None"
  if text in _LETTERS:
    return text
  if not several and (first := next((one for one in text if one in _LETTERS), None)):
    return first
  leading = "".join(itertools.takewhile(_LETTERS.__contains__, text))
  if len(leading) > 1:
    return "".join(sorted(set(leading)))
  # Single capitals before a blank, a full stop or a bracket; what follows is another question.
  rest = text[len(leading) :].partition("Question")[0]
  options = leading + "".join(re.findall(r"[A-Z](?=[\s.)])", rest))
  if chosen := sorted(set(options) & set(_LETTERS)):
    return "".join(chosen)
  run = re.search(f"[{_LETTERS}]+", rest)
  return run[0] if run else "A"


def right_letters(reference: str) -> str:
  """The letters of the first word of a reference as "(B) Their own."; "A" if it has none.

  Raises:
    ValueError: the reference is blank.
  """
  words = reference.split()
  if not words:
    raise ValueError("the reference is blank, expected letters from A to D")
  return re.sub(f"[^{_LETTERS}]", "", words[0]) or "A"


def number(text: str) -> str:
  """Digits of the number behind "The answer is", up to a decimal point.

  Without these words it is the last word with a digit of the first paragraph; words end at spaces
  only. Signs are dropped.
  """
  said = re.search(r"The answer is (\S+)", text)
  if said:
    word = said[1]
  else:
    words = text.partition("\n\n")[0].split(" ")
    word = next((one for one in reversed(words) if any(map(str.isdigit, one))), "")
  return "".join(filter(str.isdigit, word.partition(".")[0]))


def code_value(text: str) -> str:
  """A printed value with its blanks and quotes unified; ".0" is dropped wherever it stands."""
  text = re.sub(r"\s+", " ", text)
  for mark in (",", "'", "\\", ".0"):
    text = text.replace(mark, "")
  for before, after in (("] [", "]["), ("[ [", "[["), ("] ]", "]]")):
    text = text.replace(before, after)
  return text


def code_answer(text: str, reference: str) -> str:
  """The words that may hold the value in an answer about code.

  Three more than the reference has: the first ones behind the last "the final output", or the last
  ones of the answer.
  """
  text = code_value(text)
  for phrase in _SAID_OF_CODE:
    text = text.replace(phrase, "")
  most = len(reference.split()) + _CODE_WORDS
  _, output, after = text.rpartition("the final output")
  words = re.split(r"\s+", after)
  return " ".join(words[:most] if output else words[-most:])


def judgement(text: str) -> str:
  """The first "true" or "false" in a text, "<error>" without any: nothing is guessed here."""
  for word in text.lower().split():
    if "true" in word:
      return "true"
    if "false" in word:
      return "false"
  return "<error>"


def judgements(prediction: str, reference: str) -> float:
  """Score of a statement about a story: is it true in the story, is it true in the real world.

  Both texts are "True [fact: False]" in official files, where each half counts half. Our own runs
  ask twice, with one word as the reference.

  Raises:
    ValueError: the reference has both halves and the prediction only one.
  """
  story, fact = halves(reference)
  said, said_of_world = halves(prediction)
  if fact is None:
    return exact_match(judgement(prediction), story)
  if said_of_world is None:
    raise ValueError(f"the prediction {prediction[:40]!r} has no '[fact: ...]', as sci_fi's have")
  return (exact_match(judgement(said), story) + exact_match(judgement(said_of_world), fact)) / 2


def halves(text: str) -> tuple[str, str | None]:
  """Both parts of "True [fact: False]" in lower case; None for the second where there is none."""
  story, *facts = text.lower().split(_FACT)
  return story.strip(), facts[0][:-1].strip() if facts else None  # without the bracket


def _squeezed(text: str) -> str:
  return text.lower().replace(" ", "")
