"""Negative log-likelihood and perplexity of long texts under every policy, by position.

    python -m eval.run_perplexity --text_file=BOOK --policies=dense,quest,streaming
    python -m eval.run_perplexity --text_file=BOOK --prefix_tokens=6000 --tokens=2000 --num_texts=3

A stretch of the text is prefilled, densely as before generation; every token after it is a decode
step under the policy, whose logits are asked for the token that really follows (`eval.scoring`).
With several texts, stretches that do not overlap are spread evenly over the file.

Each row of results.jsonl is one policy, store and budget, written when it is done. Its `metric` is
nll and its `score` empty, since an NLL is no share of anything; beside the usual fields it has
`nll`, the mean in nats a token; `perplexity`, its exponential; `by_position`, the same for equal
eighths of the scored tokens, with the positions `from` and `to` (exclusive) of the predicted
tokens; and `token_nll`, of each text the NLL of each token. Beside dense: `nll_delta`, the mean
difference to it, and `nll_delta_stderr`, its standard error over the tokens, taken as independent.
The percentiles of `tpot_s` are those of blocks of steps, as steps are not timed one by one.

Eighths are equal, not powers of two, so that each mean is over as many tokens as the others and as
certain, and since all of them lie behind a long prefix: in powers of two most would be one bucket.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli, plots, plots_perplexity, results, scoring, texts
from eval.grid import choose_policies
from eval.results import Row
from kvjax import CacheConfig, Runner, prepare
from kvjax.engine.generate import prefill
from models import Loaded, load
from models.fetch import file_sha256

TASK, METRIC = "perplexity", "nll"
BUCKETS = 8
_PLOT = "nll_by_position.png"
_SHOWN = (
  *("policy", "store", "budget_tokens", "nll", "nll_delta", "nll_delta_stderr", "perplexity"),
  *("decode_tokens_per_s", "speedup_vs_dense", "device_kv_bytes", "metadata_bytes"),
)
_SIZES = (
  *("policy", "store", "budget_tokens", "device_kv_bytes", "metadata_bytes", "peak_kv_bytes"),
)


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  cli.define_policies_flags(["dense", "quest", "streaming"], [1024])
  flags.DEFINE_string("text_file", None, "Plain text to score.", required=True)
  flags.DEFINE_integer("prefix_tokens", 4000, "Tokens that are prefilled.", lower_bound=1)
  flags.DEFINE_integer("tokens", 500, "Tokens that are scored after them.", lower_bound=1)
  flags.DEFINE_integer("num_texts", 1, "Stretches of the text.", lower_bound=1)
  cli.define_out_dir("perplexity")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  out_dir = Path(args.out_dir).expanduser()
  results.check_new_run(out_dir)
  budgets = cli.positive_ints("budget_tokens", args.budget_tokens)
  policies = choose_policies(args.policies, args.stores, budgets, args.page_size)
  path = Path(args.text_file).expanduser()
  text = texts.read_text(path)
  loaded = load(args.model)
  stretches = cut(loaded, text, args.prefix_tokens, args.tokens, args.num_texts)
  capacity = len(stretches[0])
  cache = CacheConfig(1, capacity, args.page_size, base_tokens=capacity)
  runners = [prepare(loaded.model, policy, store, cache) for policy, store in policies]
  digest = file_sha256(path)
  print(_plan(loaded, f"{path.name}, sha256 {digest[:16]}", args, runners, out_dir), flush=True)
  manifest = results.make_manifest(cli.flag_values(), loaded, {path.name: digest})
  with results.run_folder(out_dir, manifest):
    rows = measure(
      loaded, runners, stretches, args.prefix_tokens, lambda row: results.append_row(out_dir, row)
    )
  title = f"{loaded.name}, {path.name}, {args.prefix_tokens:,} tokens prefilled"
  plots_perplexity.nll_by_position(rows, f"{title}\n{rows[0]['device']}", out_dir / _PLOT)
  print(report(rows))
  print(f"\n{results.RESULTS}, {results.MANIFEST}, {_PLOT} are in {out_dir}")


def cut(loaded: Loaded, text: str, prefix: int, tokens: int, count: int) -> list[list[int]]:
  """Stretches of prefix + tokens + 1 ids: each scored token has one before it to be fed.

  Raises:
    ValueError: the model has no tokenizer, its context or the text is too short.
  """
  if loaded.tokenizer is None:
    raise ValueError(f"model {loaded.name} has no tokenizer to read a text with; choose another")
  size, longest = prefix + tokens + 1, loaded.model.config.max_tokens
  if size > longest:
    raise ValueError(
      f"--prefix_tokens={prefix} and --tokens={tokens} make a text of {size} tokens, and "
      f"{loaded.name} was trained for {longest}; ask for fewer"
    )
  ids = loaded.tokenizer.encode(text)
  if len(ids) < count * size:
    raise ValueError(
      f"--text_file has {len(ids)} tokens, and --num_texts={count} of {size} need {count * size}; "
      "give a longer text or ask for fewer"
    )
  return [
    ids[start : start + size] for start in range(0, count * (len(ids) // count), len(ids) // count)
  ]


def measure(
  loaded: Loaded,
  runners: Sequence[Runner],
  stretches: Sequence[Sequence[int]],
  prefix: int,
  finished: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
  """Result rows, one for each runner.

  Args:
    loaded: the model.
    runners: what is compared, each of batch size 1; what comes before the others and is dense is
      what they are compared with.
    stretches: token ids, all of one length.
    prefix: tokens of each that are prefilled.
    finished: is given each row as soon as it is complete.
  """
  rows: list[Row] = []
  slow = 0.5 if sys.stderr.isatty() else 30.0  # a log needs fewer lines than a terminal
  work = len(runners) * sum(len(one) - 1 for one in stretches)
  with tqdm(total=work, unit="tok", unit_scale=True, mininterval=slow, smoothing=0.1) as bar:
    for runner in runners:
      policy = runner.policy
      name = plots.label({"policy": policy.name, "budget_tokens": policy.asked_tokens})
      bar.set_description(f"{name} compiling")
      compile_s = scoring.warm_up(runner, loaded.params)
      bar.set_description(name)
      scored = [score(runner, loaded, one, prefix, bar) for one in stretches]
      row = compare(_row(loaded, runner, scored, prefix, compile_s), rows)
      finished(row)
      rows.append(row)
    bar.set_description("done")
  return rows


def score(
  runner: Runner, loaded: Loaded, ids: Sequence[int], prefix: int, bar: tqdm
) -> scoring.Scores:
  """Scores of ids[prefix + 1:]. That of ids[prefix] is the prefill's own, in which no policy has a
  say, and is left out."""
  before = bar.n

  def reached(done: int) -> None:
    bar.update(before + done - bar.n)

  last, cache = prefill(
    runner, loaded.params, [ids[:prefix]], lambda phase, done, total: reached(done)
  )
  rest = [ids[prefix:]]
  return scoring.follow(
    runner, loaded.params, last, cache, rest, lambda done: reached(prefix + done)
  )


def by_position(nll: np.ndarray, first: int) -> list[Row]:
  """Means over texts and equal parts of the tokens, as many as `BUCKETS` where there are so many.

  Args:
    nll: f[texts, tokens].
    first: position of the first of these tokens.
  """
  ends = np.linspace(0, nll.shape[1], min(BUCKETS, nll.shape[1]) + 1).astype(int).tolist()
  return [
    {"from": first + start, "to": first + end, **_summary(nll[:, start:end])}
    for start, end in itertools.pairwise(ends)
  ]


def compare(row: Row, rows: Sequence[Row]) -> Row:
  """The row with what is relative to the row of dense, where there is one."""
  dense = next((one for one in [*rows, row] if one["policy"] == "dense"), None)
  if dense is None:
    return row
  deltas = np.subtract(row["token_nll"], dense["token_nll"])
  return row | {
    "nll_delta": float(deltas.mean()),
    "nll_delta_stderr": float(deltas.std() / math.sqrt(deltas.size)),
    "speedup_vs_dense": dense["tpot_s_p50"] / row["tpot_s_p50"],
  }


def report(rows: Sequence[Row]) -> str:
  """Two tables: means and costs; the NLL of each part of the text."""
  parts = [
    {"position": f"{one['from']:,} - {one['to'] - 1:,}"}
    | {plots.label(row): f"{row['by_position'][place]['nll']:.4f}" for row in rows}
    for place, one in enumerate(rows[0]["by_position"])
  ]
  shown = [row | {"nll": f"{row['nll']:.4f}"} for row in rows]  # policies differ in few of them
  means = results.table(shown, _SHOWN)
  return f"{means}\n\nnll by position:\n{results.table(parts, tuple(parts[0]))}"


def _summary(nll: np.ndarray) -> Row:
  mean = float(nll.mean())
  return {"nll": mean, "perplexity": math.exp(mean)}


def _row(
  loaded: Loaded,
  runner: Runner,
  scored: Sequence[scoring.Scores],
  prefix: int,
  compile_s: float,
) -> Row:
  nll = -np.array([one.log_probs[0][1:] for one in scored], np.float64)
  if not np.isfinite(nll).all():
    raise ValueError(f"policy {runner.policy.name!r} gave logits that are not finite")
  step_s = [second for one in scored for second in one.step_s]
  row = results.make_row(
    model=loaded.name,
    policy=runner.policy.name,
    store=runner.store.name,
    budget_tokens=runner.policy.asked_tokens,
    page_size=runner.prefill_config.page_size,
    batch_size=1,
    device=results.device_kind(),
    task=TASK,
    metric=METRIC,
    num_examples=len(scored),
    prompt_tokens=prefix,
    output_tokens=nll.shape[1],
    compile_s=compile_s,
    decode_tokens_per_s=len(step_s) / sum(step_s),
    simulated=False,
    **results.percentiles("tpot_s", step_s),
    **results.byte_fields(runner),
  )
  return (
    row
    | _summary(nll)
    | {"by_position": by_position(nll, prefix + 1), "token_nll": nll.round(5).tolist()}
  )


def _plan(
  loaded: Loaded, text: str, args: flags.FlagValues, runners: Sequence[Runner], out_dir: Path
) -> str:
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
      f"model    {loaded.name}, sha256 {loaded.content_hash[:16]}",
      f"text     {text}",
      f"scored   {args.tokens:,} tokens after {args.prefix_tokens:,} prefilled ones, "
      f"{args.num_texts} times for each of {len(runners)} caches",
      f"results  {out_dir}",
      "",
      "to be allocated:",
      results.table(sizes, _SIZES),
      "",
    ]
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
