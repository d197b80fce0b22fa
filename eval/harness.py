"""Asks a model a batch of questions under one policy, and makes a result row of a task's answers.

Questions may come with a recording of their prompts (`eval.replay`), which every policy then
replays instead of prefilling; the time to the first token is not measured then.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from eval import replay, results, tasks
from eval.lines import Line
from eval.predictions import Prediction
from eval.replay import Recording
from eval.tasks import Example
from kvjax import POLICIES, Generation, Runner, Sampling, generate
from kvjax.engine.generate import Progress, decode
from kvjax.policies import split_spec
from kvjax.stores import traffic
from kvjax.types import Policy
from models import Loaded

# Sums over a batch that its lines keep of `kvjax.stores.traffic.totals`.
_RECALL = ("selected", "resident", "pages_used", "pages_hit", "moved_bytes")
_WARM_UP = 3  # new tokens: the first, one that compiles the decode step, one more


def prompts(runner: Runner, batch: Sequence[Example]) -> list[list[int]]:
  """A prompt for each row of a runner: the last one again where there are fewer examples."""
  missing = runner.prefill_config.batch_size - len(batch)
  return [example.prompt_ids for example in [*batch, *[batch[-1]] * missing]]


def ending(loaded: Loaded, batch: Sequence[Example]) -> dict[str, Any]:
  """The options stop_ids and sampling of `generate`: where the answers of a batch end.

  Runners compile for each sampling. Where a task ends answers itself, none begins with such a
  token (`Example.stop_ids`).
  """
  assert loaded.tokenizer is not None
  stop_ids = {*loaded.tokenizer.eos_ids, *batch[0].stop_ids}
  not_first = tuple(sorted(stop_ids)) if batch[0].stop_ids else ()
  return {"stop_ids": stop_ids, "sampling": Sampling(not_first=not_first)}


def compile_runner(
  loaded: Loaded, runner: Runner, batch: Sequence[Example], recording: Recording | None = None
) -> float:
  """Seconds that it takes to compile a runner for a batch, run on the beginnings of its prompts."""
  begin = time.perf_counter()
  short = [prompt[: runner.chunk_tokens // 2] for prompt in prompts(runner, batch)]
  part = None if recording is None else recording._replace(prompts=short)
  options = ending(loaded, batch) | {"stop_ids": ()}  # an early end would compile too little
  _generate(loaded, runner, short, part, max_new_tokens=_WARM_UP, **options)
  return time.perf_counter() - begin


def ask(
  loaded: Loaded,
  runner: Runner,
  batch: Sequence[Example],
  recording: Recording | None = None,
  progress: Progress = lambda phase, done, total: None,
) -> list[Prediction]:
  """Asks some questions of one task, greedily, and scores the answers.

  An answer ends where the model ends it, or at its own limit; what the rows of the batch do after
  that, and rows that repeat an example, are left out.

  Returns:
    A prediction for each example, without its field `batch`.
  """
  result = _generate(
    loaded,
    runner,
    prompts(runner, batch),
    recording,
    max_new_tokens=max(example.new_tokens for example in batch),
    progress=progress,
    **ending(loaded, batch),
  )
  timing = {
    "ttft_s": None if recording else result.ttft_s,
    "step_s": [round(second, 6) for second in result.step_s],
    "recall": traffic.totals(result.cache),
  }
  return [
    _prediction(loaded, runner, example, tokens, stopped) | timing
    for example, tokens, stopped in zip(batch, result.tokens, result.stopped, strict=False)
  ]


def _prediction(
  loaded: Loaded, runner: Runner, example: Example, tokens: list[int], stopped: bool
) -> Prediction:
  assert loaded.tokenizer is not None
  said = tokens[: example.new_tokens]
  text = loaded.tokenizer.decode(said)
  return case_of(runner) | {
    "page_size": runner.prefill_config.page_size,
    "task": example.task,
    "id": example.id,
    "pred": text,
    "answers": list(example.references),
    "all_classes": list(example.classes) or None,
    "length": example.length,
    "score": tasks.score(example.task, text, example.references, example.classes),
    "stopped": stopped and len(tokens) < example.new_tokens,
    "prompt_tokens": len(example.prompt_ids),
    "output_tokens": len(said),
  }


def case_of(runner: Runner) -> dict[str, str | int | None]:
  """What tells the runners of a run apart: policy, store, and the budget that was asked for."""
  policy = runner.policy
  return {
    "policy": policy.name,
    "store": runner.store.name,
    "budget_tokens": policy.asked_tokens,
  }


def _generate(
  loaded: Loaded,
  runner: Runner,
  prompts: Sequence[Sequence[int]],
  recording: Recording | None,
  **options,
) -> Generation:
  params = loaded.params
  if recording is None:
    return generate(runner, params, prompts, **options)
  return decode(runner, params, *replay.replayed(runner, params, recording), **options)


def observation_window(policy: Policy, make: Callable[..., Policy] | None = None) -> int | None:
  """W of a policy that drops what the last W tokens of the prompt do not attend to; None otherwise.

  Such policies have an option `window` (SnapKV and its kin). They see what is asked before they
  drop anything if the question stands within those tokens.

  Args:
    policy: any; if its window is not the default, its name says so, as on command lines.
    make: the function that made it; by default the one of its name.
  """
  name, options = split_spec(policy.name)
  make = make or POLICIES.get(name)
  known = inspect.signature(make).parameters if make and policy.keep else {}
  return int(options.get("window", known["window"].default)) if "window" in known else None


def task_row(
  loaded: Loaded,
  runner: Runner,
  examples: Sequence[Example],
  predictions: Sequence[Prediction],
  compile_s: float | None,
) -> results.Row:
  """The row of one task, but for what compares it with dense.

  Beside the fields of every row: `question_tokens`, the most tokens from the beginning of a
  question to the end of its prompt; `window_tokens`, see `observation_window`, and
  `question_in_window`, whether all questions fit in it.

  Args:
    loaded: the model.
    runner: what answered.
    examples: all of the task.
    predictions: their answers under this runner, in any order.
    compile_s: seconds of `compile_runner`, if they are known.
  """
  row = results.runner_row(
    runner,
    model=loaded.name,
    task=examples[0].task,
    metric=tasks.metric(examples[0].task),
    score=math.fsum(one["score"] for one in predictions) / len(predictions),  # in any order
    num_examples=len(predictions),
    limit_hits=sum(not one["stopped"] for one in predictions),
    prompt_tokens=max(len(example.prompt_ids) for example in examples),
    output_tokens=max(example.new_tokens for example in examples),
    compile_s=compile_s,
    **speeds(predictions),
  )
  return row | _question_fields(runner, examples)


def speeds(predictions: Sequence[Line]) -> results.Row:
  """The fields of time of a row. Times of a batch count once, and repeated rows are no work.

  The first token of an answer belongs to the prefill. A stop token is made by a step like others.

  Args:
    predictions: or any lines (`eval.lines`).
  """
  batches = {one["batch"]: one for one in predictions}.values()
  timed = [one for one in predictions if one["ttft_s"] is not None]
  step_s = [second for one in batches for second in one["step_s"]]
  fields = {}
  if timed:
    prefill_s = {one["batch"]: one["ttft_s"] for one in timed}
    prompt_tokens = sum(one["prompt_tokens"] for one in timed)
    fields |= {"prefill_tokens_per_s": prompt_tokens / sum(prefill_s.values())}
    fields |= results.percentiles("ttft_s", [one["ttft_s"] for one in timed])
  if step_s:  # every answer may end with its first token
    made = sum(one["output_tokens"] + one["stopped"] - 1 for one in predictions)
    fields |= {"decode_tokens_per_s": made / sum(step_s)} | results.percentiles("tpot_s", step_s)
  return fields | recalls(predictions)


def recalls(predictions: Sequence[Line]) -> results.Row:
  """The fields of a row about what came back from the host; none where nothing is there."""
  batches = {one["batch"]: one for one in predictions if one.get("recall")}.values()
  steps = sum(len(one["step_s"]) for one in batches)
  if not steps:
    return {}
  total = {name: sum(one["recall"][name] for one in batches) for name in _RECALL}
  return results.recall_fields(total, steps)


def _question_fields(runner: Runner, examples: Sequence[Example]) -> results.Row:
  longest = max(example.question_tokens for example in examples)
  window = observation_window(runner.policy)
  return {
    "question_tokens": longest,
    "window_tokens": window,
    "question_in_window": None if window is None else longest <= window,
  }
