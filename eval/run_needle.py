"""RULER-style questions under every policy: accuracy, speed and bytes of each, task by task.

    python -m eval.run_needle --policies=dense,quest,streaming --budget_tokens=512,1024
    python -m eval.run_needle --tasks=pointer_chain --policies=dense,quest,my_policy.py
    python -m eval.run_needle --model=FOLDER --tasks=lookup,chain,passkey --prompt_tokens=2000

Questions are made once, from a plain text; every policy answers all of them, dense first. Each row
of results.jsonl is one policy, store, budget and task, written when that task is done, so what is
finished stays when a run is interrupted. `eval.ruler` and `eval.recall` describe the tasks,
`eval.harness` the fields of a row beside the usual ones.

With --share_prefill every prompt is prefilled once for all policies (`eval.replay`), which takes a
fraction of the time; then no time to the first token is measured.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags
from tqdm import tqdm

from eval import cli, harness, plots, replay, results, ruler, tasks, texts
from eval.harness import Answer
from eval.replay import Recording
from eval.results import Row
from eval.run_throughput import pick_policies
from eval.tasks import Example
from kvjax import CacheConfig, Runner, prepare
from kvjax.types import Policy
from models import Loaded, load
from models.fetch import KING_JAMES, file_sha256

_COSTS = (
  *("policy", "store", "budget_tokens", "score", "retention", "decode_tokens_per_s"),
  *("speedup_vs_dense", "device_kv_bytes", "metadata_bytes", "question_in_window"),
)
_SIZES = (
  *("policy", "store", "budget_tokens", "device_kv_bytes", "metadata_bytes", "peak_kv_bytes"),
)


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  cli.define_policies_flags(["dense", "quest", "streaming"], [1024])
  flags.DEFINE_list("tasks", list(ruler.TASKS), f"Some of {', '.join(tasks.TASKS)}.")
  flags.DEFINE_integer("prompt_tokens", 6900, "Most tokens of a prompt.", lower_bound=1)
  flags.DEFINE_integer("num_samples", 4, "Questions of each task.", lower_bound=1)
  flags.DEFINE_string("text_file", None, "Plain text to hide facts in; default: King James.")
  flags.DEFINE_integer("seed", 0, "Seed of everything that is hidden, and of where.")
  flags.DEFINE_bool("share_prefill", False, "Prefill each prompt once for all policies.")
  cli.define_out_dir("needle")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  out_dir = Path(args.out_dir).expanduser()
  results.check_new_run(out_dir)
  budgets = cli.positive_ints("budget_tokens", args.budget_tokens)
  policies = choose_policies(args.policies, args.stores, budgets, args.page_size)
  names = choose_tasks(args.tasks)
  text, text_name, text_hash = _document(args.text_file)
  loaded = load(args.model)
  examples = _examples(loaded, names, text, args)
  capacity = max(len(example.prompt_ids) + example.new_tokens for example in examples)
  cache = CacheConfig(1, capacity, args.page_size, base_tokens=capacity)
  runners = [prepare(loaded.model, policy, store, cache) for policy, store in policies]
  text_line = f"{text_name}, sha256 {text_hash[:16]}"
  print(_plan(loaded, text_line, examples, runners, out_dir), flush=True)
  manifest = results.make_manifest(cli.flag_values(), loaded, {text_name: text_hash})
  with results.run_folder(out_dir, manifest):
    recorder = replay.recorder(loaded.model, cache) if args.share_prefill else None
    rows = measure(
      loaded, runners, examples, lambda row: results.append_row(out_dir, row), recorder
    )
  title = f"{loaded.name}, {text_name}, {args.prompt_tokens:,} tokens\n{rows[0]['device']}"
  pictures = _draw(rows, title, out_dir)
  print(report(rows))
  print(f"\n{', '.join([results.RESULTS, results.MANIFEST, *pictures])} are in {out_dir}")


def choose_policies(
  names: Sequence[str], stores: Sequence[str], budgets: Sequence[int], page_size: int
) -> list[tuple[Policy, str]]:
  """Every policy with its store, once for each budget if it has one; dense first.

  Raises:
    ValueError: see `pick_policies`, or twice the same.
  """
  picked = pick_policies(names, stores, budgets, page_size)
  kinds = [(policy.name, policy.asked_tokens, store) for policy, store in picked]
  twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
  if twice:
    raise ValueError(f"--policies: {twice[0]} on {twice[2]} comes twice; name each of them once")
  return sorted(picked, key=lambda one: one[0].name != "dense")


def choose_tasks(names: Sequence[str]) -> list[str]:
  """The tasks, checked.

  Raises:
    ValueError: none, one that is unknown, or one that comes twice.
  """
  if not names or len(set(names)) != len(names):
    raise ValueError(f"--tasks={','.join(names)}: expected names, each of them once")
  tasks.check_names(names)
  return list(names)


def measure(
  loaded: Loaded,
  runners: Sequence[Runner],
  examples: Sequence[Example],
  finished: Callable[[Row], None] = lambda row: None,
  recorder: Runner | None = None,
) -> list[Row]:
  """Result rows: of every task one for each runner.

  Args:
    loaded: the model.
    runners: what is compared, each of batch size 1; what comes before the others and is dense is
      what they are compared with.
    examples: task by task.
    finished: is given each row as soon as it is complete.
    recorder: prefills each prompt for all of them (`eval.replay`); None where each does it itself.
  """
  rows: list[Row] = []
  prefills = len(runners) if recorder is None else 1
  work = sum(len(one.prompt_ids) * prefills + one.new_tokens * len(runners) for one in examples)
  slow = 0.5 if sys.stderr.isatty() else 30.0  # a log needs fewer lines than a terminal
  with tqdm(total=work, unit="tok", unit_scale=True, mininterval=slow, smoothing=0.1) as bar:
    compile_s: list[float] = []
    for _, group in itertools.groupby(examples, lambda one: one.task):
      answers: list[list[Answer]] = [[] for _ in runners]
      group = list(group)
      for example in group:
        recording = _recorded(loaded, recorder, example, bar) if recorder else None
        for place, runner in enumerate(runners):
          if place == len(compile_s):
            bar.set_description(f"{_label(runner)} compiling")
            compile_s.append(harness.compile_runner(loaded, runner, example, recording))
          bar.set_description(f"{_label(runner)} {example.task}")
          progress = _progress(bar, 0 if recording else len(example.prompt_ids))
          answers[place].append(harness.ask(loaded, runner, example, recording, progress))
      for case in zip(runners, answers, compile_s, strict=True):
        row = compare(harness.task_row(loaded, case[0], group, *case[1:]), rows)
        finished(row)
        rows.append(row)
    bar.set_description("done")
  return rows


def _label(runner: Runner) -> str:
  policy = runner.policy
  return plots.label({"policy": policy.name, "budget_tokens": policy.asked_tokens})


def _recorded(loaded: Loaded, recorder: Runner, example: Example, bar: tqdm) -> Recording:
  bar.set_description(f"prefill {example.task}")
  progress = _progress(bar, len(example.prompt_ids))
  return replay.record(recorder, loaded.params, example.prompt_ids, progress)


def compare(row: Row, rows: Sequence[Row]) -> Row:
  """The row with what is relative to the row of dense of the same task, where there is one."""
  before = (one for one in [*rows, row] if one["policy"] == "dense" and one["task"] == row["task"])
  dense = next(before, None)
  if dense is None:
    return row
  fast = row["tpot_s_p50"] and dense["tpot_s_p50"]
  return row | {
    "dense_score": dense["score"],
    "retention": row["score"] / dense["score"] if dense["score"] else None,
    "speedup_vs_dense": dense["tpot_s_p50"] / row["tpot_s_p50"] if fast else None,
  }


def means(rows: Sequence[Row]) -> list[Row]:
  """One row for each policy, store and budget: its mean score, and its median speed, over tasks."""
  summaries: list[Row] = []
  for group in _by_case(rows).values():
    speeds = [row["tpot_s_p50"] for row in group if row["tpot_s_p50"]]
    tpot_s = statistics.median(speeds) if speeds else None
    summary = group[0] | {
      "task": "mean",
      "score": statistics.mean(row["score"] for row in group),
      "tpot_s_p50": tpot_s,
      "decode_tokens_per_s": tpot_s and 1 / tpot_s,
      "question_in_window": _inside(group),
    }
    summaries.append(compare(summary, summaries))
  return summaries


def report(rows: Sequence[Row]) -> str:
  """Two tables: the score of each task with its difference to dense; means and costs."""
  names = list(dict.fromkeys(row["task"] for row in rows))
  scores = []
  for group in _by_case(rows).values():
    cells = {row["task"]: _score(row) for row in group}
    scores.append({"policy": plots.label(group[0]), "store": group[0]["store"]} | cells)
  table = results.table(scores, ("policy", "store", *names))
  return f"{table}\n\n{results.table(means(rows), _COSTS)}"


def _by_case(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
  cases: dict[tuple, list[Row]] = {}
  for row in rows:
    cases.setdefault((row["policy"], row["store"], row["budget_tokens"]), []).append(row)
  return cases


def _score(row: Row) -> str:
  """0.75 (-0.25): the score, and how far from dense it is."""
  if row["dense_score"] is None or row["policy"] == "dense":
    return f"{row['score']:.2f}"
  return f"{row['score']:.2f} ({row['score'] - row['dense_score']:+.2f})"


def _inside(group: Sequence[Row]) -> str | None:
  """In how many tasks the policy's window held the question."""
  if group[0]["window_tokens"] is None:
    return None
  inside = sum(row["question_in_window"] for row in group)
  return f"{inside} of {len(group)} tasks (last {group[0]['window_tokens']} tokens)"


