"""Who may import whom: one table, held against every import and against every BUILD file."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up; a unit may import the units of the layers below its own, and itself.
LAYERS = (
  ("kvjax.types", "kvjax.config"),
  ("kvjax.cache", "kvjax.eviction"),
  ("kvjax.policies", "kvjax.stores", "kvjax.profiling"),
  ("kvjax.opkv", "kvjax.bidaw"),
  ("kvjax.engine",),
  ("kvjax.sim",),
)
LIBRARY = tuple(unit for layer in LAYERS for unit in layer)
BESIDE = {  # unit -> what it may import besides itself
  "pallas_kernels": (),
  "models": LAYERS[0],
  "kvjax": LIBRARY,  # kvjax/__init__.py
  "eval": (*LIBRARY, "kvjax", "models", "pallas_kernels"),
  "scripts": (*LIBRARY, "kvjax", "models", "pallas_kernels", "eval"),
  "tests": (*LIBRARY, "kvjax", "models", "pallas_kernels", "eval", "scripts"),
}
# Units that may import only these packages of others (and the standard library).
OTHERS = {"pallas_kernels": ("jax", "numpy"), "kvjax.eviction": ("numpy",)}
POLICY_LINES = 150  # of a file of kvjax/policies; what several need has a file of its own
TOP = ("kvjax", "pallas_kernels", "models", "eval", "scripts", "tests")


def allowed_imports() -> dict[str, set[str]]:
  """The table, written out: unit -> the units that it may import."""
  table = {unit: {unit, *others} for unit, others in BESIDE.items()}
  below: set[str] = set()
  for depth, layer in enumerate(LAYERS):
    kernels = {"pallas_kernels"} if depth else set()
    for unit in layer:
      table[unit] = below | kernels | {unit}
    below |= set(layer)
  table["kvjax.types"].add("kvjax.config")
  table["kvjax.policies"].add("kvjax.profiling")  # a profile is an option of theirs
  return table


ALLOWED = allowed_imports()


def unit_of(module: str) -> str:
  """The unit that a dotted name of ours belongs to: two parts inside kvjax, one elsewhere."""
  parts = module.split(".")
  return ".".join(parts[:2]) if parts[0] == "kvjax" else parts[0]


def module_of(path: Path, root: Path) -> str:
  """The dotted name of a source file."""
  parts = path.relative_to(root).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(root: Path, module: str) -> bool:
  path = root.joinpath(*module.split("."))
  return path.is_dir() or path.with_suffix(".py").is_file()


def imported_modules(path: Path, root: Path) -> list[tuple[int, str]]:
  """(line, dotted name) of every import of a file, wherever it stands, relative ones resolved."""
  package = list(path.relative_to(root).parent.parts)
  found = []
  for node in ast.walk(ast.parse(path.read_text("utf-8"))):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = package[: len(package) - node.level + 1] if node.level else []
      source = ".".join([*base, *filter(None, [node.module])])
      for alias in node.names:  # `from a import b` imports a.b where that is a module
        name = f"{source}.{alias.name}"
        found.append((node.lineno, name if is_module(root, name) else source))
  return found


def source_files(root: Path) -> list[Path]:
  return sorted(path for top in TOP for path in (root / top).rglob("*.py"))


def bad_imports(root: Path) -> list[str]:
  """One line for every import of the tree under `root` that the table does not allow."""
  bad = []
  for path in source_files(root):
    unit = unit_of(module_of(path, root))
    where = path.relative_to(root)
    if unit not in ALLOWED:
      bad.append(f"{where}: {unit} is not in the table of tests/test_layering.py")
      continue
    for line, module in imported_modules(path, root):
      top = module.split(".")[0]
      if top in TOP:
        if unit_of(module) not in ALLOWED[unit]:
          bad.append(f"{where}:{line}: {unit} may not import {module}")
      elif unit in OTHERS and top not in (*OTHERS[unit], *sys.stdlib_module_names):
        bad.append(f"{where}:{line}: {unit} may import {', '.join(OTHERS[unit])}, not {top}")
  return bad


def label_of(unit: str) -> str:
  """The Bazel target of a unit."""
  return "//kvjax:types" if unit in LAYERS[0] else "//" + unit.replace(".", "/")


def build_rules(package: Path) -> dict[str, dict]:
  """target name -> attributes that are plain values, of a BUILD file (its syntax is Python's)."""
  rules = {}
  for node in ast.parse((package / "BUILD").read_text("utf-8")).body:
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not call.keywords:
      continue
    values = {}
    for keyword in call.keywords:
      try:
        values[keyword.arg] = ast.literal_eval(keyword.value)
      except ValueError:
        continue  # glob(...)
    rules[values.get("name", "")] = values
  return rules


def built_units(root: Path) -> list[str]:
  """The units of the table that have a BUILD file; types and config share that of kvjax."""
  return sorted(
    unit
    for unit in ALLOWED
    if unit in LAYERS[0] or root.joinpath(*unit.split("."), "BUILD").is_file()
  )


def library_of(unit: str, root: Path) -> dict:
  package, _, name = label_of(unit).removeprefix("//").partition(":")
  return build_rules(root / package)[name or package.split("/")[-1]]


def group_packages(label: str, root: Path) -> set[str]:
  """The packages, as dotted units, that one entry of `visibility` stands for."""
  package, name = label.removeprefix("//").split(":")
  package = package or "kvjax"  # the groups include each other by their short names
  if name in ("__pkg__", "__subpackages__"):
    return {package.replace("/", ".")}
  if name == "private":
    return set()
  group = build_rules(root / package)[name]
  units = {p.removeprefix("//").removesuffix("/...").replace("/", ".") for p in group["packages"]}
  return units.union(*(group_packages(other, root) for other in group.get("includes", ())))


def bad_builds(root: Path) -> list[str]:
  """One line for every library of a BUILD file that says something else than the table."""
  units = built_units(root)
  bad = []
  for unit in units:
    label, library = label_of(unit), library_of(unit, root)
    want = {label_of(other) for other in ALLOWED[unit] if other in units} - {label}
    have = {f"//kvjax{dep}" if dep[0] == ":" else dep for dep in library.get("deps", ())}
    if have != want:
      bad.append(f"{label}: deps should be {sorted(want)}, are {sorted(have)}")
    same_package = {unit, *LAYERS[0], "kvjax"} if unit in LAYERS[0] else {unit}
    users = {other for other in ALLOWED if unit in ALLOWED[other]} - same_package
    seen = set().union(*(group_packages(entry, root) for entry in library["visibility"]))
    if seen != users:
      bad.append(f"{label}: should be visible to {sorted(users)}, is to {sorted(seen)}")
  return bad


def long_policies(root: Path) -> list[str]:
  """Public policy files with more lines than a method may take, of the tree under root."""
  files = (root / "kvjax" / "policies").glob("[!_]*.py")
  return sorted(p.name for p in files if len(p.read_text("utf-8").splitlines()) > POLICY_LINES)


def test_the_tree_has_no_import_against_the_layering():
  assert source_files(ROOT)
  assert bad_imports(ROOT) == []


def test_build_files_say_the_same():
  assert bad_builds(ROOT) == []


def test_every_package_has_a_build_file():
  packages = {ROOT.joinpath(*unit_of(module_of(p, ROOT)).split(".")) for p in source_files(ROOT)}
  missing = [p.name for p in packages if p.is_dir() and not (p / "BUILD").is_file()]
  assert missing == []


def test_a_method_is_a_short_file(tmp_path):
  assert long_policies(ROOT) == []
  (tmp_path / "kvjax/policies").mkdir(parents=True)
  for name, lines in (("short", POLICY_LINES), ("long", POLICY_LINES + 1), ("_shared", 999)):
    (tmp_path / f"kvjax/policies/{name}.py").write_text("x = 0\n" * lines)
  assert long_policies(tmp_path) == ["long.py"]


@pytest.mark.parametrize(
  ("path", "source", "complaint"),
  [
    ("kvjax/types.py", "from kvjax.cache import pools", "kvjax.types may not import kvjax.cache"),
    ("kvjax/config.py", "import kvjax.types", "kvjax.config may not import kvjax.types"),
    ("kvjax/cache/pools.py", "from kvjax import stores", "kvjax.cache may not import kvjax.stores"),
    ("kvjax/stores/a.py", "from ..policies import x", "kvjax.stores may not import kvjax.policies"),
    ("kvjax/stores/a.py", "from .. import policies", "kvjax.stores may not import kvjax.policies"),
    ("kvjax/engine/a.py", "def f():\n  import models.llama", "kvjax.engine may not import models"),
    ("kvjax/policies/a.py", "if x:\n  from kvjax import y", "kvjax.policies may not import kvjax"),
    ("kvjax/__init__.py", "from models import llama", "kvjax may not import models"),
    ("models/llama.py", "from kvjax.cache import pools", "models may not import kvjax.cache"),
    ("pallas_kernels/a.py", "from kvjax import types", "pallas_kernels may not import kvjax.types"),
    ("pallas_kernels/a.py", "import flax", "pallas_kernels may import jax, numpy, not flax"),
    ("eval/a.py", "from scripts import generate", "eval may not import scripts"),
    ("kvjax/new/a.py", "", "kvjax.new is not in the table"),
  ],
)
def test_planted_imports_are_caught(tmp_path, path, source, complaint):
  for unit in LIBRARY:
    (tmp_path / unit.replace(".", "/")).mkdir(parents=True)
  file = tmp_path / path
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(source)
  found = bad_imports(tmp_path)
  assert len(found) == 1
  assert complaint in found[0]


@pytest.mark.parametrize(
  ("path", "source"),
  [
    ("kvjax/types.py", "from kvjax.config import CacheConfig\nimport jax"),
    ("kvjax/engine/a.py", "from ..stores import resident\nfrom . import b\nimport pallas_kernels"),
    ("models/llama.py", "from kvjax.types import Model\nfrom models import blocks"),
    ("kvjax/__init__.py", "from kvjax.engine import generate\nfrom .policies import REGISTRY"),
    ("pallas_kernels/a.py", "import functools\nimport jax.numpy as jnp\nimport numpy as np"),
    ("scripts/a.py", "import torch\nimport kvjax\nfrom eval import tasks"),
  ],
)
def test_allowed_imports_pass(tmp_path, path, source):
  file = tmp_path / path
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(source)
  assert bad_imports(tmp_path) == []


def test_a_wrong_build_file_is_caught(tmp_path):
  for unit in built_units(ROOT):
    package = Path(label_of(unit).removeprefix("//").partition(":")[0])
    (tmp_path / package).mkdir(parents=True, exist_ok=True)
    (tmp_path / package / "BUILD").write_text((ROOT / package / "BUILD").read_text("utf-8"))
  assert bad_builds(tmp_path) == []
  build = tmp_path / "kvjax/cache/BUILD"
  build.write_text(build.read_text("utf-8").replace('"//pallas_kernels"', '"//kvjax/stores"'))
  (complaint,) = bad_builds(tmp_path)
  assert "//kvjax/cache: deps should be" in complaint
