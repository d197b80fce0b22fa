"""Tables 2 and 3: what of dense attention's scores is kept, task by task.

Rows come from `eval.run_longbench`, `eval.run_leval` and `eval.run_needle` (`--runs`), which can be
cut short and gone on with; several of them, as the profile of one budget is not that of another.
Without any, a few questions are asked here: RULER's needles and the pointer chain, whose answer is
long and at each of whose steps other pages are needed; of the small model lookups and chains.
Quest is beside it, and `flexicache_adaptive`.

Retention is the score over dense's in the same run. A task that dense attention scores 0 in has
none, and is left out of the means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from eval import loop, tasks, texts
from eval.results import RESULTS, Row, read_rows
from kvjax import make_policy
from kvjax.policies import split_spec
from kvjax.types import Policy
from models import Loaded
from scripts.reproduce_flexicache.case import Case
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item, Started

flags.disclaim_key_flags()

COLUMNS = (
  *("task", "metric", "num_examples", "policy", "store", "budget_tokens", "score", "retention"),
  "recall_bytes_per_step",
)
PROFILES = Path(__file__).resolve().parents[2] / "profiles"
ASKED, SMALL_ASKED = ("niah_multikey", "niah_multivalue", "pointer_chain"), ("lookup", "chain")
SAMPLES = 2


def define_flags() -> None:
  """--runs."""
  flags.DEFINE_list(
    "runs", [], "flexicache, accuracy: folders of eval.run_*, whose answers are taken."
  )


def run(case: Case) -> list[Row]:
  """`retained` of the case's answers."""
  return retained(case.answered)


def retained(rows: Sequence[Row]) -> list[Row]:
  """The rows of dense, quest and FlexiCache's policies, each combination once.

  Raises:
    ValueError: none of them says what of dense's score is kept.
  """
  kinds = ("dense", "quest", "flexicache", "flexicache_adaptive")
  found = {}
  for row in rows:
    if kind(row) in kinds:
      key = tuple(row[name] for name in ("task", "policy", "store", "budget_tokens"))
      found.setdefault(key, row)
  if not any(row["retention"] is not None and kind(row) != "dense" for row in found.values()):
    raise ValueError(
      "no task has a score of dense attention and another policy's beside it, so that nothing can "
      "be compared; ask other tasks, with dense among --policies"
    )
  return [*found.values()]


def kind(row: Row) -> str:
  """The policy's name without its options."""
  return split_spec(row["policy"])[0]


def start(args: flags.FlagValues, loaded: Loaded | None, budgets: Sequence[int]) -> Started:
  """Reads runs, or makes questions and says how many.

  Raises:
    ValueError: a folder without rows, or no profile of the model for a budget.
  """
  if loaded is None:
    rows = {Path(one): read_rows(Path(one).expanduser()) for one in args.runs}
    for folder, of_folder in rows.items():
      if not of_folder:
        raise ValueError(f"{folder} has no {RESULTS}; --runs are the --out_dir of eval.run_*")
    answered = [row for of_folder in rows.values() for row in of_folder]
    print(f"runs    {', '.join(args.runs)}: {len(answered)} rows", flush=True)
    data = {str(one): _sha256((one.expanduser() / RESULTS).read_bytes()) for one in rows}
    title = f"FlexiCache, accuracy: {answered[0]['model']}"
    return Started(None, data, title, lambda: retained(answered))
  assert loaded.tokenizer is not None
  names, text = SMALL_ASKED if args.small else ASKED, texts.king_james()
  length = args.prompt_tokens or (900 if args.small else 4000)
  examples = tasks.make_examples(
    names, loaded.tokenizer, text, tokens=length, num_samples=SAMPLES, seed=0
  )
  policies = _policies(loaded, budgets, args.page_size)
  print(
    f"model   {loaded.name}, sha256 {loaded.content_hash[:16]}\n"
    f"asked   {', '.join(names)}: {SAMPLES} questions each in up to {length:,} tokens, of "
    f"{len(policies)} caches",
    flush=True,
  )

  def measure() -> list[Row]:
    grid = loop.make(
      loaded, policies, examples, page_size=args.page_size, batch_size=1, share_prefill=True
    )
    return retained(loop.measure(grid))

  title = f"FlexiCache, accuracy: {loaded.name}, up to {length:,} tokens"
  return Started(loaded, {"King James Bible": _sha256(text.encode())}, title, measure)


