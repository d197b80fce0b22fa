"""What each policy takes to select, apart from attention: milliseconds of a decode step.

    python -m eval.run_selection_cost --policies=dense,quest,h2o --prompt_tokens=8160

A prompt is prefilled once and what every layer projected of it is kept (`eval.replay`). Then each
policy takes the last tokens one by one, all policies in turn, in steps that hold no product with
the weights but those that a policy itself asks for:

    select  the token is kept, looked at (`preprocess`), and every layer selects (`select`)
    attend  the same, then what was selected is recalled and attended to

Dense attends to everything and selects nothing: its `attend` is what a policy must stay under to be
worth its while. Beside the fields of every result row: `select_s` and `attend_s`, medians, and
`select_ratio`, select over the attend of dense.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli, layers, replay, texts
from eval.replay import Recording
from eval.results import Row, append_row, check_new_run, make_manifest, run_folder, runner_row
from eval.run_throughput import make_prompts, pick_policies
from eval.tables import table
from kvjax import CacheConfig, KVCache, Runner, prepare
from kvjax.engine.generate import check_request
from kvjax.types import Params
from models import load

_COLUMNS = (
  *("policy", "store", "budget_tokens", "prompt_tokens", "select_s", "attend_s", "select_ratio"),
  *("device_kv_bytes", "metadata_bytes"),
)
_WARM_UP = 2


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  cli.define_policies_flags(["dense", "quest"], [1024])
  flags.DEFINE_integer("prompt_tokens", 8160, "Tokens before the first step.", lower_bound=1)
  flags.DEFINE_integer("steps", 16, "Steps that are timed, of each kind.", lower_bound=1)
  flags.DEFINE_string("text_file", None, "UTF-8 text of the prompt; random tokens by default.")
  cli.define_out_dir("selection-cost")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what it will do, measures and writes."""
  out_dir = Path(args.out_dir).expanduser()
  check_new_run(out_dir)
  budgets = cli.positive_ints("budget_tokens", args.budget_tokens)
  policies = pick_policies(args.policies, args.stores, budgets, args.page_size)
  text = None if args.text_file is None else texts.read_text(Path(args.text_file))
  loaded = load(args.model)
  new_tokens = args.steps + _WARM_UP
  (tokens,) = make_prompts(loaded, text, args.prompt_tokens + new_tokens, 1)
  capacity = len(tokens) + 1
  config = CacheConfig(1, capacity, args.page_size, base_tokens=capacity)
  runners = [prepare(loaded.model, policy, store, config) for policy, store in policies]
  recorder = replay.recorder(loaded.model, config)
  check_request(recorder, [tokens], 1)
  print(
    f"{loaded.name}: {args.prompt_tokens:,} tokens prefilled once, then {new_tokens} steps of each "
    f"of {len(runners)} caches, selecting alone and attending too; results go to {out_dir}\n"
    f"layers {layers.summary(runners) or '-'}",
    flush=True,
  )
  data = {} if text is None else {str(args.text_file): hashlib.sha256(text.encode()).hexdigest()}
  with run_folder(out_dir, make_manifest(cli.flag_values(), loaded, data)):
    recording = replay.record(recorder, loaded.params, [tokens])
    rows = measure(runners, loaded.params, recording, new_tokens)
    rows = [row | {"model": loaded.name} for row in rows]
    for row in rows:
      append_row(out_dir, row)
  print(f"\n{table(rows, _COLUMNS)}\n\nwritten to {out_dir}")


def measure(
  runners: Sequence[Runner], params: Params, recording: Recording, new_tokens: int
) -> list[Row]:
  """Result rows; the last new_tokens tokens of the recording are decoded, some of them untimed."""
  prompt = recording.prompts[0][:-new_tokens]
  seconds = np.zeros((2, len(runners), new_tokens))  # select, attend
  for attended in (False, True):
    caches = []
    for runner in tqdm(runners, desc="replay", leave=False):
      caches.append(replay.replayed(runner, params, recording._replace(prompts=[prompt]))[1])
    for step in tqdm(range(new_tokens), desc="attend" if attended else "select", leave=False):
      for place, runner in enumerate(runners):
        begin = time.perf_counter()
        caches[place] = _step(runner, attended, params, recording, caches[place])
        seconds[int(attended), place, step] = time.perf_counter() - begin
  select_s, attend_s = np.median(seconds[:, :, _WARM_UP:], axis=-1)
  dense = next((n for n, runner in enumerate(runners) if runner.policy.name == "dense"), None)
  return [
    runner_row(
      runner,
      task="selection_cost",
      prompt_tokens=len(prompt),
      output_tokens=new_tokens - _WARM_UP,
    )
    | {
      "select_s": float(select_s[n]),
      "attend_s": float(attend_s[n]),
      "select_ratio": None if dense is None else float(select_s[n] / attend_s[dense]),
    }
    for n, runner in enumerate(runners)
  ]


def _step(
  runner: Runner, attended: bool, params: Params, recording: Recording, cache: KVCache
) -> KVCache:
  *results, cache = replay.replayed_step(runner, attended, params, recording.layers, cache)
  jax.block_until_ready((results, cache))
  return cache


if __name__ == "__main__":
  cli.run(main, define_flags)
