"""Tasks of lm-evaluation-harness under every policy: accuracy, speed and bytes in one row.

    pip install "kvjax[lm_eval]"
    python -m eval.run_lm_harness --tasks=lambada_openai --policies=dense,quest --limit=20
    python -m eval.run_lm_harness --include_path=FOLDER --tasks=my_task --batch_size=4

`eval.lm_harness` says what the policy decides, and how the harness' own command is run instead. A
row of results.jsonl is one policy, store, budget, task and metric, written when that task is done;
beside the usual fields it has `value` and `stderr` as the harness gives them, its `version` of the
task, and `samples`, the file with every request and answer. `score` is the value where that is a
share of right answers, or anything else from 0 to 1 of which more is better, and empty otherwise.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from eval import cli, results
from eval.grid import choose_policies
from eval.results import Row
from kvjax.types import Policy
from models import Loaded, load

if TYPE_CHECKING:  # imports the harness, which may not be there
  from eval.lm_harness import KvjaxLM

_SHOWN = (
  *("policy", "store", "budget_tokens", "task", "metric", "value", "stderr", "dense_score"),
  *("num_examples", "decode_tokens_per_s", "device_kv_bytes", "metadata_bytes"),
)


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  cli.define_policies_flags(["dense", "quest", "streaming"], [1024])
  flags.DEFINE_list("tasks", [], "Tasks or groups of the harness; `lm_eval ls tasks` has the list.")
  flags.DEFINE_string("include_path", None, "Folder with tasks of your own.")
  flags.DEFINE_integer("limit", None, "Examples of each task; by default all.", lower_bound=1)
  flags.DEFINE_integer("num_fewshot", None, "Worked examples in a prompt.", lower_bound=0)
  flags.DEFINE_integer("batch_size", 1, "Rows that are computed together.", lower_bound=1)
  flags.DEFINE_bool("apply_chat_template", False, "Ask in the form the model was trained for.")
  cli.define_out_dir("lm-harness")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  out_dir = Path(args.out_dir).expanduser()
  results.check_new_run(out_dir)
  budgets = cli.positive_ints("budget_tokens", args.budget_tokens)
  policies = choose_policies(args.policies, args.stores, budgets, args.page_size)
  if not args.tasks:
    raise ValueError("--tasks is empty; `lm_eval ls tasks` lists the harness' own")
  if importlib.util.find_spec("lm_eval") is None:
    raise ValueError('lm-evaluation-harness is not installed; pip install "kvjax[lm_eval]"')
  evaluate = _evaluator(args)
  loaded = load(args.model)
  if args.apply_chat_template and not (loaded.tokenizer and loaded.tokenizer.chat_template):
    raise ValueError(f"model {loaded.name} has no chat template; leave --apply_chat_template out")
  models = _models(loaded, policies, args)
  print(f"{loaded.name}: {', '.join(args.tasks)} under {len(models)} caches; results: {out_dir}")
  rows: list[Row] = []
  manifest = results.make_manifest(cli.flag_values(), loaded, {})
  manifest["versions"]["lm_eval"] = importlib.metadata.version("lm_eval")
  with results.run_folder(out_dir, manifest):
    for number, lm in enumerate(models):
      for task in args.tasks:
        for row in measure(lm, task, evaluate, out_dir, number):
          rows.append(compare(row, rows))
          results.append_row(out_dir, rows[-1])
  print(results.table(rows, _SHOWN))
  print(f"\n{results.RESULTS}, {results.MANIFEST} and samples are in {out_dir}")


def measure(
  lm: KvjaxLM, task: str, evaluate: Callable[..., Any], out_dir: Path, number: int
) -> list[Row]:
  """Rows of one task, or of all tasks of a group; writes what was asked and answered.

  Args:
    lm: the model under one policy.
    task: its name.
    evaluate: the harness' `simple_evaluate`, with all that policies have in common.
    out_dir: gets a file of samples for each task.
    number: tells the files of policies apart.
  """
  steps = len(lm.step_s)
  found = evaluate(model=lm, tasks=[task])
  step_s, rows = lm.step_s[steps:], []
  for name, metrics in found["results"].items():
    samples = _write_samples(found["samples"].get(name), out_dir / f"samples-{number}-{name}.jsonl")
    count = found.get("n-samples", {}).get(name, {}).get("effective")
    for metric, value, stderr in _metrics(metrics):
      better = found["higher_is_better"].get(name, {}).get(metric.partition(",")[0])
      row = results.make_row(
        model=lm.loaded.name,
        policy=lm.policy.name,
        store=lm.store,
        budget_tokens=lm.policy.asked_tokens,
        page_size=lm.page_size,
        batch_size=lm.batch_size,
        device=results.device_kind(),
        task=name,
        metric=metric,
        score=value if better and 0 <= value <= 1 else None,
        num_examples=count,
        simulated=False,
        **_speed(step_s),
        **(results.byte_fields(lm.runner) if lm.runner else {}),
      )
      version = found["versions"].get(name)
      rows.append(row | dict(value=value, stderr=stderr, version=version, samples=samples))
  return rows


def compare(row: Row, rows: Sequence[Row]) -> Row:
  """The row with what is relative to the row of dense of the same task and metric, if any."""
  same = ("task", "metric")
  before = (one for one in [*rows, row] if all(one[name] == row[name] for name in same))
  dense = next((one for one in before if one["policy"] == "dense"), None)
  if dense is None or dense["score"] is None:
    return row
  retention = row["score"] / dense["score"] if dense["score"] else None
  return row | {"dense_score": dense["score"], "retention": retention}


def _evaluator(args: flags.FlagValues) -> Callable[..., Any]:
  """The harness' function, given what all policies have in common."""
  from lm_eval import simple_evaluate
  from lm_eval.tasks import TaskManager

  manager = TaskManager(include_path=args.include_path)
  unknown = [task for task in args.tasks if task not in manager.all_tasks]
  if unknown:
    raise ValueError(
      f"--tasks: the harness has no {', '.join(unknown)}; `lm_eval ls tasks` lists its own, and "
      "--include_path names a folder with others"
    )
  return partial(
    simple_evaluate,
    task_manager=manager,
    limit=args.limit,
    num_fewshot=args.num_fewshot,
    apply_chat_template=args.apply_chat_template,
    log_samples=True,
  )


