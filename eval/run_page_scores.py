"""Which digest of a page finds the pages that matter? Every score, budget and size of page.

    python -m eval.run_page_scores
    python -m eval.run_page_scores --scores=minmax,minmax*2 --budget_tokens=512 --page_sizes=8

Hides numbers in a long text, prefills every prompt once with dense attention, and judges all scores
on the same queries and keys (`eval.page_scores`); the answers come from real decoding with `quest`.
A score is NAME, or NAME*N: the best pages of N budgets are looked at again (`candidates`).
NAME/int8 and NAME/int8*N keep digests in int8 (`digest_dtype`).

Beside the fields of every result row: `page_score`; `page_recall_ratio`, the share of the pages
with the largest q . k that were chosen; `mass_kept_ratio`, the share of dense attention's weights
on the chosen pages; `digest_bytes`; `read_bytes_per_step`, of digests, keys of candidates, and
chosen keys and values; `select_s`, of all layers of a step; `head_maps`, name -> [layers][heads],
null for layers that do not select, which `eval.report` draws.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from tqdm import tqdm

from eval import cli, needle, texts
from eval.page_scores import (
  Captured,
  Score,
  capture,
  decoded,
  judge_layers,
  redigested,
  repaged,
  select_seconds,
  watcher,
)
from eval.results import (
  Row,
  append_row,
  check_new_run,
  make_manifest,
  run_folder,
  runner_row,
  write_atomically,
)
from eval.tables import table
from kvjax import CacheConfig, Runner, make_policy, prepare
from kvjax.config import PAGE_SIZES
from kvjax.engine.generate import check_request
from kvjax.policies._digests import DIGESTS
from models import Loaded, load
from models.fetch import KING_JAMES, file_sha256

_PLOT = "page_scores.png"
_DENSE_LAYERS = 2  # as quest's
_DEPTHS = (0.2, 0.6)
_SCORES = f"NAME, NAME*N, NAME/int8 or NAME/int8*N of {', '.join(DIGESTS)}"
_COLUMNS = (
  *("page_score", "page_size", "budget_tokens", "page_recall_ratio", "mass_kept_ratio", "score"),
  *("digest_bytes", "read_bytes_per_step", "select_s"),
)


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.DEFINE_list(
    "scores", [*DIGESTS, "cuboid/int8", "minmax/int8*4"], f"{_SCORES}, commas between."
  )
  flags.DEFINE_list("budget_tokens", ["256", "512", "1024", "2048"], "Budgets, commas between.")
  flags.DEFINE_list("page_sizes", ["8", "16"], "Sizes of pages, separated by commas.")
  flags.DEFINE_string("text_file", None, "Plain text to hide numbers in; default: King James.")
  flags.DEFINE_integer("prompt_tokens", 6900, "Most tokens of a prompt.", lower_bound=1)
  flags.DEFINE_integer("num_seeds", 2, "Sets of prompts, four in each.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Seed of the first set.")
  flags.DEFINE_integer("max_new_tokens", 12, "Tokens of an answer.", lower_bound=2)
  cli.define_out_dir("page-scores")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what it will do, captures, measures and writes."""
  out_dir = Path(args.out_dir).expanduser()
  check_new_run(out_dir)
  budgets = cli.positive_ints("budget_tokens", args.budget_tokens)
  sizes = cli.positive_ints("page_sizes", args.page_sizes)
  scores = [_score(name) for name in args.scores]
  _check(scores, budgets, sizes)
  if args.text_file is None:
    text, source = texts.king_james(), ("King James Bible", KING_JAMES.sha256)
  else:
    path = Path(args.text_file).expanduser()
    text, source = texts.read_text(path), (path.name, file_sha256(path))
  loaded = load(args.model)
  questions = _questions(loaded, text, args.prompt_tokens, args.seed, args.num_seeds)
  longest = max(question.tokens for question in questions) + args.max_new_tokens
  capacity = -(-longest // max(sizes)) * max(sizes)
  finest = CacheConfig(1, capacity, min(sizes), base_tokens=capacity)
  dense = prepare(loaded.model, watcher(min(sizes), _DENSE_LAYERS), "resident", finest)
  if not dense.plan.select_layers:
    raise ValueError(
      f"{loaded.name} has {loaded.model.config.num_layers} layers, of which quest leaves the first "
      f"{_DENSE_LAYERS} dense: no layer selects by a score; choose a deeper --model"
    )
  for question in questions:
    check_request(dense, [question.prompt_ids], args.max_new_tokens)
  count = len(scores) * len(budgets) * len(sizes)
  print(
    f"{loaded.name}: {len(questions)} prompts of at most {args.prompt_tokens:,} tokens from "
    f"{source[0]}, prefilled once and kept ({len(questions)} times {dense.decode_bytes.total:,} "
    f"bytes), then {count} combinations, judged on {len(dense.plan.select_layers)} of "
    f"{loaded.model.config.num_layers} layers; results go to {out_dir}",
    flush=True,
  )
  manifest = make_manifest(cli.flag_values(), loaded, dict([source]))
  rows: list[Row] = []
  with run_folder(out_dir, manifest), tqdm(total=len(questions) + count) as bar:
    captures = []
    for question in questions:
      bar.set_description("prefill")
      captures.append(capture(dense, loaded.params, question.prompt_ids, args.max_new_tokens - 1))
      bar.update()
    answers = [one.tokens for one in captures]
    dense_score = _share_right(loaded, questions, answers)
    for size, score in itertools.product(sizes, scores):
      bar.set_description(f"{score}, pages of {size}")
      for row in _measure(loaded, questions, captures, score, size, budgets, capacity):
        append_row(out_dir, row | {"dense_score": dense_score})
        rows.append(row)
        bar.update()
      jax.clear_caches()  # what is compiled is mapped in pieces, of which Linux allows 65,530
  title = f"{loaded.name}, {source[0]}, {args.prompt_tokens:,} tokens; dense: {dense_score:.0%}"
  _plot(rows, title, out_dir / _PLOT)
  print(f"\n{table(rows, _COLUMNS)}\n\ndense answers {dense_score:.0%}; written to {out_dir}")


def _score(name: str) -> Score:
  parts = re.fullmatch(r"(\w+)(?:/(int8))?(?:\*([1-9][0-9]*))?", name)
  if parts is None or parts[1] not in DIGESTS:
    raise ValueError(f"--scores: {name!r} is not {_SCORES}")
  score = Score(parts[1], int(parts[3] or 1), parts[2])
  if score.digest_dtype and not DIGESTS[score.score].vectors:
    raise ValueError(f"--scores: {name!r}: {score.score} keeps no digests; leave /int8 out")
  return score


def _check(scores: Sequence[Score], budgets: Sequence[int], sizes: Sequence[int]) -> None:
  if not scores:
    raise ValueError(f"--scores is empty, expected some of {', '.join(DIGESTS)}")
  if any(size not in PAGE_SIZES for size in sizes):
    raise ValueError(f"--page_sizes={','.join(map(str, sizes))}: expected some of {PAGE_SIZES}")
  if min(budgets) < 2 * max(sizes):
    raise ValueError(
      f"--budget_tokens: {min(budgets)} is under two pages of {max(sizes)} tokens; the newest page "
      "is always attended to, so give two at least"
    )


def _questions(
  loaded: Loaded, text: str, tokens: int, seed: int, num_seeds: int
) -> list[needle.Needle]:
  if loaded.tokenizer is None:
    raise ValueError(f"model {loaded.name} has no tokenizer to ask questions with; choose another")
  return [
    question
    for one in range(seed, seed + num_seeds)
    for question in needle.build_prompts(loaded.tokenizer, text, tokens, _DEPTHS, seed=one)
  ]


def _share_right(
  loaded: Loaded, questions: Sequence[needle.Needle], said: Sequence[list[int]]
) -> float:
  assert loaded.tokenizer is not None
  pairs = zip(questions, map(loaded.tokenizer.decode, said), strict=True)
  return float(np.mean([needle.found(question.answer, output) for question, output in pairs]))


def _measure(
  loaded: Loaded,
  questions: Sequence[needle.Needle],
  captures: Sequence[Captured],
  score: Score,
  size: int,
  budgets: Sequence[int],
  capacity: int,
) -> Iterator[Row]:
  """Yields the rows of one score and size of page, one for each budget."""
  caches = [repaged(one.cache, size) for one in captures]
  widths = tuple(budget // size for budget in budgets)
  judged = [judge_layers(score, widths, *pair) for pair in zip(captures, caches, strict=True)]
  recall, mass = (np.mean(one, axis=0) for one in zip(*judged, strict=True))
  cache_config = CacheConfig(1, capacity, size, base_tokens=capacity)
  runners = [
    prepare(
      loaded.model,
      make_policy("quest", budget_tokens=budget, page_size=size, **score._asdict()),
      "resident",
      cache_config,
    )
    for budget in budgets
  ]
  digested = [redigested(runners[0], cache) for cache in caches]  # whatever the budget
  for place, (budget, runner) in enumerate(zip(budgets, runners, strict=True)):
    said = [decoded(runner, loaded.params, *pair) for pair in zip(captures, digested, strict=True)]
    yield runner_row(
      runner,
      model=loaded.name,
      task=needle.TASK,
      metric=needle.METRIC,
      score=_share_right(loaded, questions, said),
      num_examples=len(questions),
      prompt_tokens=max(question.tokens for question in questions),
      output_tokens=len(said[0]),
    ) | {
      "page_score": str(score),
      "page_recall_ratio": float(recall[place]),
      "mass_kept_ratio": float(mass[place].mean()),
      "digest_bytes": runner.decode_bytes.metadata,
      "read_bytes_per_step": _read_bytes(runner, score, budget),
      "select_s": select_seconds(runner, captures[0], digested[0]),
      "head_maps": {"mass_kept_ratio": _head_map(runner, mass[place])},
    }


def _head_map(runner: Runner, values: np.ndarray) -> list[list[float | None]]:
  """[layers][heads] of f[layers that select, heads]: None for the other layers."""
  by_layer = dict(zip(runner.plan.select_layers, values.round(4).tolist(), strict=True))
  others = [None] * values.shape[1]
  return [by_layer.get(layer, others) for layer in range(runner.model.config.num_layers)]


def _read_bytes(runner: Runner, score: Score, budget: int) -> int:
  """What is kept of pages (or all keys where nothing is), keys of candidates, and chosen keys and
  values."""
  config, cache = runner.model.config, runner.decode_config
  of_keys = config.num_kv_heads * config.head_dim * np.dtype(cache.dtype).itemsize
  of_keys *= len(runner.plan.select_layers)  # of one token
  scored = runner.decode_bytes.metadata or of_keys * cache.capacity_tokens
  looked_at = score.candidates * budget if score.candidates > 1 else 0
  return scored + of_keys * (looked_at + 2 * budget)


def _plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Attention mass and right answers against bytes read in a step, a line for each score."""
  figure = Figure(figsize=(12, 4.8), layout="constrained")
  panels = figure.subplots(1, 2)
  kinds = list(dict.fromkeys(row["page_score"] for row in rows))
  sizes = sorted({row["page_size"] for row in rows})
  colors = colormaps["tab20" if len(kinds) > 10 else "tab10"]
  for kind, size in itertools.product(kinds, sizes):
    line = [row for row in rows if (row["page_score"], row["page_size"]) == (kind, size)]
    if not line:
      continue
    x = [row["read_bytes_per_step"] / 1e6 for row in line]
    style = {"color": colors(kinds.index(kind)), "linestyle": "-" if size == sizes[0] else "--"}
    style |= {"marker": "osD^"[sizes.index(size)], "label": f"{kind}, pages of {size}"}
    panels[0].plot(x, [100 * row["mass_kept_ratio"] for row in line], **style)
    panels[1].plot(x, [100 * row["score"] for row in line], **style)
  for panel, name in zip(panels, ("attention mass kept, %", "right answers, %"), strict=True):
    panel.set(xscale="log", xlabel="MB read in a step", ylabel=name)
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.3)
  panels[1].set_ylim(-4, 104)
  figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
  figure.suptitle(title, fontsize=10)
  picture = io.BytesIO()
  figure.savefig(picture, format="png", dpi=150)
  write_atomically(path, picture.getvalue())


if __name__ == "__main__":
  cli.run(main, define_flags)
