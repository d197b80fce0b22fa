"""What README and docs name is there: linked files, commands, their flags, items of the papers."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags

from scripts.reproduce import PAPERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_COMMAND = re.compile(r"python -m ((?:scripts|eval)\.\w+)([^`|#;\n]*)")
_AGAIN = re.compile(r"^ +\.\.\. (--[^#\n]*)", re.MULTILINE)  # the command before, other options


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
  """Module and arguments of each command line, whose placeholders stay as they are."""
  text = re.sub(r"\\\n *", "", text)
  found = sorted([*_COMMAND.finditer(text), *_AGAIN.finditer(text)], key=lambda one: one.start())
  module, kept = "", []
  for one in found:
    *named, options = one.groups()
    arguments = [arg.strip("[]") for arg in shlex.split(options) if arg != "..."]
    if named:
      module = named[0]
      kept = [arg for arg in arguments if arg.startswith(("--paper", "--item"))]
      yield module, arguments
    else:
      yield module, kept + arguments


def _parse(module: str, arguments: list[str]) -> None:
  """As the command does, and then the process has the flags that it had before."""
  command = importlib.import_module(module)
  if not hasattr(command, "define_flags"):  # one with a parser of its own
    return
  before = {*flags.FLAGS}
  try:
    command.define_flags()
    flags.FLAGS([module, *arguments])
    if module == "scripts.reproduce" and flags.FLAGS.item != "NAME":
      assert flags.FLAGS.item in PAPERS[flags.FLAGS.paper].items
  finally:
    for name in {*flags.FLAGS} - before:
      delattr(flags.FLAGS, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
  for module, arguments in _commands(page.read_text("utf-8")):
    try:
      _parse(module, arguments)
    except (flags.Error, AssertionError) as error:
      pytest.fail(f"python -m {module} {shlex.join(arguments)}: {error}")


def test_a_wrong_command_is_found():
  ((module, arguments),) = _commands("`python -m eval.run_throughput --prompt_length=7`, slow")
  with pytest.raises(flags.UnrecognizedFlagError):
    _parse(module, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
  links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text("utf-8"))
  assert [link for link in links if not (page.parent / link).exists()] == []