def _models(
  loaded: Loaded, policies: Sequence[tuple[Policy, str]], args: flags.FlagValues
) -> list[KvjaxLM]:
  from eval.lm_harness import KvjaxLM

  options = {"page_size": args.page_size, "batch_size": args.batch_size}
  return [KvjaxLM(loaded, policy, store=store, **options) for policy, store in policies]


def _metrics(found: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None]]:
  """Name, value and standard error of each metric; the harness calls them acc,FILTER and
  acc_stderr,FILTER, and the filter "none" is left out here."""
  for key, value in found.items():
    name, comma, kind = key.partition(",")
    if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
      continue
    stderr = found.get(f"{name}_stderr,{kind}")
    known = isinstance(stderr, float) and math.isfinite(stderr)
    yield name if kind == "none" else key, float(value), stderr if known else None


def _speed(step_s: Sequence[float]) -> Row:
  """Of decode steps, the first of which are slow: they compile."""
  if not step_s:
    return {}
  speed = {"decode_tokens_per_s": 1 / statistics.median(step_s)}
  return speed | results.percentiles("tpot_s", step_s)


def _write_samples(samples: Sequence[Mapping[str, Any]] | None, path: Path) -> str | None:
  """The name of the file; None for groups, which have no samples of their own."""
  if samples is None:
    return None
  results.write_atomically(path, "".join(json.dumps(one, default=str) + "\n" for one in samples))
  return path.name


if __name__ == "__main__":
  cli.run(main, define_flags)
