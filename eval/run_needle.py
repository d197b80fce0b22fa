"""RULER-style questions under every policy: accuracy, speed and bytes of each, task by task.

    python -m eval.run_needle --policies=dense,quest,streaming --budget_tokens=512,1024
    python -m eval.run_needle --tasks=pointer_chain --policies=dense,quest,my_policy.py
    python -m eval.run_needle --model=FOLDER --tasks=lookup,chain,passkey --prompt_tokens=2000

Questions are made once, from a plain text; every policy answers all of them, dense first.
`eval.ruler` and `eval.recall` describe the tasks, `eval.grid` how they are asked and where answers
go, `eval.harness` the fields of a row beside the usual ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from eval import cli, grid, ruler, tasks, texts
from eval.tasks import Example
from models import Loaded
from models.fetch import KING_JAMES, file_sha256


def define_flags() -> None:
  """The flags of this command."""
  grid.define_flags("needle", ["dense", "quest", "streaming"], [1024])
  flags.DEFINE_list("tasks", list(ruler.TASKS), f"Some of {', '.join(tasks.TASKS)}.")
  flags.DEFINE_integer("prompt_tokens", 6900, "Most tokens of a prompt.", lower_bound=1)
  flags.DEFINE_integer("num_samples", 4, "Questions of each task.", lower_bound=1)
  flags.DEFINE_string("text_file", None, "Plain text to hide facts in; default: King James.")
  flags.DEFINE_string("text_dir", None, "Folder of such texts (*.txt, *.md), one after the other.")
  flags.DEFINE_integer("seed", 0, "Seed of everything that is hidden, and of where.")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  names = tasks.choose(args.tasks)

  def make_examples(loaded: Loaded) -> tuple[list[Example], dict[str, str]]:
    text, name, digest = _document(args.text_file, args.text_dir)
    return _examples(loaded, names, text, args), {name: digest}

  grid.main(args, make_examples)


def _document(text_file: str | None, text_dir: str | None) -> tuple[str, str, str]:
  """Text, name and sha256.

  Raises:
    ValueError: both a file and a folder, or no text there.
  """
  if text_file is not None and text_dir is not None:
    raise ValueError("--text_file and --text_dir are both given; keep one of them")
  if text_dir is not None:
    folder = Path(text_dir).expanduser()
    text = texts.read_folder(folder)
    return text, folder.name, hashlib.sha256(text.encode()).hexdigest()
  if text_file is None:
    return texts.king_james(), "King James Bible", KING_JAMES.sha256
  path = Path(text_file).expanduser()
  return texts.read_text(path), path.name, file_sha256(path)


def _examples(
  loaded: Loaded, names: Sequence[str], text: str, args: flags.FlagValues
) -> list[Example]:
  assert loaded.tokenizer is not None
  longest = loaded.model.config.max_tokens
  if args.prompt_tokens > longest:  # before the prompts are made; the answer is counted later
    raise ValueError(
      f"--prompt_tokens={args.prompt_tokens} exceeds the {longest} tokens that {loaded.name} was "
      "trained for; ask for fewer"
    )
  return tasks.make_examples(
    names,
    loaded.tokenizer,
    text,
    tokens=args.prompt_tokens,
    num_samples=args.num_samples,
    seed=args.seed,
    limit=args.limit,
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
