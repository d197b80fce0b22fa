"""The files of the user's own that policies are made of, for the sha256 of them in a manifest."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.policies import split_spec
from models.fetch import file_sha256

_OURS = ("kvjax", "models", "pallas_kernels", "eval", "scripts")  # the commit says which they are


def policy_files(specs: Sequence[str]) -> list[str]:
  """Paths, once each: .py files of policies, what they imported from beside them, and profiles.

  Args:
    specs: as on command lines. `make_policy` has run them: what was not imported then is no part.
  """
  found: list[str] = []
  for name, options in map(split_spec, specs):
    if name.endswith(".py") and Path(name).expanduser().is_file():
      found += [name, *_beside(Path(name))]
    profile = options.get("profile", "").strip("\"'").partition("#")[0]  # FILE#WHICH
    found += [profile] if profile and Path(profile).expanduser().is_file() else []
  return list(dict.fromkeys(found))


def policy_hashes(specs: Sequence[str]) -> dict[str, str]:
  """Path -> sha256 of `policy_files`."""
  return {name: file_sha256(Path(name).expanduser()) for name in policy_files(specs)}


def _beside(policy: Path) -> list[str]:
  """Paths of the modules of its own folder that a file imports, and that those import in turn."""
  folder, found = policy.parent, {}
  rest = [(policy.expanduser(), "")]
  while rest:
    for module in _imported(*rest.pop()):
      path = _path_in(folder.expanduser(), module)
      if path and path not in found and path != policy.expanduser():
        found[path] = str(folder / path.relative_to(folder.expanduser()))
        rest.append((path, sys.modules[module].__package__ or ""))
  return list(found.values())


def _imported(path: Path, package: str) -> Iterator[str]:
  """Names of modules that the source names in imports; some may be functions of such a module."""
  for node in ast.walk(ast.parse(path.read_bytes())):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      try:
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
      except ImportError:  # beyond its package, so that it cannot have run
        continue
      names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
    else:
      continue
    for parts in (name.split(".") for name in names):  # a.b.c imports a and a.b too
      yield from (".".join(parts[: place + 1]) for place in range(len(parts)))


def _path_in(folder: Path, module: str) -> Path | None:
  """The file of a module that was imported, if a file of this name in the folder is what it is."""
  origin = getattr(sys.modules.get(module), "__file__", None)
  if origin is None or module.partition(".")[0] in _OURS:
    return None
  plain = folder.joinpath(*module.split("."))
  files = (plain.with_suffix(".py"), plain / "__init__.py")
  return next((one for one in files if one.is_file() and one.samefile(origin)), None)
