"""Which files a policy of the user's own is made of."""

from __future__ import annotations

import sys

import pytest

from eval.policy_files import policy_files
from kvjax import make_policy

FILES = {
  "mine.py": """
    import json, kvjax, helper_a
    from helper_pack.inner import depth
    from helper_space import leaf
    from kvjax.policies.quest import quest
    def mine(budget_tokens=64, page_size=16):
      if budget_tokens < 0:
        import helper_unused
        from . import nothing
      return quest(budget_tokens, page_size)
    """,
  "helper_a.py": "from helper_b import size",
  "helper_b.py": "import helper_a, mine\nsize = 3",
  "helper_pack/__init__.py": "",
  "helper_pack/inner.py": "from . import other\nfrom .other import depth",
  "helper_pack/other.py": "depth = 2",
  "helper_pack/not_imported.py": "",
  "helper_space/leaf.py": "",
  "helper_unused.py": "",
  "json.py": "raise ImportError",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Some files; what is imported of them is forgotten afterwards."""
  for name, code in FILES.items():
    path = tmp_path / "my" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code.replace("\n    ", "\n"))
  monkeypatch.setattr(sys, "path", [str(tmp_path / "my"), *sys.path])
  before = set(sys.modules)
  yield tmp_path / "my"
  for name in set(sys.modules) - before:
    del sys.modules[name]


def test_what_a_policy_imported_from_beside_it_is_part_of_it(folder, monkeypatch):
  monkeypatch.chdir(folder.parent)
  specs = ["my/mine.py", "quest", "my/mine.py:budget_tokens=32"]
  for one in specs:
    make_policy(one)
  first, *others = policy_files(specs)
  assert first == "my/mine.py"
  helpers = ("a.py", "b.py", "pack/__init__.py", "pack/inner.py", "pack/other.py", "space/leaf.py")
  assert sorted(others) == [f"my/helper_{name}" for name in helpers]
  monkeypatch.chdir(folder)
  assert policy_files(["mine.py"])[0] == "mine.py" and "helper_a.py" in policy_files(["mine.py"])


def test_modules_of_the_same_name_elsewhere_are_none_of_it(folder, tmp_path):
  make_policy(str(folder / "mine.py"))
  other = tmp_path / "other"
  other.mkdir()
  for name in ("mine.py", "helper_a.py"):  # what was imported is the one in the first folder
    (other / name).write_text("import helper_a")
  assert policy_files([str(other / "mine.py")]) == [str(other / "mine.py")]


def test_profiles_and_files_that_are_not_there(tmp_path):
  (tmp_path / "a.npz").touch()
  specs = [f"omnikv:profile={tmp_path}/a.npz#which", f"omnikv:profile={tmp_path}/b.npz", "none.py"]
  assert policy_files(specs) == [f"{tmp_path}/a.npz"]
