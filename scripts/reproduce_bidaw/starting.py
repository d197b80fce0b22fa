"""Bidaw's figures: their flags, and the conversations that they are about."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

from absl import flags

from eval.tables import human_bytes
from kvjax.sim import MACHINES, machine
from kvjax.sim.generator import CONTROL, INTERACTIVE, generate
from kvjax.sim.traces import read_trace
from kvjax.sim.workloads import Workload, sample_users, users_per_minute
from models import abstract
from scripts.reproduce_bidaw import ablation, correlation, latency, miss_rate, trace
from scripts.reproduce_bidaw.case import Case
from scripts.reproducing import Item, Paper, Started

flags.disclaim_key_flags()  # those defined here belong to the command

COUNTED: dict[str, Item] = {"trace": trace.ITEM, "correlation": correlation.ITEM}
SERVED: dict[str, Item] = {
  "latency": latency.ITEM,
  "miss_rate": miss_rate.ITEM,
  "ablation": ablation.ITEM,
}
ITEMS = COUNTED | SERVED
MADE = {profile.name: profile for profile in (INTERACTIVE, CONTROL)}


class Size(NamedTuple):
  """What a flag that is not given means."""

  model: str
  users: int | None
  rates: tuple[str, ...]
  minutes: float = 0.0  # of arrivals, where there is no number of users


FULL = Size("random:opt-13b", 6000, ("10", "20", "30"))
SMALL = Size("random:opt-13b", 300, ("10",))
FULL_SERVED = Size("random:opt-13b", None, ("10", "15", "20", "25", "30"), 60.0)
SMALL_SERVED = Size("random:opt-13b", None, ("10", "25"), 3.0)


def define_flags() -> None:
  """--trace, --users, --users_per_minute, --host_gb, --machine and --seed."""
  flags.DEFINE_string(
    "trace",
    INTERACTIVE.name,
    f"bidaw: {' or '.join(MADE)}, which are made, or a file: Bidaw's public trace, Mooncake's, "
    "Azure's or Qwen-Bailian's.",
  )
  flags.DEFINE_integer("users", None, "bidaw: conversations that are made.", lower_bound=2)
  flags.DEFINE_list(
    "users_per_minute",
    None,
    "bidaw: conversations that begin in a minute, one rate or several. Of a file so many of its "
    "users are chosen; by default all, once.",
  )
  flags.DEFINE_float("host_gb", 200.0, "bidaw: host memory for histories.", lower_bound=0)
  flags.DEFINE_enum("machine", "a800", list(MACHINES), "bidaw: whose disk, and bytes of a number.")
  flags.DEFINE_integer("seed", 0, "bidaw: of what is made or chosen.", lower_bound=0)


def start(args: flags.FlagValues, name: str) -> Started:
  """Checks everything and says what will be done.

  Raises:
    ValueError: a flag that is not legal, or a file that is no trace.
    OSError: there is no such file.
  """
  sizes = (FULL_SERVED, SMALL_SERVED) if name in SERVED else (FULL, SMALL)
  size = sizes[args.small]
  source = args.model if args["model"].present else size.model
  model, _ = abstract(source)
  shape = source.removeprefix("random:").rstrip("/").rpartition("/")[2]
  workloads, data = _workloads(args, size)
  case = Case(shape, model.config, workloads, args.host_gb * 1e9, machine(args.machine))
  title = f"Bidaw, {name}: {args.trace}, {shape}, {human_bytes(case.host_bytes)} for histories"
  for one in workloads:
    rate = users_per_minute(one)
    rate_text = "all users at once" if rate is None else f"{rate:.3g} users a minute"
    print(f"trace   {one.name}, {len(one):,} requests, {rate_text}", flush=True)
    if one.backwards:
      print(f"        {one.backwards:,} of them went back in time and arrive with the one before")
  print(
    f"model   the shape of {shape}, {human_bytes(case.token_bytes)} a token\n"
    f"host    {human_bytes(case.host_bytes)} for histories",
    flush=True,
  )
  return Started(None, data, title, lambda: ITEMS[name].run(case))


def _workloads(args: flags.FlagValues, size: Size) -> tuple[tuple[Workload, ...], dict[str, str]]:
  """One for each rate, and the sha256 of the file."""
  if args.trace in MADE:
    rates = _rates(size.rates if args.users_per_minute is None else args.users_per_minute)
    users = [args.users or size.users or round(size.minutes * rate) for rate in rates]
    made = zip(users, rates, strict=True)
    return tuple(generate(MADE[args.trace], count, rate, args.seed) for count, rate in made), {}
  if args.users is not None:
    raise ValueError(f"--users is for what is made; {args.trace} is a file, expected no --users")
  path = Path(args.trace).expanduser()
  workload = read_trace(path)
  data = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
  if args.users_per_minute is None:
    return (workload,), data
  rates = _rates(args.users_per_minute)
  return tuple(sample_users(workload, rate, args.seed) for rate in rates), data


def _rates(texts: tuple[str, ...] | list[str]) -> list[float]:
  """Ascending, as the comparison takes the highest."""
  try:
    rates = sorted(float(text) for text in texts)
  except ValueError:
    rates = []
  if not rates or rates[0] <= 0 or not all(map(math.isfinite, rates)):
    raise ValueError(
      f"--users_per_minute={','.join(texts)}; expected positive numbers separated by commas"
    )
  return rates


PAPER = Paper(ITEMS, define_flags, start)
