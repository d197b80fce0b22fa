"""Finds the KV heads of a model that keep choosing the same pages: FlexiCache's profile.

    python -m scripts.profile_heads --budget_tokens=1024,2048 --out_dir=runs/heads
    python -m scripts.profile_heads --text_files=book.md,meetings.jsonl --prompt_tokens=6000,8000

The model reads passages of each text densely and decodes what follows in them, whatever it says
itself; at every step FlexiCache's ranking is asked, head by head, which pages it would take. From
these sets come the instability of each head and the unstable ones (`kvjax.profiling`). --out_dir
gets a profile for each budget, which is an option of the policy, and two pictures of it:

    python -m eval.run_needle --policies=dense,flexicache:profile=runs/heads/MODEL-heads-64.json

A run that was cut short goes on where it was when the same command is given again: what was seen of
each passage is kept in OUT_DIR/traces, which may be deleted afterwards. profiles/ has profiles of
SmolLM2 and of small-llama.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from eval import cli
from eval.results import write_atomically
from kvjax.profiling import Profile, head_stability, heads_json
from models import load
from scripts import heads_drawing
from scripts.heads_profile import mean_by_distance, profile_of, telling_layer
from scripts.page_texts import read_passages
from scripts.page_traces import Trace, traces_of

DISTANCES = (1, 2, 4, 8, 15, 24, 32, 48, 63)


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.DEFINE_list(
    "budget_tokens", ["1024", "2048"], "Tokens that a head attends to, a profile for each."
  )
  cli.define_page_size_flag()
  flags.DEFINE_list(
    "text_files",
    ["king_james", "records"],
    "Texts: *.txt, *.md, or *.jsonl of LongBench, L-Eval, key-value retrieval or dialogues; "
    "king_james is fetched, records are made.",
  )
  flags.DEFINE_list("prompt_tokens", ["6000"], "Tokens before the first step; lengths of passages.")
  flags.DEFINE_integer("steps", 64, "Tokens that are decoded of each passage.", lower_bound=2)
  flags.DEFINE_integer("samples", 1, "Passages of each length of each text.", lower_bound=1)
  flags.DEFINE_float(
    "fraction", 0.25, "Of the heads: how many are unstable.", lower_bound=0, upper_bound=1
  )
  flags.DEFINE_integer(
    "period", head_stability.WINDOW_STEPS, "Steps of a window: between two rankings.", lower_bound=2
  )
  cli.define_out_dir("profile_heads", "Folder for profiles, pictures and traces.")


def main(args: flags.FlagValues) -> None:
  """Says what it will do, reads, and writes a profile for each budget."""
  out = Path(args.out_dir).expanduser()
  budgets = budgets_in_pages(args.budget_tokens, args.page_size)
  lengths = cli.positive_ints("prompt_tokens", args.prompt_tokens)
  check_lengths(budgets, args.page_size, lengths, args.steps, args.period)
  if out.exists() and not out.is_dir():
    raise ValueError(f"{out} is a file; choose another --out_dir")
  loaded = load(args.model)
  paths = {pages: out / f"{loaded.name}-heads-{pages}.json" for pages in budgets}
  for path in paths.values():
    if path.exists():
      raise ValueError(f"{path} exists; choose another --out_dir")
  read = read_passages(loaded, args.text_files, lengths, args.steps, args.samples)
  print(
    f"model   {loaded.name}, sha256 {loaded.content_hash[:16]}\n"
    f"texts   {', '.join(args.text_files)}: {len(read)} passages, "
    f"{' and '.join(f'{length:,}' for length in lengths)} tokens and {args.steps} steps each\n"
    f"budgets {', '.join(args.budget_tokens)} tokens in pages of {args.page_size}\n"
    f"results {out}",
    flush=True,
  )
  traces = traces_of(loaded, read, budgets, args.steps, args.page_size, out / "traces")
  for pages, path in paths.items():
    profile = profile_of(loaded, traces, pages, args.fraction, args.period)
    _draw(profile, traces, path)
    write_atomically(path, heads_json(profile))
    print(f"{_summary(profile)}\n{path}: {path.stat().st_size:,} bytes")


def budgets_in_pages(budget_tokens: Sequence[str], page_size: int) -> list[int]:
  """K of each budget, ascending.

  Raises:
    ValueError: one is no number or under one page.
  """
  tokens = cli.positive_ints("budget_tokens", budget_tokens)
  if min(tokens) < page_size:
    raise ValueError(
      f"--budget_tokens {min(tokens)} is under one page of {page_size} tokens; give at least one"
    )
  return sorted({count // page_size for count in tokens})


def _summary(profile: Profile) -> str:
  settings, scores = profile.settings, profile.arrays["instability"]
  heads = profile.arrays["unstable_heads"]
  marked = np.zeros(scores.shape, bool)
  marked[tuple(heads.T)] = True
  text = (
    f"K = {settings['pages']} pages: {len(heads)} of {scores.size} heads are unstable, in "
    f"{len({*heads[:, 0].tolist()})} of {len(scores)} layers"
  )
  if 0 < len(heads) < scores.size:
    means = [scores[chosen].mean() for chosen in (marked, ~marked)]
    text += "; instability {:.2f}, of the others {:.2f}".format(*means)
  said, chance = settings["consistency"], len(heads) / scores.size
  for name, found in said.items():
    share = found and (found["overlap"] if isinstance(found, dict) else found)
    text += f"\n  {name.replace('_', ' ')}: " + (
      f"{share:.2f}, by chance {chance:.2f}" if share else "-"
    )
  return text


def _draw(profile: Profile, traces: Sequence[Trace], path: Path) -> None:
  """A heat map, and the overlap by distance as in Fig. 1, of the layer that differs most."""
  settings, scores = profile.settings, profile.arrays["instability"]
  unstable = profile.arrays["unstable_heads"].tolist()
  what = (
    f"{profile.model}, {settings['pages']} pages of {settings['page_size']} tokens, "
    f"{len(traces)} passages of {len({one.name for one in traces})} texts"
  )
  heads_drawing.heat_map(scores, unstable, what, path.with_name(f"{path.stem}-map.png"))
  distances = [one for one in DISTANCES if one < min(len(trace.mass) for trace in traces)]
  overlap = mean_by_distance(traces, settings["pages"], distances)
  layer = telling_layer(scores, unstable)
  heads_drawing.by_distance(
    distances, overlap, unstable, layer, what, path.with_name(f"{path.stem}-overlap.png")
  )


def check_lengths(
  budgets: Sequence[int], page_size: int, lengths: Sequence[int], steps: int, period: int
) -> None:
  """Raises ValueError for steps that are no window, or prompts that fit a budget."""
  if steps < period:
    raise ValueError(f"{steps} steps are less than one --period of {period}; decode more")
  if max(budgets) * page_size >= min(lengths):
    raise ValueError(
      f"--prompt_tokens {min(lengths)} fits a budget of {max(budgets)} pages of {page_size} "
      "tokens, so that nothing is chosen; give longer passages or a lower --budget_tokens"
    )


if __name__ == "__main__":
  cli.run(main, define_flags)