def _document(text_file: str | None) -> tuple[str, str, str]:
  """Text, name and sha256."""
  if text_file is None:
    return texts.king_james(), "King James Bible", KING_JAMES.sha256
  path = Path(text_file).expanduser()
  return texts.read_text(path), path.name, file_sha256(path)


def _examples(
  loaded: Loaded, names: Sequence[str], text: str, args: flags.FlagValues
) -> list[Example]:
  if loaded.tokenizer is None:
    raise ValueError(f"model {loaded.name} has no tokenizer to ask questions with; choose another")
  longest = loaded.model.config.max_tokens
  if args.prompt_tokens > longest:  # before the prompts are made; `generate` counts the answer too
    raise ValueError(
      f"--prompt_tokens={args.prompt_tokens} exceeds the {longest} tokens that {loaded.name} was "
      "trained for; ask for fewer"
    )
  examples = tasks.make_examples(
    names,
    loaded.tokenizer,
    text,
    tokens=args.prompt_tokens,
    num_samples=args.num_samples,
    seed=args.seed,
  )
  total = max(map(_tokens, examples))
  if total > longest:
    raise ValueError(
      f"prompt and answer of {total} tokens exceed the {longest} that {loaded.name} was trained "
      "for; lower --prompt_tokens"
    )
  return examples


