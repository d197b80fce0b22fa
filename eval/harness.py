"""Asks a model questions under one policy, and makes a result row of the answers.

A question may come with a recording of its prompt (`eval.replay`), which every policy then replays
instead of prefilling; the time to the first token is not measured then.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eval import replay, results, tasks
from eval.replay import Recording
from eval.tasks import Example
from kvjax import POLICIES, Generation, Runner, generate
from kvjax.engine.generate import Progress, decode
from kvjax.policies import split_spec
from kvjax.types import Policy
from models import Loaded

_WARM_UP = 3  # new tokens: the first, one that compiles the decode step, one more


class Answer(NamedTuple):
  """What came out.

  Attributes:
    text: the answer, without the stop token.
    score: share of the references that it holds.
    stopped: the model ended it, not the limit.
    ttft_s: wall seconds to the first token.
    step_s: wall seconds of each decode step.
  """

  text: str
  score: float
  stopped: bool
  ttft_s: float | None
  step_s: list[float]


def compile_runner(
  loaded: Loaded, runner: Runner, example: Example, recording: Recording | None = None
) -> float:
  """Seconds that it takes to compile a runner and to run it on the beginning of a prompt."""
  begin = time.perf_counter()
  short = example.prompt_ids[: runner.chunk_tokens // 2]
  part = None if recording is None else recording._replace(prompt=short)
  _generate(loaded, runner, short, _WARM_UP, part)
  return time.perf_counter() - begin


def ask(
  loaded: Loaded,
  runner: Runner,
  example: Example,
  recording: Recording | None = None,
  progress: Progress = lambda phase, done, total: None,
) -> Answer:
  """Asks one question, greedily; the answer ends where the model ends it, or at its limit."""
  assert loaded.tokenizer is not None
  result = _generate(
    loaded,
    runner,
    example.prompt_ids,
    example.new_tokens,
    recording,
    stop_ids=loaded.tokenizer.eos_ids,
    progress=progress,
  )
  text = loaded.tokenizer.decode(result.tokens[0])
  score = tasks.score(example.references, text)
  ttft_s = None if recording else result.ttft_s
  return Answer(text, score, result.stopped[0], ttft_s, result.step_s)


def _generate(
  loaded: Loaded,
  runner: Runner,
  prompt: Sequence[int],
  new_tokens: int,
  recording: Recording | None,
  **options,
) -> Generation:
  params = loaded.params
  if recording is None:
    return generate(runner, params, [prompt], max_new_tokens=new_tokens, **options)
  prefilled = replay.replayed(runner, params, recording)
  return decode(runner, params, *prefilled, max_new_tokens=new_tokens, **options)


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
  answers: Sequence[Answer],
  compile_s: float,
) -> results.Row:
  """The row of one task, but for what compares it with dense.

  Beside the fields of every row: `question_tokens`, the most tokens from the beginning of a
  question to the end of its prompt; `window_tokens`, see `observation_window`, and
  `question_in_window`, whether all questions fit in it; `answers`, each with what was expected.
  """
  tokens = [len(example.prompt_ids) for example in examples]
  ttft_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
  step_s = [second for answer in answers for second in answer.step_s]
  row = results.make_row(
    model=loaded.name,
    policy=runner.policy.name,
    store=runner.store.name,
    budget_tokens=runner.policy.asked_tokens,
    page_size=runner.prefill_config.page_size,
    batch_size=1,
    device=results.device_kind(),
    task=examples[0].task,
    metric=tasks.METRIC,
    score=sum(answer.score for answer in answers) / len(answers),
    num_examples=len(answers),
    limit_hits=sum(not answer.stopped for answer in answers),
    prompt_tokens=max(tokens),
    output_tokens=max(example.new_tokens for example in examples),
    compile_s=compile_s,
    simulated=False,
    **(_prefill_speed(tokens, ttft_s) if ttft_s else {}),
    **results.byte_fields(runner),
    **(_decode_speed(step_s) if step_s else {}),  # every answer may end with its first token
  )
  return row | _question_fields(runner, examples) | {"answers": _shown(examples, answers)}


def _prefill_speed(tokens: Sequence[int], ttft_s: Sequence[float]) -> results.Row:
  speed = {"prefill_tokens_per_s": sum(tokens) / sum(ttft_s)}
  return speed | results.percentiles("ttft_s", ttft_s)


def _decode_speed(step_s: Sequence[float]) -> results.Row:
  speed = {"decode_tokens_per_s": len(step_s) / sum(step_s)}
  return speed | results.percentiles("tpot_s", step_s)


def _question_fields(runner: Runner, examples: Sequence[Example]) -> results.Row:
  longest = max(example.question_tokens for example in examples)
  window = observation_window(runner.policy)
  return {
    "question_tokens": longest,
    "window_tokens": window,
    "question_in_window": None if window is None else longest <= window,
  }


def _shown(examples: Sequence[Example], answers: Sequence[Answer]) -> list[results.Row]:
  return [
    {"expected": example.references, "given": answer.text.strip(), "score": answer.score}
    for example, answer in zip(examples, answers, strict=True)
  ]
