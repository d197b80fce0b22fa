"""Flags of the items that serve requests on a simulated machine."""

from __future__ import annotations

import math

from absl import flags

from eval import cli
from kvjax.sim import machine
from scripts.reproduce_flexicache.case import Serving

flags.disclaim_key_flags()

MACHINE = "h100-nvl"  # the paper's test bed
SLOTS, PROMPT_TOKENS, LEAST_ANSWER = 64, 30_000, 20  # as in the authors' benchmarks


def define_flags() -> None:
  """--requests, --slots, --output_lengths, --rates and --promoted_ratio; bidaw has --machine and
  --seed."""
  flags.DEFINE_integer("requests", None, "flexicache: requests that are served.", lower_bound=1)
  flags.DEFINE_integer("slots", SLOTS, "flexicache: requests decoded at once.", lower_bound=1)
  flags.DEFINE_list("output_lengths", None, "flexicache, throughput: tokens of every answer.")
  flags.DEFINE_list("rates", None, "flexicache, online: requests that arrive in a second.")
  flags.DEFINE_float(
    "promoted_ratio",
    0.29,
    "flexicache: of a stable head's budget, what a ranking promotes; the middle of the paper's.",
    lower_bound=0,
    upper_bound=1,
  )


def serving(args: flags.FlagValues) -> Serving:
  """The requests that flags ask for; prompts of a third of --prompt_tokens to all of them.

  Raises:
    ValueError: a list that is not of positive numbers.
  """
  prompt = args.prompt_tokens or PROMPT_TOKENS
  most = args.output_tokens or (200 if args.small else 2000)
  lengths = args.output_lengths or (["20", "100"] if args.small else ["100", "500", "1000", "1500"])
  rates = args.rates or (["0.4", "1"] if args.small else ["0.2", "0.3", "0.4", "0.5", "0.6"])
  return Serving(
    machine=machine(args.machine if args["machine"].present else MACHINE),
    slots=args.slots,
    requests=args.requests or (40 if args.small else 500),
    prompt_tokens=(-(-prompt // 3), prompt),
    output_lengths=tuple(cli.positive_ints("output_lengths", lengths)),
    output_tokens=(min(LEAST_ANSWER, most), most),
    rates=_rates(rates),
    promoted_ratio=args.promoted_ratio,
    seed=args.seed,
  )


def _rates(texts: list[str]) -> tuple[float, ...]:
  try:
    rates = sorted(map(float, texts))
  except ValueError:
    rates = []
  if not rates or rates[0] <= 0 or not all(map(math.isfinite, rates)):
    raise ValueError(
      f"--rates={','.join(texts)}; expected positive numbers separated by commas, in requests a "
      "second"
    )
  return tuple(rates)