def _tokens(example: Example) -> int:
  return len(example.prompt_ids) + example.new_tokens


def _progress(bar: tqdm, prefill: int) -> Callable[[str, int, int], None]:
  """Moves the bar by what is done of a prefill of so many tokens, and of the answer after it."""
  before = bar.n

  def update(phase: str, done: int, total: int) -> None:
    del total
    if phase == "decode":
      bar.update(before + prefill + done - bar.n)
    elif prefill:
      bar.update(before + done - bar.n)

  return update


def _plan(
  loaded: Loaded,
  text: str,
  examples: Sequence[Example],
  runners: Sequence[Runner],
  out_dir: Path,
) -> str:
  shown = [
    {
      "task": name,
      "questions": len(group),
      "prompt_tokens": max(len(one.prompt_ids) for one in group),
      "question_tokens": max(one.question_tokens for one in group),
      "answer_tokens": max(one.new_tokens for one in group),
    }
    for name, group in ((n, list(g)) for n, g in itertools.groupby(examples, lambda one: one.task))
  ]
  sizes = [
    {
      "policy": runner.policy.name,
      "store": runner.store.name,
      "budget_tokens": runner.policy.asked_tokens,
    }
    | results.byte_fields(runner)
    for runner in runners
  ]
  return "\n".join(
    [
      f"model      {loaded.name}, sha256 {loaded.content_hash[:16]}",
      f"text       {text}",
      f"questions  {len(examples)} for each of {len(runners)} caches, one after the other",
      f"results    {out_dir}",
      "",
      results.table(shown, tuple(shown[0])),
      "",
      "to be allocated:",
      results.table(sizes, _SIZES),
      "",
    ]
  )


def _draw(rows: Sequence[Row], title: str, out_dir: Path) -> list[str]:
  """Names of the pictures that were made."""
  timed = [row for row in means(rows) if row["decode_tokens_per_s"]]
  names = ["accuracy_bytes.png"]
  plots.accuracy_against_bytes(means(rows), title, out_dir / names[0])
  if timed:
    names.append("accuracy_speed.png")
    plots.accuracy_against_speed(timed, title, out_dir / names[-1])
  if any(row["dense_score"] is not None for row in rows):
    names.append("deltas.png")
    plots.deltas(rows, title, out_dir / names[-1])
  return names


if __name__ == "__main__":
  cli.run(main, define_flags)