def _policies(loaded: Loaded, budgets: Sequence[int], page_size: int) -> list[tuple[Policy, str]]:
  """Dense, and for each budget Quest on the device and FlexiCache, with its profile and without
  one, in two tiers."""
  found = [(make_policy("dense"), "resident")]
  for pages in budgets:
    profile = PROFILES / f"{loaded.name}-heads-{pages}.json"
    if not profile.is_file():
      raise ValueError(
        f"there is no profile of {loaded.name} for {pages} pages in profiles/; make one with "
        "scripts.profile_heads and run eval.run_needle with it, whose folder --runs takes"
      )
    options = {"budget_tokens": pages * page_size, "page_size": page_size}
    found += [
      (make_policy("quest", **options), "resident"),
      (make_policy("flexicache", profile=str(profile), **options), "head_tiered"),
      (make_policy("flexicache_adaptive", **options), "head_tiered"),
    ]
  return found


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Bars by task, a panel for each budget; tasks that dense attention scores 0 in are left out."""
  panels = []
  for budget in _budgets(rows):
    bars: dict[str, tuple[list[str], list[float]]] = {}
    for row in rows:
      if row["budget_tokens"] == budget and row["retention"] is not None:
        words, heights = bars.setdefault(kind(row), ([], []))
        words.append(row["task"])
        heights.append(row["retention"])
    panels.append(Panel("", f"score over dense's, {budget:,} tokens", bars, 0.99))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """Means over tasks, by budget."""
  questions = sum(row["num_examples"] for row in rows if row["policy"] == "dense")
  said, moved = [], []
  for budget in _budgets(rows):
    here = [row for row in rows if row["budget_tokens"] == budget]
    names = list(dict.fromkeys(map(kind, here)))
    words = [f"{name} {_ratios(here, name)}" for name in names]
    said.append(f"{', '.join(words)} at {budget:,} tokens")
    for name in names:
      found = [row["recall_bytes_per_step"] for row in here if kind(row) == name]
      found = [one for one in found if one is not None]
      if found:
        moved.append(f"{name} {np.mean(found) / 1e6:.2f} at {budget:,}")
  compared = Comparison(
    "Tables 2, 3",
    "scores over dense's: the mean of the tasks' ratios, and the ratio of the mean scores",
    "about 0.99 (16 LongBench tasks at 1,024 tokens); L-Eval near 1 at 1,024 and 2,048",
    "; ".join(said),
    f"another model, and {questions} questions in all: one answer moves a task by much, and a "
    "ratio to a score near 0 by more",
  )
  of_bytes = Comparison(
    "-",
    "MB brought to the device in a step",
    "not in the paper",
    "; ".join(moved),
    "beside the paper; what lies on the device whole moves nothing",
  )
  return [compared, of_bytes] if moved else [compared]


def _ratios(rows: Sequence[Row], name: str) -> str:
  """Of the tasks of a policy that dense attention has a score in."""
  found = [row for row in rows if kind(row) == name and row["retention"] is not None]
  if not found:
    return "-"
  means = [np.mean([row[field] for row in found]) for field in ("score", "dense_score")]
  return f"{np.mean([row['retention'] for row in found]):.2f} and {means[0] / means[1]:.2f}"


def _budgets(rows: Sequence[Row]) -> list[int]:
  return sorted({row["budget_tokens"] for row in rows if row["budget_tokens"] is not None})


ITEM = Item(run, plot, compare, COLUMNS)
