"""Makes a figure of a paper again: numbers, a plot, and the paper's number beside ours.

    python -m scripts.reproduce --paper=opkv --item=io_amplification --out_dir=runs/fig2
    python -m scripts.reproduce --paper=opkv --item=throughput --batch_sizes=1,8 --out_dir=runs/t
    python -m scripts.reproduce --paper=flexicache --item=overlap --out_dir=runs/table1
    python -m scripts.reproduce --paper=opkv --item=reuse --small --out_dir=runs/seconds
    python -m scripts.reproduce --paper=bidaw --item=correlation --trace=FILE --out_dir=runs/fig12

For opkv and flexicache the model reads real texts; then it decodes what follows in them, token by
token, whatever it says itself (teacher forcing). Items that count (all of opkv's but `recall_share`
and `throughput`) give the same numbers on every machine. bidaw is about conversations, from a trace
or made, and no model runs; of its items only `overheads` is timed. --out_dir gets
results.jsonl, manifest.json, comparison.json and a PNG; docs/opkv.md, docs/flexicache.md and
docs/bidaw.md have the definitions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from eval import cli
from eval.results import (
  append_row,
  check_new_run,
  make_manifest,
  run_folder,
  write_atomically,
)
from eval.tables import table
from scripts.reproduce_bidaw import starting as bidaw
from scripts.reproduce_flexicache import starting as flexicache
from scripts.reproduce_opkv import starting as opkv
from scripts.reproduce_opkv.timing import WARM_UP
from scripts.reproducing import Comparison, Paper

PAPERS: dict[str, Paper] = {
  "opkv": opkv.PAPER,
  "flexicache": flexicache.PAPER,
  "bidaw": bidaw.PAPER,
}


def define_flags() -> None:
  """The flags of this command; the help of those of one paper begins with its name."""
  items = [f"{name} has {', '.join(paper.items)}" for name, paper in PAPERS.items()]
  flags.DEFINE_enum("paper", None, list(PAPERS), "Which paper.", required=True)
  flags.DEFINE_string("item", None, f"Which of its figures: {'; '.join(items)}.", required=True)
  cli.define_model_flag()
  flags.DEFINE_integer(
    "prompt_tokens", None, "Tokens before the first step; default by item.", lower_bound=64
  )
  flags.DEFINE_integer(
    "output_tokens",
    None,
    f"Decode steps; default by item. Where opkv times them, the first {WARM_UP} are not counted.",
    lower_bound=WARM_UP + 1,
  )
  cli.define_page_size_flag()
  flags.DEFINE_bool(
    "small", False, "A try: models/small/small-llama and short texts, or few conversations."
  )
  for paper in PAPERS.values():
    paper.define_flags()
  cli.define_out_dir("reproduce")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what it will do, measures, draws and compares."""
  paper, out_dir = PAPERS[args.paper], Path(args.out_dir).expanduser()
  item = paper.items.get(args.item)
  if item is None:
    raise ValueError(
      f"--paper={args.paper} has no --item={args.item}; expected one of {', '.join(paper.items)}"
    )
  check_new_run(out_dir)
  started = paper.start(args, args.item)
  print(f"results {out_dir}", flush=True)
  manifest = make_manifest(cli.flag_values(), started.loaded, started.data)
  with run_folder(out_dir, manifest):
    rows = []
    for row in started.measure():
      append_row(out_dir, row)
      rows.append(row)
  item.plot(rows, started.title, out_dir / f"{args.item}.png")
  compared = item.compare(rows)
  content = json.dumps([one._asdict() for one in compared], indent=2)
  write_atomically(out_dir / "comparison.json", content + "\n")
  print(f"\n{table(rows, item.columns)}\n{_beside_ours(compared)}\nwritten to {out_dir}")


def _beside_ours(compared: Sequence[Comparison]) -> str:
  """The paper's numbers, ours, and why they differ."""
  return "".join(
    f"\n{one.figure}: {one.what}\n"
    f"  paper  {one.paper}\n  ours   {one.ours}\n  why    {one.reason}\n"
    for one in compared
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
