"""The loop of `eval.grid`: policies and examples in, predictions and rows out.

    grid = loop.make(loaded, [(make_policy("dense"), "resident")], examples)
    rows = loop.measure(grid)

Nothing here reads flags or writes files.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from eval import harness, plots, replay, summary, tasks
from eval.lines import Key, key_of
from eval.predictions import Prediction
from eval.results import Row
from eval.tasks import Example
from kvjax import CacheConfig, Runner, prepare
from kvjax.types import Policy
from models import Loaded


class Grid(NamedTuple):
  """What all answers of a run have in common.

  Attributes:
    loaded: the model, with its tokenizer.
    runners: what is compared, all of one batch size. What comes before the others and is dense is
      what they are compared with.
    examples: what is asked, of one task or several.
    recorder: prefills each prompt for all of them (`eval.replay`); None where each does it itself.
  """

  loaded: Loaded
  runners: Sequence[Runner]
  examples: Sequence[Example]
  recorder: Runner | None = None


def make(
  loaded: Loaded,
  policies: Sequence[tuple[Policy, str]],
  examples: Sequence[Example],
  *,
  page_size: int = 16,
  batch_size: int = 1,
  share_prefill: bool = False,
) -> Grid:
  """Runners for policies on stores, with room for the longest of the examples.

  Raises:
    ValueError: no examples, two with one id, an unknown task, or one that is too long.
  """
  _check(examples)
  packs = batches(examples, batch_size)
  capacity = max(
    max(len(one.prompt_ids) for one in pack) + max(one.new_tokens for one in pack) for pack in packs
  )
  longest = loaded.model.config.max_tokens
  if capacity > longest:
    raise ValueError(
      f"prompt and answer of {capacity} tokens exceed the {longest} that {loaded.name} was trained "
      "for; ask for shorter prompts"
    )
  config = CacheConfig(batch_size, capacity, page_size, base_tokens=capacity)
  runners = [prepare(loaded.model, policy, store, config) for policy, store in policies]
  recorder = replay.recorder(loaded.model, config) if share_prefill else None
  return Grid(loaded, runners, examples, recorder)


def measure(grid: Grid) -> list[Row]:
  """Result rows, one of every task for each runner; nothing is written."""
  found: list[Prediction] = []
  compile_s: dict[int, float] = {}
  for fresh in answers(grid, batches_of(grid), set(), compile_s):
    found += fresh
  return rows_of(grid, found, compile_s)


def by_task(examples: Sequence[Example]) -> dict[str, list[Example]]:
  """The examples of each task, in the order in which tasks first come."""
  groups: dict[str, list[Example]] = {}
  for example in examples:
    groups.setdefault(example.task, []).append(example)
  return groups


def batches(examples: Sequence[Example], batch_size: int) -> list[list[Example]]:
  """Examples to ask together: of one task, of similar length, the longest first.

  They do not depend on what is answered already, so that a run that is gone on with computes the
  same as one that was not cut short.
  """
  packs = []
  for group in by_task(examples).values():
    group = sorted(group, key=lambda one: len(one.prompt_ids), reverse=True)
    packs += [group[start : start + batch_size] for start in range(0, len(group), batch_size)]
  return packs


def batches_of(grid: Grid) -> list[list[Example]]:
  """`batches` of the size of its runners."""
  return batches(grid.examples, grid.runners[0].prefill_config.batch_size)


def answers(
  grid: Grid,
  packs: Sequence[Sequence[Example]],
  done: Collection[Key],
  compile_s: dict[int, float],
  *,
  quiet: bool = False,
) -> Iterator[list[Prediction]]:
  """Asks; yields what is new of each batch under each runner.

  Args:
    grid: what is common.
    packs: of `batches`.
    done: keys of answers that are there; where others of their batch are not, all of it is asked.
    compile_s: is given the seconds that each runner took to compile, by its place; tasks that end
      their answers otherwise add to them.
    quiet: shows no progress.
  """
  total = sum(len(missing(runner, pack, done)) for pack in packs for runner in grid.runners)
  compiled = set()
  slow = 0.5 if sys.stderr.isatty() else 30.0  # a log needs fewer lines than a terminal
  with tqdm(total=total, unit="answer", mininterval=slow, smoothing=0.1, disable=quiet) as bar:
    for pack in packs:
      recording = None
      for place, runner in enumerate(grid.runners):
        left = missing(runner, pack, done)
        if not left:
          continue
        if grid.recorder and recording is None:
          bar.set_description(f"prefill {pack[0].task}")
          prompts = harness.prompts(grid.recorder, pack)
          recording = replay.record(grid.recorder, grid.loaded.params, prompts)
        variant = (place, harness.ending(grid.loaded, pack)["sampling"])
        if variant not in compiled:
          bar.set_description(f"{_label(runner)} compiling")
          seconds = harness.compile_runner(grid.loaded, runner, pack, recording)
          compile_s[place] = compile_s.get(place, 0.0) + seconds
          compiled.add(variant)
        bar.set_description(f"{_label(runner)} {pack[0].task}")
        given = harness.ask(grid.loaded, runner, pack, recording)
        # Named after its first example whatever is left of it, so that its times count once.
        fresh = [one | {"batch": pack[0].id} for one in given if one["id"] in left]
        bar.update(len(fresh))
        yield fresh
    bar.set_description("done")


def rows_of(
  grid: Grid,
  found: Sequence[Prediction],
  compile_s: Mapping[int, float],
  known: Sequence[Row] = (),
) -> list[Row]:
  """The rows of all tasks that are complete under a runner, task by task.

  Args:
    grid: what is common.
    found: answers, each once.
    compile_s: see `answers`.
    known: rows that were made before, for the seconds of compiling, which no answer holds.
  """
  kept = {row_key(row): row["compile_s"] for row in known}
  given: dict[tuple, list[Prediction]] = {}
  for one in found:
    given.setdefault(row_key(one), []).append(one)
  rows: list[Row] = []
  for task, group in by_task(grid.examples).items():
    for place, runner in enumerate(grid.runners):
      key = row_key(harness.case_of(runner) | {"task": task})
      if len(given.get(key, ())) == len(group):
        seconds = kept.get(key, compile_s.get(place))
        row = harness.task_row(grid.loaded, runner, group, given[key], seconds)
        rows.append(summary.compare(row, rows))
  return rows


def missing(runner: Runner, pack: Sequence[Example], done: Collection[Key]) -> list[str]:
  """Ids of a batch that have no answer under a runner yet."""
  case = harness.case_of(runner)
  return [one.id for one in pack if key_of(case | {"task": one.task, "id": one.id}) not in done]


def row_key(fields: Mapping[str, Any]) -> tuple[Any, ...]:
  """Policy, store, budget and task, of which there is one row."""
  return tuple(fields[name] for name in ("policy", "store", "budget_tokens", "task"))


def _check(examples: Sequence[Example]) -> None:
  if not examples:
    raise ValueError("there are no examples to ask; choose other tasks")
  for task, group in by_task(examples).items():
    tasks.metric(task)  # says so if there is no such task
    ids = [one.id for one in group]
    twice = next((one for one in ids if ids.count(one) > 1), None)
    if twice is not None:
      raise ValueError(f"task {task}: two examples have the id {twice!r}; each needs its own")
    if len({one.stop_ids for one in group}) > 1:
      raise ValueError(f"task {task}: its examples end at different tokens; give all the same")


def _label(runner: Runner) -> str:
  return plots.label(harness.case_of(runner))
