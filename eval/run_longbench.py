"""LongBench under every policy: accuracy, speed and bytes of each, task by task.

    python -m eval.run_longbench --data_dir=LongBench --tasks=qasper,qmsum --policies=dense,quest
    python -m eval.run_longbench --data_dir=LongBench --download --tasks=hotpotqa_e --limit=50

The folder has TASK.jsonl (and TASK_e.jsonl) as in the data set THUDM/LongBench. `eval.longbench`
describes the tasks and scores, `eval.longbench_prompts` the prompts, `eval.grid` the run.
"""

from __future__ import annotations

from absl import flags

from eval import cli, hub, longbench, longbench_prompts, suite

SUITE = suite.Suite(
  name="longbench",
  tasks=longbench.NAMES,
  default=tuple(longbench.TASKS),
  find=longbench.find,
  fields=longbench.FIELDS,
  new_tokens=lambda name: longbench.task_of(name).new_tokens,
  questions=longbench_prompts.questions,
  fetch=hub.fetch_longbench,
)


def define_flags() -> None:
  """The flags of this command."""
  suite.define_flags(SUITE)


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  suite.main(args, SUITE)


if __name__ == "__main__":
  cli.run(main, define_flags)
