"""Makes a figure of a paper again: numbers, a plot, and the paper's number beside ours.

    python -m scripts.reproduce --paper=opkv --item=io_amplification --out_dir=runs/fig2
    python -m scripts.reproduce --paper=opkv --item=throughput --batch_sizes=1,8 --out_dir=runs/t
    python -m scripts.reproduce --paper=opkv --item=reuse --small --out_dir=runs/seconds

The model reads a prompt of a real text once; then policies decode what follows in the text, token
by token, whatever the model says (teacher forcing). Items that count (all but `recall_share` and
`throughput`) give the same numbers on every machine. --out_dir gets results.jsonl, manifest.json,
comparison.json and a PNG; docs/opkv.md has the definitions.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from absl import flags
from tqdm import tqdm

from eval import cli, layers, replay, texts
from eval.results import (
  append_row,
  check_new_run,
  human_bytes,
  make_manifest,
  run_folder,
  table,
  write_atomically,
)
from eval.run_throughput import pick_policies
from kvjax import CacheConfig, prepare
from kvjax.engine.generate import check_request
from kvjax.engine.placing import make_store
from models import Loaded, load
from scripts.profile_policy import passage
from scripts.reproduce_opkv import (
  ablation,
  eviction,
  io_amplification,
  recall_share,
  reuse,
  sensitivity,
  spread,
  throughput,
)
from scripts.reproduce_opkv.case import BUDGET_PERCENT, Case, Comparison, Item
from scripts.reproduce_opkv.timing import WARM_UP

ITEMS: dict[str, Item] = {
  "io_amplification": io_amplification.ITEM,
  "reuse": reuse.ITEM,
  "spread": spread.ITEM,
  "recall_share": recall_share.ITEM,
  "throughput": throughput.ITEM,
  "sensitivity": sensitivity.ITEM,
  "eviction": eviction.ITEM,
  "ablation": ablation.ITEM,
}
STORES = ("whole_page", "prefetch_all", "op_block", "op_block:filling=refill")
SMALL_MODEL = Path(__file__).resolve().parents[1] / "models" / "small" / "small-llama"


class Size(NamedTuple):
  """What a flag that is not given means."""

  model: str
  prompt_tokens: int
  output_tokens: int
  batch_sizes: tuple[str, ...]


COUNTED = Size("smollm2-135m", 4096, 32, ("1",))
TIMED = Size("smollm2-135m", 1024, 26, ("1", "2", "4", "6", "8", "10", "32"))
SMALL = Size(str(SMALL_MODEL), 512, 10, ("1", "2"))


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_enum("paper", None, ["opkv"], "Which paper.", required=True)
  flags.DEFINE_enum("item", None, list(ITEMS), "Which of its figures.", required=True)
  cli.define_model_flag()
  flags.DEFINE_list("policies", ["infinigen", "omnikv"], "Policies that select tokens or pages.")
  flags.DEFINE_list("stores", list(STORES), "Of io_amplification and throughput: what is compared.")
  flags.DEFINE_string("text_file", None, "Plain text to read; default: King James.")
  flags.DEFINE_integer(
    "prompt_tokens",
    None,
    f"Tokens before the first step; by default {COUNTED.prompt_tokens}, "
    f"{TIMED.prompt_tokens} where steps are timed.",
    lower_bound=64,
  )
  flags.DEFINE_integer(
    "output_tokens",
    None,
    f"Decode steps; by default {COUNTED.output_tokens}, or {TIMED.output_tokens} that are timed, "
    f"the first {WARM_UP} not counted.",
    lower_bound=WARM_UP + 1,
  )
  flags.DEFINE_list(
    "batch_sizes", None, f"Where steps are timed; by default {','.join(TIMED.batch_sizes)}."
  )
  flags.DEFINE_integer(
    "budget_percent",
    BUDGET_PERCENT,
    "Most tokens that a list selects, in percent of the prompt.",
    lower_bound=1,
    upper_bound=100,
  )
  cli.define_page_size_flag()
  flags.DEFINE_bool("small", False, "In seconds: models/small/small-llama, a short text.")
  cli.define_out_dir("reproduce")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what it will do, measures, draws and compares."""
  item, out_dir = ITEMS[args.item], Path(args.out_dir).expanduser()
  check_new_run(out_dir)
  size = _size(args, item)
  batch_sizes = tuple(cli.positive_ints("batch_sizes", size.batch_sizes))
  _check_stores(args.stores)
  text = texts.king_james() if args.text_file is None else texts.read_text(Path(args.text_file))
  loaded = load(size.model)
  tokens = passage(loaded, text, size.prompt_tokens + size.output_tokens, seed=0)
  prompt, following = tokens[: size.prompt_tokens], tuple(tokens[size.prompt_tokens :])
  config = CacheConfig(1, len(tokens), args.page_size)
  recorder = replay.recorder(loaded.model, config)
  check_request(recorder, [prompt], len(following))
  _print_plan(args, item, loaded, size, config)
  name = args.text_file or "King James Bible"
  data = {name: hashlib.sha256(text.encode()).hexdigest()}
  with run_folder(out_dir, make_manifest(cli.flag_values(), loaded, data)):
    with tqdm(total=len(prompt), desc="prefill", unit="tok", leave=False) as bar:

      def progress(phase: str, done: int, total: int) -> None:
        del phase, total
        bar.update(done - bar.n)

      recording = replay.record(recorder, loaded.params, [prompt], progress)
    case = Case(
      loaded,
      recording,
      following,
      tuple(args.policies),
      tuple(args.stores),
      args.budget_percent,
      args.page_size,
      batch_sizes,
    )
    rows = item.run(case)
    for row in rows:
      append_row(out_dir, row)
  title = (
    f"OPKV, {args.item}: {loaded.name}, {size.prompt_tokens:,} tokens of {Path(name).name} and "
    f"{size.output_tokens} steps"
  )
  item.plot(rows, title, out_dir / f"{args.item}.png")
  compared = item.compare(rows)
  content = json.dumps([one._asdict() for one in compared], indent=2)
  write_atomically(out_dir / "comparison.json", content + "\n")
  print(f"\n{table(rows, item.columns)}\n{_beside_ours(compared)}\nwritten to {out_dir}")


