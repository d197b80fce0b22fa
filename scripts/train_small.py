"""Trains the two small models that ship with kvjax in models/small, an OPT and a Llama.

    python -m scripts.train_small --out_dir=runs/small

What it trains them for is in `eval/recall.py`, how in `scripts/small_training.py`. A run that was
stopped goes on when it is started again with the same --out_dir, and ends with the same weights.
The folder then holds a model folder each, with a card that says what was measured.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from eval import cli, recall, results, tables, texts
from kvjax.config import ModelConfig
from models import load
from models.fetch import KING_JAMES, file_sha256
from models.safetensors_reader import read_json
from scripts import small_models, small_report, small_training
from scripts.small_training import PHASES, Phase

Recipe = tuple[ModelConfig, Sequence[Phase]]

_RECORD, _CHECKPOINTS, _CARD = "recipe.json", "checkpoints", "README.md"


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_string("text_file", None, "Plain text of a book; default: King James.")
  flags.DEFINE_integer("seed", 0, "Seed of weights and texts.", lower_bound=0)
  cli.define_out_dir("train_small")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  recipes = {name: (small_models.SHAPES[name], phases) for name, phases in PHASES.items()}
  run(Path(args.out_dir).expanduser(), recipes, text_file=args.text_file, seed=args.seed)


def run(out_dir: Path, recipes: Mapping[str, Recipe], *, text_file: str | None, seed: int) -> None:
  """Trains, writes and measures models, or does what is left of it.

  Args:
    out_dir: new, empty, or left by a run of this that was stopped.
    recipes: name of a model -> its shape and how it is trained.
    text_file: the book; None for King James.
    seed: of weights and texts.

  Raises:
    ValueError: `out_dir` holds something else, or the text cannot be read or is too short.
  """
  text, name, digest = _document(text_file)
  book = recall.plain(text)
  if len(book) <= max(phase.length for _, phases in recipes.values() for phase in phases):
    raise ValueError(f"{name} has only {len(book)} characters; give a longer --text_file")
  record = _record(recipes, seed, digest)
  started = _check_folder(out_dir, record)
  print(_plan(recipes, name, digest, out_dir, started), flush=True)
  out_dir.mkdir(parents=True, exist_ok=True)
  if not started:
    results.write_atomically(out_dir / _RECORD, json.dumps(record, indent=2) + "\n")
  for model, (config, phases) in recipes.items():
    state = _train(model, config, phases, book, seed, out_dir)
    small_models.write_folder(out_dir / model, config, state.params)
    card = _measured_card(out_dir / model, phases, book, {name: digest}, float(state.seconds))
    results.write_atomically(out_dir / model / _CARD, card)
    print(f"{model} is in {out_dir / model}, with what it can do in {_CARD}", flush=True)


def _document(text_file: str | None) -> tuple[str, str, str]:
  """Text, name and sha256."""
  if text_file is None:
    return texts.king_james(), "King James Bible", KING_JAMES.sha256
  path = Path(text_file).expanduser()
  return texts.read_text(path), path.name, file_sha256(path)


def _record(recipes: Mapping[str, Recipe], seed: int, text_hash: str) -> dict[str, Any]:
  """What must be the same for a run to go on; another version of jax rounds differently."""
  return {
    "models": {name: dataclasses.asdict(config) for name, (config, _) in recipes.items()},
    "phases": {name: [one._asdict() for one in phases] for name, (_, phases) in recipes.items()},
    "seed": seed,
    "text": text_hash,
    "jax": jax.__version__,
  }


def _check_folder(out_dir: Path, record: dict[str, Any]) -> bool:
  """Whether the folder holds the beginning of this very run; it may also be new or empty."""
  results.check_new_run(out_dir)
  if not out_dir.exists() or not any(out_dir.iterdir()):
    return False
  path = out_dir / _RECORD
  if not path.is_file():
    raise ValueError(
      f"{out_dir} holds other things than a run of this command; choose another --out_dir"
    )
  found = read_json(path)
  changed = [name for name in record if found.get(name) != record[name]]
  if changed:
    raise ValueError(
      f"{out_dir} holds a run with another {' and '.join(changed)}; choose another --out_dir, or "
      "go on with what it was started with"
    )
  return True


def _plan(
  recipes: Mapping[str, Recipe], text_name: str, text_hash: str, out_dir: Path, started: bool
) -> str:
  rows = [
    {
      "model": name,
      "steps": sum(phase.steps for phase in phases),
      "text_tokens": sum(phase.steps * phase.rows * phase.length for phase in phases),
      "longest_text": max(phase.length for phase in phases),
    }
    for name, (_, phases) in recipes.items()
  ]
  return "\n".join(
    [
      f"text     {text_name}, sha256 {text_hash[:16]}",
      f"tasks    {', '.join(recall.TASKS)}",
      f"results  {out_dir}, {'where the run goes on' if started else 'a new run'}",
      "",
      "to be trained, one after the other:",
      tables.table(rows, tuple(rows[0])),
      "",
    ]
  )


def _train(
  name: str,
  config: ModelConfig,
  phases: Sequence[Phase],
  book: str,
  seed: int,
  out_dir: Path,
) -> small_training.State:
  slow = 0.5 if sys.stderr.isatty() else 30.0  # a log needs fewer lines than a terminal
  total = sum(phase.steps for phase in phases)
  with tqdm(total=total, unit="step", desc=name, mininterval=slow, smoothing=0.05) as bar:

    def progress(phase: Phase, done: int, loss: float, accuracy: float) -> None:
      said = f"{phase.length} bytes, answers: loss {loss:.2f}, {accuracy:.0%} right"
      bar.set_postfix_str(said, refresh=False)
      bar.update(done - bar.n)

    folder = out_dir / _CHECKPOINTS / name
    state = small_training.train(config, phases, book, seed, folder, progress)
    bar.update(total - bar.n)
  return state


def _measured_card(
  folder: Path, phases: Sequence[Phase], book: str, data: Mapping[str, str], seconds: float
) -> str:
  loaded = load(str(folder))
  with tqdm(total=len(small_report.cells()), unit="cell", desc=f"{folder.name} accuracy") as bar:
    scores = small_report.measure(loaded, book, lambda cell: bar.update())
  manifest = results.make_manifest(cli.flag_values(), loaded, data)
  return small_report.card(loaded, phases, scores, manifest, _command(), seconds)


def _command() -> str:
  """As it was typed, but for --out_dir, which says nothing about the weights."""
  typed = [one for one in sys.argv[1:] if not one.startswith("--out_dir")]
  return shlex.join(["python", "-m", "scripts.train_small", *typed])


if __name__ == "__main__":
  cli.run(main, define_flags)
