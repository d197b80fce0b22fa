"""L-Eval under every policy: accuracy, speed and bytes of each, task by task.

    python -m eval.run_leval --data_dir=LEval --tasks=scientific_qa,quality --policies=dense,quest
    python -m eval.run_leval --data_dir=LEval --download --tasks=paper_assistant --limit=20

The folder is that of the repository OpenLMLab/LEval or of the data set L4NLP/LEval, or has the
TASK.jsonl themselves. `eval.leval` describes tasks and scores, `eval.leval_prompts` prompts,
`eval.grid` the run.
"""

from __future__ import annotations

from absl import flags

from eval import cli, hub, leval, leval_prompts, suite

SUITE = suite.Suite(
  name="leval",
  tasks=leval.NAMES,
  default=leval.NAMES,
  find=leval.find,
  fields=leval.FIELDS,
  new_tokens=lambda name: leval_prompts.NEW_TOKENS,
  questions=leval_prompts.questions,
  fetch=hub.fetch_leval,
)


def define_flags() -> None:
  """The flags of this command."""
  suite.define_flags(SUITE)


def main(args: flags.FlagValues) -> None:
  """Checks everything, says what will be done, does it."""
  suite.main(args, SUITE)


if __name__ == "__main__":
  cli.run(main, define_flags)
