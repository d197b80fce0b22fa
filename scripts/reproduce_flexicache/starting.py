"""FlexiCache's figures: their flags, and traces of texts that the model reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from eval import cli
from eval.results import Row
from kvjax.engine.placing import make_store
from models import Loaded, abstract, load
from scripts import page_traces
from scripts.page_texts import Passage, read_passages
from scripts.page_traces import Trace
from scripts.profile_heads import budgets_in_pages, check_lengths
from scripts.reproduce_flexicache import (
  accuracy,
  importance,
  memory,
  online,
  overlap,
  promoted,
  rco,
  rerank,
  serving_flags,
  throughput,
)
from scripts.reproduce_flexicache.case import Case
from scripts.reproducing import SMALL_MODEL, Item, Paper, Started

flags.disclaim_key_flags()  # those defined here belong to the command

ITEMS: dict[str, Item] = {
  "rco": rco.ITEM,
  "overlap": overlap.ITEM,
  "promoted": promoted.ITEM,
  "importance": importance.ITEM,
  "rerank": rerank.ITEM,
  "memory": memory.ITEM,
  "accuracy": accuracy.ITEM,
  "throughput": throughput.ITEM,
  "online": online.ITEM,
}
SHAPE_ONLY = ("memory", "throughput", "online")  # items that read no text


class Size(NamedTuple):
  """What a flag that is not given means."""

  model: str
  budget_tokens: tuple[str, ...]
  prompt_tokens: int
  output_tokens: int
  contexts: tuple[str, ...] = ()


READ = Size("smollm2-135m", ("1024",), 6000, 64)
COUNTED = Size(
  "random:llama-3.1-8b",
  ("1024", "2048"),
  0,
  0,
  ("4096", "8192", "12288", "16384", "20000", "32768", "65536", "131072"),
)
SMALL = Size(str(SMALL_MODEL), ("128",), 900, 48, ("1024", "2048", "4096"))
SERVED = ("throughput", "online")  # items that are simulated, so that size costs nothing


def define_flags() -> None:
  """Of texts, lists, memory, answers and requests."""
  flags.DEFINE_list("budget_tokens", None, "flexicache: tokens that a head attends to.")
  flags.DEFINE_list(
    "text_files", ["king_james", "records"], "flexicache: texts, see scripts.profile_heads."
  )
  flags.DEFINE_string(
    "traces", None, "flexicache: folder with traces of scripts.profile_heads; reads no text anew."
  )
  flags.DEFINE_float(
    "fraction",
    0.25,
    "flexicache: of the heads, how many are unstable.",
    lower_bound=0,
    upper_bound=1,
  )
  flags.DEFINE_integer("period", 16, "flexicache: steps between two rankings.", lower_bound=1)
  flags.DEFINE_string("store", "head_tiered", "flexicache, memory: where keys and values live.")
  flags.DEFINE_list("contexts", None, "flexicache, memory: tokens of a row.")
  accuracy.define_flags()
  serving_flags.define_flags()


def start(args: flags.FlagValues, name: str) -> Started:
  """Checks everything and says what will be done.

  Raises:
    ValueError: a flag that is not legal, or a text that the model cannot read.
  """
  small = args.small and name not in SERVED
  size = SMALL if small else COUNTED if name in SHAPE_ONLY else READ
  asked = size.budget_tokens if args.budget_tokens is None else args.budget_tokens
  budgets = budgets_in_pages(asked, args.page_size)
  source = args.model if args["model"].present else size.model
  title = f"FlexiCache, {name}: {{}}, budget {' and '.join(asked)} tokens"
  if name in SHAPE_ONLY:
    return _counted(args, name, source, budgets, size, title)
  if name == "accuracy":
    return accuracy.start(args, None if args.runs else load(source), budgets)
  loaded = load(source)
  steps = args.output_tokens or size.output_tokens
  if args.traces is None:
    lengths = [args.prompt_tokens or size.prompt_tokens]
    check_lengths(budgets, args.page_size, lengths, steps, args.period)
    passages = read_passages(loaded, args.text_files, lengths, steps, samples=1)
    data = {one.name: one.sha256 for one in passages}
    _say(loaded, [f"{one.name}, {len(one.tokens):,} tokens" for one in passages], asked)
  else:
    passages, kept = [], kept_traces(Path(args.traces), loaded, budgets)
    data = {one.name: one.about["sha256"] for one in kept}
    _say(loaded, [f"{args.traces}, {len(kept)} traces"], asked)

  def measure() -> Iterable[Row]:
    traces = kept if args.traces else _traces(loaded, passages, budgets, steps, args.page_size)
    case = _case(args, loaded.name, loaded.model.config, traces, budgets, ())
    return ITEMS[name].run(case)

  return Started(loaded, data, title.format(loaded.name), measure)


def _counted(args, name: str, source: str, budgets, size: Size, title: str) -> Started:
  """Of a shape alone."""
  model, _ = abstract(source)
  shape = source.removeprefix("random:").rstrip("/").rpartition("/")[2]
  contexts, serving = (), None
  if name == "memory":
    texts = size.contexts if args.contexts is None else args.contexts
    contexts = cli.positive_ints("contexts", texts)
    make_store(args.store)
    said = f"store   {args.store}\ncontexts {', '.join(texts)} tokens"
  else:
    serving = serving_flags.serving(args)
    least, most = serving.prompt_tokens
    said = (
      f"machine {serving.machine.name}, simulated\n"
      f"requests {serving.requests}, prompts of {least:,} to {most:,} tokens"
    )
  print(f"model   the shape of {shape}\n{said}", flush=True)
  case = _case(args, shape, model.config, (), budgets, contexts)._replace(serving=serving)
  return Started(None, {}, title.format(shape), lambda: ITEMS[name].run(case))


def _case(args, model: str, config, traces, budgets: Sequence[int], contexts) -> Case:
  return Case(
    model=model,
    config=config,
    traces=tuple(traces),
    budgets=tuple(budgets),
    page_size=args.page_size,
    fraction=args.fraction,
    period=args.period,
    store=args.store,
    contexts=tuple(contexts),
  )


def kept_traces(folder: Path, loaded: Loaded, budgets: Sequence[int]) -> list[Trace]:
  """The traces of a folder that are of this model.

  Raises:
    ValueError: there are none, or one lacks a budget.
  """
  paths = sorted(folder.expanduser().glob("*.npz"))
  traces = [page_traces.load(path) for path in paths]
  traces = [one for one in traces if one.about["content_hash"] == loaded.content_hash]
  if not traces:
    raise ValueError(
      f"{folder} has no trace of {loaded.name}; make some with scripts.profile_heads"
    )
  has = set.intersection(*({*one.chosen} for one in traces))
  if not {*budgets} <= has:
    raise ValueError(
      f"the traces in {folder} are of budgets of {', '.join(map(str, sorted(has)))} pages, "
      f"expected {', '.join(map(str, budgets))}; give --budget_tokens as there"
    )
  return traces


def _traces(
  loaded: Loaded, passages: Sequence[Passage], budgets: Sequence[int], steps: int, page_size: int
) -> list[Trace]:
  runner = page_traces.watcher(loaded, budgets, page_size, max(len(one.tokens) for one in passages))
  return [page_traces.trace(runner, loaded, budgets, one, steps) for one in passages]


def _say(loaded: Loaded, read: Sequence[str], budgets: Sequence[str]) -> None:
  print(
    f"model   {loaded.name}, sha256 {loaded.content_hash[:16]}\n"
    f"texts   {'; '.join(read)}\n"
    f"budget  {', '.join(budgets)} tokens",
    flush=True,
  )


PAPER = Paper(ITEMS, define_flags, start)
