"""A real model, a real book: how accurate, how fast and how big is each cache policy?

Hides numbers in a long document, asks the model for them under every policy, and prints one table.

    python -m scripts.quickstart
    python -m scripts.quickstart --text_file=book.txt --prompt_tokens=4000 --policies=dense,quest
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from tqdm import tqdm

from eval import cli, layers, needle, plots, results, tables, texts
from kvjax import CacheConfig, Runner, generate, make_policy, prepare
from kvjax.types import Policy
from models import Loaded, load
from models.fetch import KING_JAMES, file_sha256

_CHUNK_TOKENS, _PAGE_SIZE = 512, 16
_WARM_UP = 3  # new tokens: the first, one that compiles the decode step, one more
_PLOT = "accuracy_speed.png"
_TABLE = (
  *("policy", "store", "budget_tokens", "correct", "ttft_s_p50", "tpot_s_p50", "tpot_s_p99"),
  *("decode_tokens_per_s", "speedup_vs_dense", "device_kv_bytes", "metadata_bytes"),
)


class Case(NamedTuple):
  """One policy with its budget, ready to run."""

  policy: str
  store: str
  budget_tokens: int | None
  runner: Runner

  @property
  def label(self) -> str:
    """As in the plot."""
    return plots.label({"policy": self.policy, "budget_tokens": self.budget_tokens})


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.DEFINE_string("text_file", None, "Plain text to hide numbers in; default: King James.")
  flags.DEFINE_integer("prompt_tokens", 6900, "Most tokens of a prompt.", lower_bound=1)
  flags.DEFINE_list(
    "policies",
    ["dense", "quest", "streaming"],
    "Policies, separated by commas; with options, NAME:option=value:...",
  )
  flags.DEFINE_integer(
    "budget_tokens", 2048, "Tokens a policy attends to; half of it is shown beside it."
  )
  flags.DEFINE_integer("max_new_tokens", 16, "Tokens of an answer.", lower_bound=2)
  flags.DEFINE_integer("seed", 0, "Seed of the hidden numbers and of their names.")
  cli.define_out_dir("quickstart")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  out_dir = Path(args.out_dir).expanduser()
  results.check_new_run(out_dir)
  policies = choose_policies(args.policies, args.budget_tokens)
  text, text_name, text_hash = _document(args.text_file)
  loaded = load(args.model)
  _check_model(loaded, args.prompt_tokens + args.max_new_tokens)
  assert loaded.tokenizer is not None
  questions = needle.build_prompts(
    loaded.tokenizer, text, tokens=args.prompt_tokens, seed=args.seed
  )
  capacity = max(question.tokens for question in questions) + args.max_new_tokens
  cases = [_case(loaded, policy, capacity) for policy in policies]
  print(_plan(loaded, text_name, text_hash, questions, cases, out_dir), flush=True)
  manifest = results.make_manifest(cli.flag_values(), loaded, {text_name: text_hash})
  with results.run_folder(out_dir, manifest):
    rows = _measure_all(loaded, questions, cases, args.max_new_tokens, out_dir)
  title = f"{loaded.name}, {text_name}, {args.prompt_tokens:,} tokens, batch 1"
  plots.accuracy_against_speed(rows, f"{title}\n{rows[0]['device']}", out_dir / _PLOT)
  print(_report(rows, questions))
  print(f"\n{results.RESULTS}, {results.MANIFEST} and {_PLOT} are in {out_dir}")


def choose_policies(names: Sequence[str], budget_tokens: int) -> list[Policy]:
  """A policy for every row: dense first, streaming with half of the budget, others with both.

  Raises:
    ValueError: no name, an unknown one, one given twice, or a budget that is too small.
  """
  if not names or len(set(names)) != len(names):
    raise ValueError(f"--policies={','.join(names)}: expected names, each of them once")
  if budget_tokens < 2 * _PAGE_SIZE:
    raise ValueError(
      f"--budget_tokens={budget_tokens}: half of it is shown beside it and must be a page of "
      f"{_PAGE_SIZE} tokens at least; give {2 * _PAGE_SIZE} or more"
    )
  half = budget_tokens // 2
  shown = {"dense": (half,), "streaming": (half,)}  # dense has no use for one
  return [
    make_policy(name, budget_tokens=budget, page_size=_PAGE_SIZE)
    for name in sorted(names, key=lambda name: name != "dense")
    for budget in shown.get(name.partition(":")[0], (half, budget_tokens))
  ]


def _document(text_file: str | None) -> tuple[str, str, str]:
  """Text, name and sha256."""
  if text_file is None:
    return texts.king_james(), "King James Bible", KING_JAMES.sha256
  path = Path(text_file).expanduser()
  return texts.read_text(path), path.name, file_sha256(path)


def _check_model(loaded: Loaded, tokens: int) -> None:
  if loaded.tokenizer is None:
    raise ValueError(f"model {loaded.name} has no tokenizer to ask questions with; choose another")
  longest = loaded.model.config.max_tokens
  if tokens > longest:
    raise ValueError(
      f"prompt and answer of {tokens} tokens exceed the {longest} that {loaded.name} was trained "
      "for; lower --prompt_tokens or --max_new_tokens"
    )


def _case(loaded: Loaded, policy: Policy, capacity: int) -> Case:
  cache = CacheConfig(1, capacity, _PAGE_SIZE, base_tokens=capacity)
  store = policy.stores[0]
  runner = prepare(loaded.model, policy, store, cache, chunk_tokens=_CHUNK_TOKENS)
  return Case(policy.name, store, policy.asked_tokens, runner)


def _plan(
  loaded: Loaded,
  text_name: str,
  text_hash: str,
  questions: Sequence[needle.Needle],
  cases: Sequence[Case],
  out_dir: Path,
) -> str:
  sizes = [
    {"policy": case.policy, "store": case.store, "budget_tokens": case.budget_tokens}
    | results.byte_fields(case.runner)
    for case in cases
  ]
  columns = ("policy", "store", "budget_tokens", "device_kv_bytes", "metadata_bytes")
  return "\n".join(
    [
      f"model      {loaded.name}, sha256 {loaded.content_hash[:16]}",
      f"text       {text_name}, sha256 {text_hash[:16]}",
      f"questions  {len(questions)} for each of {len(cases)} caches, one after the other",
      f"prompts    {', '.join(str(question.tokens) for question in questions)} tokens",
      f"layers     {layers.summary([case.runner for case in cases]) or '-'}",
      f"results    {out_dir}",
      "",
      "to be allocated:",
      tables.table(sizes, (*columns, "peak_kv_bytes")),
      "",
    ]
  )


def _measure_all(
  loaded: Loaded,
  questions: Sequence[needle.Needle],
  cases: Sequence[Case],
  max_new_tokens: int,
  out_dir: Path,
) -> list[results.Row]:
  rows: list[results.Row] = []
  work = sum(question.tokens + max_new_tokens for question in questions) * len(cases)
  slow = 0.5 if sys.stderr.isatty() else 30.0  # a log needs fewer lines than a terminal
  with tqdm(total=work, unit="tok", unit_scale=True, mininterval=slow, smoothing=0.1) as bar:
    for case in cases:
      row = _measure(loaded, questions, case, max_new_tokens, bar)
      _compare(row, rows[0] if rows else row)
      results.append_row(out_dir, row)
      rows.append(row)
    bar.set_description("done")
  return rows


def _measure(
  loaded: Loaded,
  questions: Sequence[needle.Needle],
  case: Case,
  max_new_tokens: int,
  bar: tqdm,
) -> results.Row:
  """The row of one case, with the answers, but for what compares it with dense."""
  bar.set_description(f"{case.label} compiling")
  start = time.perf_counter()
  short = questions[0].prompt_ids[: _CHUNK_TOKENS // 2]
  generate(case.runner, loaded.params, [short], max_new_tokens=_WARM_UP, stop_ids=())
  compile_s = time.perf_counter() - start
  ttft_s, step_s, answers = [], [], []
  for index, question in enumerate(questions):
    bar.set_description(f"{case.label} question {index + 1}/{len(questions)}")
    # No stop token: every answer has the same length, which gives enough steps to time.
    result = generate(
      case.runner,
      loaded.params,
      [question.prompt_ids],
      max_new_tokens=max_new_tokens,
      stop_ids=(),
      progress=_progress(bar, question.tokens),
    )
    ttft_s.append(result.ttft_s)
    step_s += result.step_s
    answers.append(_answer(loaded, question, result.tokens[0]))
  score = sum(answer["correct"] for answer in answers) / len(answers)
  tokens = [question.tokens for question in questions]
  row = results.make_row(
    model=loaded.name,
    policy=case.policy,
    store=case.store,
    budget_tokens=case.budget_tokens,
    page_size=_PAGE_SIZE,
    batch_size=1,
    device=results.device_kind(),
    task=needle.TASK,
    metric=needle.METRIC,
    score=score,
    num_examples=len(answers),
    limit_hits=sum(answer["limit_hit"] for answer in answers),
    prompt_tokens=max(tokens),
    output_tokens=max_new_tokens,
    compile_s=compile_s,
    prefill_tokens_per_s=sum(tokens) / sum(ttft_s),
    decode_tokens_per_s=len(step_s) / sum(step_s),
    simulated=False,
    **results.percentiles("ttft_s", ttft_s),
    **results.percentiles("tpot_s", step_s),
    **results.byte_fields(case.runner),
  )
  return row | {"answers": answers}


def _progress(bar: tqdm, prompt_tokens: int) -> Callable[[str, int, int], None]:
  before = bar.n

  def update(phase: str, done: int, total: int) -> None:
    del total
    bar.update(before + done + (prompt_tokens if phase == "decode" else 0) - bar.n)

  return update


def _answer(loaded: Loaded, question: needle.Needle, tokens: Sequence[int]) -> dict[str, Any]:
  assert loaded.tokenizer is not None
  stops = [tokens.index(stop) for stop in loaded.tokenizer.eos_ids if stop in tokens]
  text = loaded.tokenizer.decode(tokens[: min(stops, default=len(tokens))])
  return {
    "key": question.key,
    "depth": question.depth,
    "digits": question.digits,
    "expected": question.answer,
    "given": text.strip(),
    "correct": needle.found(question.answer, text),
    "limit_hit": not stops,
  }


def _compare(row: results.Row, dense: results.Row) -> None:
  """Fills in what is relative to dense, if dense was asked for."""
  if dense["policy"] != "dense":
    return
  row["dense_score"] = dense["score"]
  row["retention"] = row["score"] / dense["score"] if dense["score"] else None
  row["speedup_vs_dense"] = dense["tpot_s_p50"] / row["tpot_s_p50"]


def _report(rows: Sequence[results.Row], questions: Sequence[needle.Needle]) -> str:
  shown = [
    row | {"correct": f"{sum(a['correct'] for a in row['answers'])}/{row['num_examples']}"}
    for row in rows
  ]
  names = [f"{q.digits} digits at {q.depth:.0%}" for q in questions]
  answers = [{"answers": "expected"} | {n: q.answer for n, q in zip(names, questions, strict=True)}]
  answers += [
    {"answers": plots.label(row)}
    | {n: _short(a["given"]) for n, a in zip(names, row["answers"], strict=True)}
    for row in rows
  ]
  return f"{tables.table(shown, _TABLE)}\n\n{tables.table(answers, ('answers', *names))}"


def _short(text: str, width: int = 24) -> str:
  text = " ".join(text.split())
  return text if len(text) <= width else text[: width - 3] + "..."


if __name__ == "__main__":
  cli.run(main, define_flags)
