"""OPKV's figures: their flags, and a text that the model has read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from absl import flags
from tqdm import tqdm

from eval import cli, layers, replay, texts
from eval.results import Row
from eval.run_throughput import pick_policies
from eval.tables import human_bytes
from kvjax import CacheConfig, prepare
from kvjax.engine.generate import check_request
from kvjax.engine.placing import make_store
from models import Loaded, load
from scripts.profile_policy import passage
from scripts.reproduce_opkv import (
  ablation,
  demotion,
  eviction,
  io_amplification,
  recall_share,
  reuse,
  sensitivity,
  spread,
  throughput,
)
from scripts.reproduce_opkv.case import BUDGET_PERCENT, Case
from scripts.reproducing import SMALL_MODEL, Item, Paper, Started

flags.disclaim_key_flags()  # those defined here belong to the command

ITEMS: dict[str, Item] = {
  "io_amplification": io_amplification.ITEM,
  "reuse": reuse.ITEM,
  "spread": spread.ITEM,
  "recall_share": recall_share.ITEM,
  "throughput": throughput.ITEM,
  "sensitivity": sensitivity.ITEM,
  "eviction": eviction.ITEM,
  "ablation": ablation.ITEM,
  "demotion": demotion.ITEM,
}
STORES = ("whole_page", "prefetch_all", "op_block", "op_block:filling=refill")


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
  """--policies, --stores, --text_file, --batch_sizes and --budget_percent."""
  flags.DEFINE_list("policies", ["infinigen", "omnikv"], "opkv: policies that select.")
  flags.DEFINE_list(
    "stores", list(STORES), "opkv, io_amplification and throughput: what is compared."
  )
  flags.DEFINE_string("text_file", None, "opkv: plain text to read; default: King James.")
  flags.DEFINE_list(
    "batch_sizes",
    None,
    f"opkv, where steps are timed; by default {','.join(TIMED.batch_sizes)}.",
  )
  flags.DEFINE_integer(
    "budget_percent",
    BUDGET_PERCENT,
    "opkv: most tokens that a list selects, in percent of the prompt.",
    lower_bound=1,
    upper_bound=100,
  )


def start(args: flags.FlagValues, name: str) -> Started:
  """Checks everything and says what will be done.

  Raises:
    ValueError: a flag that is not legal, or a text that the model cannot read.
  """
  item = ITEMS[name]
  size = _size(args, item)
  batch_sizes = tuple(cli.positive_ints("batch_sizes", size.batch_sizes))
  _check_stores(args.stores)
  text = texts.king_james() if args.text_file is None else texts.read_text(Path(args.text_file))
  loaded = load(size.model)
  tokens = passage(loaded, text, size.prompt_tokens + size.output_tokens, seed=0)
  prompt, following = tokens[: size.prompt_tokens], tuple(tokens[size.prompt_tokens :])
  config = CacheConfig(1, len(tokens), args.page_size)
  check_request(replay.recorder(loaded.model, config), [prompt], len(following))
  _print_plan(args, item, loaded, size, config)

  def measure() -> Iterable[Row]:
    return item.run(
      Case(
        loaded,
        _recorded(loaded, config, prompt),
        following,
        tuple(args.policies),
        tuple(args.stores),
        args.budget_percent,
        args.page_size,
        batch_sizes,
      )
    )

  read = args.text_file or "King James Bible"
  title = (
    f"OPKV, {name}: {loaded.name}, {size.prompt_tokens:,} tokens of {Path(read).name} and "
    f"{size.output_tokens} steps"
  )
  return Started(loaded, {read: hashlib.sha256(text.encode()).hexdigest()}, title, measure)


def _recorded(loaded: Loaded, config: CacheConfig, prompt: list[int]) -> replay.Recording:
  with tqdm(total=len(prompt), desc="prefill", unit="tok", leave=False) as bar:

    def progress(phase: str, done: int, total: int) -> None:
      del phase, total
      bar.update(done - bar.n)

    return replay.record(replay.recorder(loaded.model, config), loaded.params, [prompt], progress)


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
    f"item    {args.item}, {times}; {human_bytes(row_bytes)} of keys and values a row",
    flush=True,
  )


PAPER = Paper(ITEMS, define_flags, start)
