"""Every policy answers every example, once: what all commands that ask questions share.

A command gives its own flags and a function that makes its examples:

    def main(args):
      grid.main(args, lambda loaded: (examples, {"book.txt": sha256}))

Each answer is written to predictions.jsonl (`eval.predictions`) as soon as it is there, and a task
that is complete becomes a row of results.jsonl for each policy. The same command with the same
--out_dir goes on with a run that was cut short, in any way: what was answered is not asked again.

The examples of a task are sorted by the length of their prompts and asked --batch_size at a time;
batch mates do not change answers. Several processes may share them (`eval.processes`). With
--share_prefill every prompt is prefilled once for all policies (`eval.replay`), which takes a
fraction of the time; then no time to the first token is measured.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from eval import cli, lines, loop, plan, predictions, processes, results, resume, summary
from eval.loop import Grid
from eval.policy_files import policy_hashes
from eval.predictions import Prediction
from eval.run_throughput import pick_policies
from eval.tasks import Example
from kvjax.types import Policy
from models import Loaded, load

flags.disclaim_key_flags()

MakeExamples = Callable[[Loaded], tuple[Sequence[Example], dict[str, str]]]


def define_flags(name: str, policies: Sequence[str], budgets: Sequence[int]) -> None:
  """The flags that every such command has.

  Args:
    name: of the command, for its folders.
    policies: compared by default.
    budgets: tokens, by default.
  """
  cli.define_model_flag()
  cli.define_policies_flags(policies, budgets)
  flags.DEFINE_integer("batch_size", 1, "Examples answered together.", lower_bound=1)
  flags.DEFINE_integer("limit", None, "Most questions of each task; default: all.", lower_bound=1)
  flags.DEFINE_bool("share_prefill", False, "Prefill each prompt once for all policies.")
  cli.define_out_dir(name, resume.OUT_DIR)
  processes.define_flags()


def main(args: flags.FlagValues, make_examples: MakeExamples) -> None:
  """Checks everything, says what will be done, does it.

  Args:
    args: the flags of `define_flags`.
    make_examples: what is asked of a model, in the order of the tables and within --limit, and the
      sha256 of each file that it was made of by name.

  Raises:
    ValueError: anything that cannot be done; before anything is compiled.
  """
  processes.join(args)
  out_dir = Path(args.out_dir).expanduser()
  earlier = resume.earlier_run(out_dir, cli.flag_values())
  policies = choose_policies(args)
  loaded = load(args.model)
  if loaded.tokenizer is None:
    raise ValueError(f"model {loaded.name} has no tokenizer to ask questions with; choose another")
  examples, data = make_examples(loaded)
  grid = loop.make(
    loaded,
    policies,
    examples,
    page_size=args.page_size,
    batch_size=args.batch_size,
    share_prefill=args.share_prefill,
  )
  manifest = results.make_manifest(cli.flag_values(), loaded, data | policy_hashes(args.policies))
  if earlier is not None:
    resume.check_manifest(out_dir, earlier, manifest)
  with resume.told_what_is_kept(out_dir, lambda: len(predictions.read_run(out_dir))):
    _run(grid, out_dir, manifest, earlier, args, list(data))


def choose_policies(args: flags.FlagValues) -> list[tuple[Policy, str]]:
  """Every policy with its store, once for each budget if it has one; dense first.

  Args:
    args: the flags of `cli.define_policies_flags`.

  Raises:
    ValueError: see `pick_policies`, or twice the same.
  """
  budgets = cli.positive_ints("budget_tokens", args.budget_tokens)
  picked = pick_policies(args.policies, args.stores, budgets, args.page_size)
  kinds = [(policy.name, policy.asked_tokens, store) for policy, store in picked]
  twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
  if twice:
    raise ValueError(f"--policies: {twice[0]} on {twice[2]} comes twice; name each of them once")
  return sorted(picked, key=lambda one: one[0].name != "dense")


def _run(
  grid: Grid,
  out_dir: Path,
  manifest: dict[str, Any],
  earlier: dict[str, Any] | None,
  args: flags.FlagValues,
  data: Sequence[str],
) -> None:
  """What each process does; the first one makes the folder and the results.

  Args:
    grid: what is asked.
    out_dir: the folder.
    manifest: of this run.
    earlier: of the run that is gone on with; None for a new one.
    args: the flags.
    data: names of the files that the examples were made of.
  """
  first, alone = args.process_id == 0, args.num_processes == 1
  with contextlib.ExitStack() as stack:
    if first and earlier is not None:
      stack.enter_context(resume.sole_writer(out_dir))  # before anything is read
    found = predictions.read_run(out_dir)
    todo = _unanswered(grid, found)
    if first and todo:
      print(plan.text(grid, manifest["data"], out_dir, len(found)), flush=True)
    processes.wait("all know what is answered", args)
    if first and earlier is None:
      # Alone it can take the folder back; others may have written there already.
      stack.enter_context(results.run_folder(out_dir, manifest, keep=not alone))
      stack.enter_context(resume.sole_writer(out_dir))
    elif first and todo:
      resume.note_resumed(out_dir, earlier or {}, manifest)
    processes.wait("the folder is there", args)
    compile_s = _work(grid, out_dir, todo[args.process_id :: args.num_processes], found, args)
    processes.wait("all is answered", args)
    if first:
      predictions.merge(out_dir)
      _finish(grid, out_dir, data, compile_s)


def _unanswered(grid: Grid, found: Sequence[Prediction]) -> list[list[Example]]:
  """Batches of which some runner has not answered all."""
  done = {lines.key_of(one) for one in found}
  return [
    pack
    for pack in loop.batches_of(grid)
    if any(loop.missing(runner, pack, done) for runner in grid.runners)
  ]


def _work(
  grid: Grid,
  out_dir: Path,
  packs: Sequence[Sequence[Example]],
  found: Sequence[Prediction],
  args: flags.FlagValues,
) -> dict[int, float]:
  """Answers some batches; where no other process does, tasks that are complete become rows.

  Returns:
    Seconds that runners took to compile, by their place.
  """
  alone = args.num_processes == 1
  path = predictions.file_of(out_dir, args.process_id, args.num_processes)
  lines.cut_torn_line(path)
  found, compile_s = list(found), {}
  done = {lines.key_of(one) for one in found}
  sizes = {task: len(group) for task, group in loop.by_task(grid.examples).items()}
  counts = Counter(map(loop.row_key, found))
  for fresh in loop.answers(grid, packs, done, compile_s, quiet=args.process_id > 0):
    results.append_lines(path, fresh)
    found += fresh
    key = loop.row_key(fresh[0])
    counts[key] += len(fresh)
    if alone and counts[key] == sizes[fresh[0]["task"]]:
      rows = loop.rows_of(grid, found, compile_s, results.read_rows(out_dir))
      results.write_rows(out_dir, rows)
  return compile_s


def _finish(grid: Grid, out_dir: Path, data: Sequence[str], compile_s: dict[int, float]) -> None:
  """Writes what is not written yet, and prints tables."""
  known = results.read_rows(out_dir)
  rows = loop.rows_of(grid, predictions.read_run(out_dir), compile_s, known)
  if rows != known:
    results.write_rows(out_dir, rows)
  source = ", ".join(data) if len(data) < 4 else f"{len(data)} data files"
  tokens = max(row["prompt_tokens"] for row in rows)
  title = f"{grid.loaded.name}, {source}, up to {tokens:,} tokens\n{rows[0]['device']}"
  pictures = summary.draw(rows, title, out_dir)
  print(summary.tables(rows))
  names = [results.RESULTS, results.PREDICTIONS, results.MANIFEST, *pictures]
  print(f"\n{', '.join(names)} are in {out_dir}")
