"""How many layers select under a policy, for plans: some policies leave the first layers dense, and
on a small model that may be all of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax import Runner


def selecting(runner: Runner) -> str:
  """28 of 30 layers select; where none does, that the run is dense whatever the policy's name."""
  count, layers = len(runner.plan.select_layers), runner.model.config.num_layers
  return f"{count} of {layers} layers select{'' if count else ': this run is dense'}"


def summary(runners: Sequence[Runner]) -> str:
  """One line, quest: 28 of 30 layers select; ...: each policy once, dense itself left out.

  Empty where there is no other.
  """
  others = [runner for runner in runners if runner.policy.name != "dense"]
  return "; ".join(dict.fromkeys(f"{one.policy.name}: {selecting(one)}" for one in others))
