"""Bidaw's figures: their flags, and the conversations that they are about."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from absl import flags

from eval.tables import human_bytes
from kvjax.sim import MACHINES, machine
from kvjax.sim.generator import CONTROL, INTERACTIVE, generate
from kvjax.sim.traces import read_trace
from kvjax.sim.workloads import Workload, sample_users, users_per_minute
from models import abstract
from scripts.reproduce_bidaw import (
  ablation,
  correlation,
  host_memory,
  latency,
  miss_rate,
  overheads,
  percentiles,
  queueing,
  ssd_bandwidth,
  tensor_efficiency,
  trace,
)
from scripts.reproduce_bidaw.case import Case
from scripts.reproducing import Item, Paper, Started

flags.disclaim_key_flags()  # those defined here belong to the command

COUNTED: dict[str, Item] = {"trace": trace.ITEM, "correlation": correlation.ITEM}
SERVED: dict[str, Item] = {
  "latency": latency.ITEM,
  "miss_rate": miss_rate.ITEM,
  "ablation": ablation.ITEM,
}
AT_ONE_RATE: dict[str, Item] = {
  "host_memory": host_memory.ITEM,
  "queueing": queueing.ITEM,
  "percentiles": percentiles.ITEM,
  "ssd_bandwidth": ssd_bandwidth.ITEM,
}
WITHOUT_TRACE: dict[str, Item] = {
  "tensor_efficiency": tensor_efficiency.ITEM,
  "overheads": overheads.ITEM,
}
ITEMS = COUNTED | SERVED | AT_ONE_RATE | WITHOUT_TRACE
SIMULATED = ("latency", "ablation", *AT_ONE_RATE)  # the others count, but for seconds of loads
MADE = {profile.name: profile for profile in (INTERACTIVE, CONTROL)}


class Size(NamedTuple):
  """What a flag that is not given means."""

  model: str
  users: int | None
  rates: tuple[str, ...]
  minutes: float = 0.0  # of arrivals, where there is no number of users
  conversations: tuple[int, ...] = ()
  host_gb: float = 200.0


FULL = Size("random:opt-13b", 6000, ("10", "20", "30"))
SMALL = Size("random:opt-13b", 300, ("10",), host_gb=5.0)  # less than a few minutes of chats keep
SIZES: tuple[tuple[Mapping[str, Item], Size, Size], ...] = (
  (COUNTED, FULL, SMALL),
  (
    SERVED,
    FULL._replace(users=None, rates=("10", "15", "20", "25", "30", "35"), minutes=60.0),
    SMALL._replace(users=None, rates=("10", "25"), minutes=3.0),
  ),
  (
    AT_ONE_RATE,
    FULL._replace(users=None, rates=("20",), minutes=60.0),
    SMALL._replace(users=None, rates=("25",), minutes=3.0),
  ),
  (
    WITHOUT_TRACE,
    FULL._replace(conversations=(100, 1_000, 10_000)),
    SMALL._replace(conversations=(100, 1_000)),
  ),
)


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
  flags.DEFINE_float(
    "host_gb",
    None,
    f"bidaw: memory for histories; by default {FULL.host_gb:g}, {SMALL.host_gb:g} with --small.",
    lower_bound=0,
  )
  flags.DEFINE_enum("machine", "a800", list(MACHINES), "bidaw: whose disk, and bytes of a number.")
  flags.DEFINE_integer("seed", 0, "bidaw: of what is made or chosen.", lower_bound=0)


def start(args: flags.FlagValues, name: str) -> Started:
  """Checks everything and says what will be done.

  Raises:
    ValueError: a flag that is not legal, or a file that is no trace.
    OSError: there is no such file.
  """
  size = next(small if args.small else full for items, full, small in SIZES if name in items)
  source = args.model if args["model"].present else size.model
  model, _ = abstract(source)
  shape = source.removeprefix("random:").rstrip("/").rpartition("/")[2]
  host_bytes = 1e9 * (size.host_gb if args.host_gb is None else args.host_gb)
  case = Case(shape, model.config, (), host_bytes, machine(args.machine), size.conversations)
  if name in WITHOUT_TRACE:
    return Started(None, {}, f"Bidaw, {name}", lambda: ITEMS[name].run(case))
  workloads, data = _workloads(args, size)
  case = case._replace(workloads=workloads)
  title = f"Bidaw, {name}: {args.trace}, {shape}, {human_bytes(case.host_bytes)} for histories"
  if name in SIMULATED:
    title += f", {args.machine}, simulated"
    print(f"machine {args.machine}, simulated")
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
