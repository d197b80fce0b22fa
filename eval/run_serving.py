"""Conversations served for real, and what the simulator says of the same run.

    python -m eval.run_serving
    python -m eval.run_serving --eviction=lru --host_mb=4
    python -m eval.run_serving --model=models/small/small-opt --tensors=activations
    python -m eval.run_serving --model=smollm2-135m --speed=2 --host_mb=150

A model answers the turns of made conversations as they arrive: histories go to host memory, which
is bounded, and to files, and come back, while others compute (`kvjax.engine.conversing`). Then the
same turns are simulated, on an engine and a disk of which is known what each operation took in the
run (`eval.predicting`), and once more on a machine of an even pace. Answers do not depend on what
was where, nor on what is kept of a history: another --eviction, --host_mb or --tensors gives the
same.

The folder gets manifest.json, results.jsonl with the measured row and the simulated two (fields:
`eval.serving_rows`), and turns.jsonl with a line for each turn, its answer in token ids.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli
from eval.predicting import at_even_pace, measured_setup, predicted_row
from eval.results import (
  TURNS,
  Row,
  append_lines,
  append_row,
  check_new_run,
  make_manifest,
  run_folder,
)
from eval.serving import EVICTIONS, Case, Served, make_turns, serve
from eval.serving_rows import MEANS, measured_row, turn_line
from eval.tables import human_bytes, table
from kvjax import CacheConfig, make_policy, prepare
from kvjax.bidaw.tensor_cache import keeping
from kvjax.engine.continuing import check_continues
from kvjax.engine.conversing import stamp_of
from kvjax.sim.engine_costs import PACE_S
from kvjax.sim.generator import CONTROL, INTERACTIVE, generate
from models import load
from models.memory import params_bytes

SMALL = Path(__file__).resolve().parents[1] / "models" / "small" / "small-llama"
TENSORS = ("keys_values", "activations")
PROFILES = {profile.name: profile for profile in (INTERACTIVE, CONTROL)}
TIMES = (
  *(
    "simulated",
    "even_pace",
    "turns",
    "failed_turns",
    "slot_busy_ratio",
    "mean_ttft_s",
    "ttft_s_p50",
  ),
  *("ttft_s_p99", "mean_tpot_s", "tpot_s_p99", "mean_queueing_s", "mean_latency_s"),
)
PLACES = (
  *(
    "simulated",
    "even_pace",
    "new_turns",
    "host_turns",
    "disk_turns",
    "recomputed_turns",
    "miss_ratio",
  ),
  *("disk_read_bytes", "disk_written_bytes", "read_overlap_ratio", "ready_wait_s", "disk_call_s"),
)


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.FLAGS.set_default("model", str(SMALL))
  flags.DEFINE_enum("eviction", "previous_answer", list(EVICTIONS), "Who leaves host memory.")
  flags.DEFINE_enum("workload", "interactive", list(PROFILES), "How people ask.")
  flags.DEFINE_integer("users", 40, "Conversations.", lower_bound=1)
  flags.DEFINE_float("users_per_minute", 1.2, "That begin, in the time of the workload.")
  flags.DEFINE_float("speed", 50.0, "How many times as fast as in the workload time passes.")
  flags.DEFINE_integer("slots", 4, "Turns that are decoded at once.", lower_bound=1)
  flags.DEFINE_integer("slot_tokens", 2048, "Of the longest conversation.", lower_bound=1)
  flags.DEFINE_integer("chunk_tokens", 64, "That one step of a prefill takes, a power of two.")
  flags.DEFINE_float("host_mb", 12.0, "Host memory for histories, in MB (10^6 bytes).")
  flags.DEFINE_string(
    "histories_dir", None, "Empty folder for histories; default: a temporary one."
  )
  flags.DEFINE_integer("seed", 0, "Of the workload and its tokens.", lower_bound=0)
  flags.DEFINE_enum("tensors", TENSORS[0], TENSORS, "What is kept of histories.")
  cli.define_out_dir("serving")
  for name in ("users_per_minute", "speed", "host_mb"):
    flags.register_validator(name, lambda value: 0 < value < 1e12, "expected a positive number")


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what it will do, serves, simulates and writes."""
  out_dir = Path(args.out_dir).expanduser()
  check_new_run(out_dir)
  case = make_case(args)
  print_plan(case, args)
  with run_folder(out_dir, make_manifest(cli.flag_values(), case.loaded, {})):
    served = _serve(case, args.histories_dir)
    append_lines(out_dir / TURNS, [turn_line(one, served) for one in served.finished])
    measured = measured_row(case, served)
    append_row(out_dir, measured)
    setup = measured_setup(case, served)
    simulated = [predicted_row(case, one, measured) for one in (setup, at_even_pace(setup))]
    for row in simulated:
      append_row(out_dir, row)
  print_tables(measured, *simulated)
  print(f"\nwritten to {out_dir}")


