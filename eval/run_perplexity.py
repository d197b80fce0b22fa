"""Negative log-likelihood and perplexity of long texts under every policy, by position.

    python -m eval.run_perplexity --text_file=BOOK --policies=dense,quest,streaming
    python -m eval.run_perplexity --text_file=BOOK --prefix_tokens=6000 --tokens=2000 --num_texts=3

A stretch of the text is prefilled, densely as before generation; every token after it is a decode
step under the policy, whose logits are asked for the token that really follows (`eval.scoring`).
With several texts, stretches that do not overlap are spread evenly over the file.

What each text gave is in measured.jsonl (`eval.lines`) before the next is scored; the same command
with the same --out_dir goes on with a run that was cut short, in any way, and scores none twice.
Each row of results.jsonl is one policy, store and budget, written when it is done. Its `metric` is
nll and its `score` empty, since an NLL is no share of anything; beside the usual fields it has
`nll`, the mean in nats a token; `perplexity`, its exponential; `by_position`, the same for equal
eighths of the scored tokens, with the positions `from` and `to` (exclusive) of the predicted
tokens; and `token_nll`, of each text the NLL of each token. Beside dense: `nll_delta`, the mean
difference to it, and `nll_delta_stderr`, its standard error over the tokens, taken as independent.
`ttft_s` is the time from a prefix to the score of the token after it, which is the prefill's own
and counts nowhere else. The percentiles of `tpot_s` are those of blocks of steps, as steps are not
timed one by one.

Eighths are equal, not powers of two, so that each mean is over as many tokens as the others and as
certain, and since all of them lie behind a long prefix: in powers of two most would be one bucket.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from eval import (
  cli,
  harness,
  layers,
  lines,
  plots,
  plots_perplexity,
  results,
  resume,
  scoring,
  summary,
  tables,
  texts,
)
from eval.grid import choose_policies
from eval.lines import Line
from eval.policy_files import policy_hashes
from eval.results import Row
from kvjax import CacheConfig, Runner, prepare
from models import Loaded, load
from models.fetch import file_sha256

# token_nll is of each token behind the one that the prefill predicts; compile_s the seconds that
# the runner had taken to compile.
FIELDS: lines.Fields = {**lines.FIELDS, "token_nll": (list,), "compile_s": (float, int)}
ELEMENTS: lines.Fields = {**lines.ELEMENTS, "token_nll": (float,)}

TASK, METRIC = "perplexity", "nll"
BUCKETS = 8
_PLOT = "nll_by_position.png"
_SHOWN = (
  *("policy", "store", "budget_tokens", "nll", "nll_delta", "nll_delta_stderr", "perplexity"),
  *("ttft_s_p50", "prefill_tokens_per_s", "tpot_s_p50", "tpot_s_p99", "decode_tokens_per_s"),
  *("speedup_vs_dense", "device_kv_bytes", "metadata_bytes"),
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
  cli.define_out_dir("perplexity", resume.OUT_DIR)


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  out_dir = Path(args.out_dir).expanduser()
  earlier = resume.earlier_run(out_dir, cli.flag_values())
  policies = choose_policies(args)
  path = Path(args.text_file).expanduser()
  text = texts.read_text(path)
  loaded = load(args.model)
  stretches = cut(loaded, text, args.prefix_tokens, args.tokens, args.num_texts)
  capacity = len(stretches[0])
  cache = CacheConfig(1, capacity, args.page_size, base_tokens=capacity)
  runners = [prepare(loaded.model, policy, store, cache) for policy, store in policies]
  data = {path.name: file_sha256(path)}
  manifest = results.make_manifest(cli.flag_values(), loaded, data | policy_hashes(args.policies))
  with resume.kept_lines(out_dir, manifest, earlier, FIELDS, ELEMENTS) as (found, keep):
    left = len(runners) * len(stretches) - len(found)
    if left:
      print(_plan(loaded, data, args, runners, out_dir, left), flush=True)
    rows = measure(
      loaded,
      runners,
      stretches,
      args.prefix_tokens,
      found,
      keep,
      lambda rows: resume.update_rows(out_dir, rows),
    )
    title = f"{loaded.name}, {path.name}, {args.prefix_tokens:,} tokens prefilled"
    plots_perplexity.nll_by_position(rows, f"{title}\n{rows[0]['device']}", out_dir / _PLOT)
  print(report(rows))
  names = [results.RESULTS, results.LINES, results.MANIFEST, _PLOT]
  print(f"\n{', '.join(names)} are in {out_dir}")


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
  found: Collection[Line] = (),
  keep: Callable[[Sequence[Line]], None] = lambda fresh: None,
  finished: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> list[Row]:
  """Result rows, one for each runner.

  Args:
    loaded: the model.
    runners: what is compared, each of batch size 1; what comes before the others and is dense is
      what they are compared with.
    stretches: token ids, all of one length.
    prefix: tokens of each that are prefilled.
    found: lines that are there; the texts of these are not scored again.
    keep: is given each new line as soon as it is there.
    finished: is given all rows so far, whenever there is one more.
  """
  rows: list[Row] = []
  kept = {lines.key_of(line): line for line in found}
  slow = 0.5 if sys.stderr.isatty() else 30.0  # a log needs fewer lines than a terminal
  work = (len(runners) * len(stretches) - len(kept)) * (len(stretches[0]) - 1)
  with tqdm(total=work, unit="tok", unit_scale=True, mininterval=slow, smoothing=0.1) as bar:
    for runner in runners:
      scored, compile_s = [], None
      for place, ids in enumerate(stretches):
        thing = harness.case_of(runner) | {"task": TASK, "id": str(place)}
        line = kept.get(lines.key_of(thing))
        if line is None:
          if compile_s is None:
            bar.set_description(f"{plots.label(thing)} compiling")
            compile_s = scoring.warm_up(runner, loaded.params)
            bar.set_description(plots.label(thing))
          line = thing | score(runner, loaded, ids, prefix, bar) | {"compile_s": compile_s}
          line |= {"batch": line["id"]}
          keep([line])
        scored.append(line)
      rows.append(compare(_row(loaded, runner, scored), rows))
      finished(rows)
    bar.set_description("done")
  return rows


def score(
  runner: Runner, loaded: Loaded, ids: Sequence[int], prefix: int, bar: tqdm
) -> dict[str, Any]:
  """The measured fields of a line, of ids[prefix + 1:].

  The score of ids[prefix] is the prefill's own, in which no policy has a say, and is left out.

  Raises:
    ValueError: logits that are not finite.
  """
  before = bar.n

  def reached(done: int) -> None:
    bar.update(before + done - bar.n)

  last, cache, prefill_s = scoring.start(
    runner, loaded.params, [ids[:prefix]], lambda phase, done, total: reached(done)
  )
  scores = scoring.follow(
    runner, loaded.params, last, cache, [ids[prefix:]], lambda done: reached(prefix + done)
  )
  nll = -scores.log_probs[0][1:].astype(np.float64)
  if not np.isfinite(nll).all():
    raise ValueError(f"policy {runner.policy.name!r} gave logits that are not finite")
  return {
    "page_size": runner.prefill_config.page_size,
    "stopped": False,
    "prompt_tokens": prefix,
    "output_tokens": len(ids) - prefix,
    "ttft_s": prefill_s + scores.first_s,
    "step_s": [round(second, 6) for second in scores.step_s],
    "token_nll": nll.tolist(),
  }


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
  row = summary.compare(row, rows)
  dense = next((one for one in [*rows, row] if one["policy"] == "dense"), None)
  if dense is None:
    return row
  deltas = np.subtract(row["token_nll"], dense["token_nll"])
  return row | {
    "nll_delta": float(deltas.mean()),
    "nll_delta_stderr": float(deltas.std() / math.sqrt(deltas.size)),
  }


def report(rows: Sequence[Row]) -> str:
  """Two tables: means and costs; the NLL of each part of the text."""
  parts = [
    {"position": f"{one['from']:,} - {one['to'] - 1:,}"}
    | {plots.label(row): f"{row['by_position'][place]['nll']:.4f}" for row in rows}
    for place, one in enumerate(rows[0]["by_position"])
  ]
  shown = [row | {"nll": f"{row['nll']:.4f}"} for row in rows]  # policies differ in few of them
  means = tables.table(shown, _SHOWN)
  return f"{means}\n\nnll by position:\n{tables.table(parts, tuple(parts[0]))}"


def _summary(nll: np.ndarray) -> Row:
  mean = float(nll.mean())
  return {"nll": mean, "perplexity": math.exp(mean)}


def _row(loaded: Loaded, runner: Runner, scored: Sequence[Line]) -> Row:
  nll = np.array([line["token_nll"] for line in scored], np.float64)
  prefix = scored[0]["prompt_tokens"]
  row = results.runner_row(
    runner,
    model=loaded.name,
    task=TASK,
    metric=METRIC,
    num_examples=len(scored),
    prompt_tokens=prefix,
    output_tokens=nll.shape[1],
    compile_s=scored[0]["compile_s"],
    **harness.speeds(scored),
  )
  return (
    row
    | _summary(nll)
    | {"by_position": by_position(nll, prefix + 1), "token_nll": nll.round(5).tolist()}
  )


def _plan(
  loaded: Loaded,
  data: dict[str, str],
  args: flags.FlagValues,
  runners: Sequence[Runner],
  out_dir: Path,
  left: int,
) -> str:
  sizes = [harness.case_of(runner) | results.byte_fields(runner) for runner in runners]
  done = len(runners) * args.num_texts - left
  ((name, digest),) = data.items()
  return "\n".join(
    [
      f"model    {loaded.name}, sha256 {loaded.content_hash[:16]}",
      f"text     {name}, sha256 {digest[:16]}",
      f"scored   {args.tokens:,} tokens after {args.prefix_tokens:,} prefilled ones, "
      f"{args.num_texts} times for each of {len(runners)} caches"
      + (f"; {done} are scored already" if done else ""),
      f"layers   {layers.summary(runners) or '-'}",
      f"results  {out_dir}",
      "",
      "to be allocated:",
      tables.table(sizes, _SIZES),
      "",
    ]
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