def _check_stores(names: list[str]) -> None:
  if not names:
    raise ValueError("--stores is empty, expected names separated by commas")
  for name in names:
    if not make_store(name).on_host:
      raise ValueError(
        f"--stores: {name!r} has no host tier; take whole_page, prefetch_all or op_block, with "
        "which every policy is compared on resident too"
      )


def _size(args: flags.FlagValues, item: Item) -> Size:
  """Flags where they are given, else what suits the item."""
  size = SMALL if args.small else TIMED if item.timed else COUNTED
  return Size(
    args.model if args["model"].present else size.model,
    args.prompt_tokens or size.prompt_tokens,
    args.output_tokens or size.output_tokens,
    size.batch_sizes if args.batch_sizes is None else tuple(args.batch_sizes),
  )


def _print_plan(
  args: flags.FlagValues, item: Item, loaded: Loaded, size: Size, config: CacheConfig
) -> None:
  budget = max(args.page_size, size.prompt_tokens * args.budget_percent // 100)
  policies = pick_policies(args.policies, [], [budget], args.page_size)
  runners = [prepare(loaded.model, policy, "resident", config) for policy, _ in policies]
  times = f"timed at batch {', '.join(size.batch_sizes)}" if item.timed else "counted, not timed"
  row_bytes = max(runner.decode_bytes.total for runner in runners)
  print(
    f"model   {loaded.name}, sha256 {loaded.content_hash[:16]}\n"
    f"text    {args.text_file or 'King James Bible'}: {size.prompt_tokens:,} tokens are read, then "
    f"{size.output_tokens} more one by one\n"
    f"layers  {layers.summary(runners)}\n"
    f"budget  {args.budget_percent} % of the prompt, pages of {args.page_size} tokens\n"
    f"item    {args.item}, {times}; {human_bytes(row_bytes)} of keys and values a row\n"
    f"results {args.out_dir}",
    flush=True,
  )


def _beside_ours(compared: list[Comparison]) -> str:
  """The paper's numbers, ours, and why they differ."""
  return "".join(
    f"\n{one.figure}: {one.what}\n"
    f"  paper  {one.paper}\n  ours   {one.ours}\n  why    {one.reason}\n"
    for one in compared
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