def make_case(args: flags.FlagValues) -> Case:
  """What the flags ask for.

  Raises:
    ValueError: a model that cannot be served so, or no turn that fits.
  """
  loaded = load(args.model)
  config = CacheConfig(args.slots, args.slot_tokens)
  policy = make_policy("dense")
  if args.tensors == "activations":
    policy = keeping(policy)
  runner = prepare(loaded.model, policy, "resident", config, chunk_tokens=args.chunk_tokens)
  check_continues(runner)
  shape = loaded.model.config
  workload = generate(PROFILES[args.workload], args.users, args.users_per_minute, args.seed)
  turns = make_turns(
    workload,
    speed=args.speed,
    most_tokens=min(args.slot_tokens, shape.max_tokens),
    vocab_size=shape.vocab_size,
    seed=args.seed,
  )
  return Case(loaded, runner, turns, args.eviction, int(args.host_mb * 1e6))


def print_plan(case: Case, args: flags.FlagValues) -> None:
  """What will be served, and what it takes."""
  turns, runner = case.turns, case.runner
  asked, answered = sum(len(one.prompt) for one in turns), sum(one.max_new_tokens for one in turns)
  token_bytes = stamp_of(runner).token_bytes
  print(
    f"model {case.loaded.name}, weights {human_bytes(params_bytes(case.loaded.params))}\n"
    f"{len(turns)} turns of {len({one.user for one in turns})} users ({args.workload}, "
    f"{args.speed:g} times as fast), the last after {turns[-1].arrival_s:.0f} s; {asked:,} tokens "
    f"of questions and {answered:,} of answers\n"
    f"device: {args.slots} slots of {args.slot_tokens:,} tokens, "
    f"{human_bytes(runner.decode_bytes.keys_values)}; host: {human_bytes(case.host_bytes)}, "
    f"{case.eviction}, {args.tensors}; disk: at the end "
    f"{human_bytes((asked + answered) * token_bytes)} of histories in "
    f"{args.histories_dir or 'a temporary folder'}",
    flush=True,
  )


def _serve(case: Case, histories_dir: str | None) -> Served:
  with tempfile.TemporaryDirectory(prefix="kvjax-histories-") as temporary:
    folder = Path(histories_dir or temporary).expanduser()
    with tqdm(total=len(case.turns), unit="turn", smoothing=0.1) as bar:
      return serve(case, folder, lambda one: bar.update())


def print_tables(measured: Row, simulated: Row, even: Row) -> None:
  """Times and places of all, and how far they are apart."""
  rows = [measured, simulated, even]
  print(f"\n{table(rows, TIMES)}\n\n{table(rows, PLACES)}\n")
  for row, name in ((simulated, "simulated over measured means"), (even, "told no pace")):
    ratios = ((name[5:-2], row.get(f"{name[5:-2]}_ratio")) for name in MEANS)
    print(f"{name}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios if ratio))
  print(f"told of this run, in means: {told_costs(simulated['costs'])}")


def told_costs(costs: Row) -> str:
  """What the simulator was told, in words."""

  def ms(name: str, times: int = 1) -> str:
    return f"{costs[name] * times * 1e3:.3g} ms"

  low, high = np.percentile(costs["pace"], (5, 95))
  return (
    f"a start {ms('start_s')}, {ms('chunk_s')} more for each chunk that is read, "
    f"{ms('restore_s')} for each that is restored and {ms('attend_s')} for each that one attends "
    f"to; a step {ms('step_s')}, {ms('row_s')} more for each row, {ms('token_s', 1024)} for each "
    f"1,024 tokens of the slots that it reads, and {ms('cold_s')} after a start or an end; the end "
    f"of a turn {ms('store_s')}; a read {ms('read_s')}, at "
    f"{costs['read_bytes_per_s'] / 1e6:,.0f} MB/s, beside which {costs['lost_beside_read']:.0%} of "
    f"the computing is lost; waking up {ms('wake_s')}. In each {PACE_S} s everything took "
    f"{low:.2f} to {high:.2f} times as long (5th and 95th percentile)"
  )


if __name__ == "__main__":
  cli.run(main, define_flags)
