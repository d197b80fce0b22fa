"""Tasks of lm-evaluation-harness under every policy: accuracy, speed and bytes in one row.

    pip install "kvjax[lm_eval]"
    python -m eval.run_lm_harness --tasks=lambada_openai --policies=dense,quest --limit=20
    python -m eval.run_lm_harness --include_path=FOLDER --tasks=my_task --batch_size=4

`eval.lm_harness` says what the policy decides, and how the harness' own command is run instead.

What was answered to each request is in measured.jsonl (`eval.lines`, `eval.lm_batches`) before the
next is computed; the same command with the same --out_dir goes on with a run that was cut short, in
any way, and asks no request twice. A row of results.jsonl is one policy, store, budget, task and
metric, written when that task is done; beside the usual fields it has `value` and `stderr` as the
harness gives them, its `version` of the task, and `samples`, the file with every request and
answer. `score` is the value where that is a share of right answers, or anything else from 0 to 1 of
which more is better, and empty otherwise.

Times are those of all requests of a task (of a group: of all its tasks). `ttft_s` is the time from
a context to its prefill's own token: of a text the first, of a continuation, where the last token
of the context is a step, none that counts. Continuations of one context share a prefill, which
counts once. `limit_hits` are texts that their limit ended.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from eval import cli, harness, lines, results, resume, summary, tables
from eval.grid import choose_policies
from eval.lines import Line
from eval.policy_files import policy_hashes
from eval.results import Row
from kvjax.types import Policy
from models import Loaded, load

if TYPE_CHECKING:  # imports the harness, which may not be there
  from lm_eval.tasks import TaskManager

  from eval.lm_harness import KvjaxLM

FIELDS: lines.Fields = {**lines.FIELDS, "answer": (str, list), "compile_s": (float, int)}
ELEMENTS: lines.Fields = {**lines.ELEMENTS, "answer": (float, bool)}
_SHOWN = (
  *("policy", "store", "budget_tokens", "task", "metric", "value", "stderr", "dense_score"),
  *("num_examples", "ttft_s_p50", "prefill_tokens_per_s", "tpot_s_p50", "tpot_s_p99"),
  *("decode_tokens_per_s", "speedup_vs_dense", "device_kv_bytes", "metadata_bytes"),
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
  cli.define_out_dir("lm-harness", resume.OUT_DIR)


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  out_dir = Path(args.out_dir).expanduser()
  earlier = resume.earlier_run(out_dir, cli.flag_values())
  policies = choose_policies(args)
  if not args.tasks:
    raise ValueError("--tasks is empty; `lm_eval ls tasks` lists the harness' own")
  if len(set(args.tasks)) < len(args.tasks):
    raise ValueError(f"--tasks={','.join(args.tasks)}: one comes twice; name each of them once")
  if importlib.util.find_spec("lm_eval") is None:
    raise ValueError('lm-evaluation-harness is not installed; pip install "kvjax[lm_eval]"')
  tasks = _tasks(args)
  loaded = load(args.model)
  if args.apply_chat_template and not (loaded.tokenizer and loaded.tokenizer.chat_template):
    raise ValueError(f"model {loaded.name} has no chat template; leave --apply_chat_template out")
  models = _models(loaded, policies, args)
  data = data_of(tasks, args.tasks) | policy_hashes(args.policies)
  manifest = results.make_manifest(cli.flag_values(), loaded, data)
  manifest["versions"]["lm_eval"] = importlib.metadata.version("lm_eval")
  rows: list[Row] = []
  with resume.kept_lines(out_dir, manifest, earlier, FIELDS, ELEMENTS) as (found, keep):
    known = f"; {len(found)} requests are answered already" if found else ""
    print(f"model    {loaded.name}, sha256 {loaded.content_hash[:16]}")
    print(f"tasks    {', '.join(args.tasks)}, for each of {len(models)} caches{known}")
    print(f"results  {out_dir}\n", flush=True)
    for number, lm in enumerate(models):
      for task in args.tasks:
        for row in measure(lm, task, _evaluator(tasks, args), out_dir, number, found, keep):
          rows.append(summary.compare(row, rows))
        resume.update_rows(out_dir, rows)
  print(tables.table(rows, _SHOWN))
  names = ", ".join([results.RESULTS, results.LINES, results.MANIFEST])
  print(f"\n{names} and samples are in {out_dir}")


def measure(
  lm: KvjaxLM,
  task: str,
  evaluate: Callable[..., Any],
  out_dir: Path,
  number: int,
  found: Sequence[Line] = (),
  keep: Callable[[Sequence[Line]], None] = lambda fresh: None,
) -> list[Row]:
  """Rows of one task, or of all tasks of a group; writes what was asked and answered.

  Args:
    lm: the model under one policy.
    task: its name.
    evaluate: the harness' `simple_evaluate`, with all that policies have in common.
    out_dir: gets a file of samples for each task.
    number: tells the files of policies apart.
    found: lines that are there, of any policy and task.
    keep: is given each new line as soon as it is there.
  """
  common = {
    "policy": lm.policy.name,
    "store": lm.store,
    "budget_tokens": lm.policy.asked_tokens,
    "page_size": lm.page_size,
  }
  mine = common | {"task": task}
  measured = [line for line in found if mine.items() <= line.items()]

  def remember(fresh: Sequence[Line]) -> None:
    fresh = [mine | line for line in fresh]
    keep(fresh)
    measured.extend(fresh)

  lm.known, lm.keep = {line["id"]: line for line in measured}, remember
  given = evaluate(model=lm, tasks=[task])
  costs = _costs(measured) | (results.byte_fields(lm.machine.runner) if lm.machine else {})
  rows = []
  for name, metrics in given["results"].items():
    samples = _write_samples(given["samples"].get(name), out_dir / f"samples-{number}-{name}.jsonl")
    count = given.get("n-samples", {}).get(name, {}).get("effective")
    for metric, value, stderr in _metrics(metrics):
      better = given["higher_is_better"].get(name, {}).get(metric.partition(",")[0])
      row = results.make_row(
        model=lm.loaded.name,
        **common,
        batch_size=lm.batch_size,
        device=results.device_kind(),
        task=name,
        metric=metric,
        score=value if better and 0 <= value <= 1 else None,
        num_examples=count,
        simulated=False,
        **costs,
      )
      version = given["versions"].get(name)
      rows.append(row | dict(value=value, stderr=stderr, version=version, samples=samples))
  return rows


def data_of(manager: TaskManager, names: Sequence[str]) -> dict[str, str]:
  """Task -> sha256 of its configuration and of all its documents, before --limit."""
  found = {}
  for name, task in manager.load(list(names))["tasks"].items():
    digest = hashlib.sha256(_text(task.dump_config()).encode())
    for document in task.eval_docs:
      digest.update(_text(document).encode())
    found[name] = digest.hexdigest()
  return found


def _text(content: Any) -> str:
  """The same of the same content in every process: sets in order, objects without addresses."""
  text = json.dumps(
    content,
    sort_keys=True,
    default=lambda one: sorted(map(str, one)) if isinstance(one, set) else str(one),
  )
  return re.sub(" at 0x[0-9a-f]+", "", text)


def _tasks(args: flags.FlagValues) -> TaskManager:
  """All tasks that the harness knows, with those of --include_path."""
  from lm_eval.tasks import TaskManager

  manager = TaskManager(include_path=args.include_path)
  unknown = [task for task in args.tasks if task not in manager.all_tasks]
  if unknown:
    raise ValueError(
      f"--tasks: the harness has no {', '.join(unknown)}; `lm_eval ls tasks` lists its own, and "
      "--include_path names a folder with others"
    )
  return manager


def _evaluator(manager: TaskManager, args: flags.FlagValues) -> Callable[..., Any]:
  """The harness' function, given what all policies have in common."""
  from lm_eval import simple_evaluate

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


def _costs(measured: Sequence[Line]) -> Row:
  """The fields of a row that lines give."""
  if not measured:
    return {}
  texts = [line for line in measured if isinstance(line["answer"], str)]
  return harness.speeds(measured) | {
    "limit_hits": sum(not line["stopped"] for line in texts) if texts else None,
    "prompt_tokens": max(line["prompt_tokens"] for line in measured),
    "output_tokens": max(line["output_tokens"] for line in measured),
    "compile_s": measured[0]["compile_s"],
  }


def _write_samples(samples: Sequence[Mapping[str, Any]] | None, path: Path) -> str | None:
  """The name of the file; None for groups, which have no samples of their own."""
  if samples is None:
    return None
  results.write_atomically(path, "".join(json.dumps(one, default=str) + "\n" for one in samples))
  return path.name


if __name__ == "__main__":
  cli.run(main, define_flags)
