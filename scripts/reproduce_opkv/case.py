"""What an item of the paper is run on."""

from __future__ import annotations

from typing import NamedTuple

from eval.replay import Recording
from eval.results import Row, runner_row
from kvjax import CacheConfig, Runner, make_policy
from kvjax.types import Policy
from models import Loaded

BUDGET_PERCENT = 25  # the paper's default


class Case(NamedTuple):
  """A model with a text that it has read in part.

  Attributes:
    loaded: the model.
    recording: the prompt, prefilled once for all policies and stores.
    following: tokens of the text after the prompt, which decode steps are given whatever the model
      says (teacher forcing).
    policies: specs of policies that select.
    stores: specs of stores with a host tier, where an item compares stores.
    budget_percent: tokens that a list may select, in percent of the prompt.
    page_size: C of pages and OP blocks.
    batch_sizes: of items that are timed.
  """

  loaded: Loaded
  recording: Recording
  following: tuple[int, ...]
  policies: tuple[str, ...]
  stores: tuple[str, ...]
  budget_percent: int
  page_size: int
  batch_sizes: tuple[int, ...]

  @property
  def prompt_tokens(self) -> int:
    """Tokens of the prompt."""
    return len(self.recording.prompts[0])


def cache_config(case: Case, batch_size: int = 1) -> CacheConfig:
  """The cache of a run, which holds the prompt and all that follows."""
  tokens = case.prompt_tokens + len(case.following)
  return CacheConfig(batch_size, tokens, case.page_size, base_tokens=tokens)


def policy_of(case: Case, spec: str, percent: int | None = None) -> Policy:
  """The policy with the budget of the case, or another one, in whole pages and at least one."""
  tokens = case.prompt_tokens * (percent or case.budget_percent) // 100
  pages = max(1, tokens // case.page_size)
  return make_policy(spec, budget_tokens=pages * case.page_size, page_size=case.page_size)


def row_of(case: Case, runner: Runner, item: str) -> Row:
  """The fields of a row that say what was run."""
  return runner_row(
    runner,
    model=case.loaded.name,
    task=f"opkv_{item}",
    prompt_tokens=case.prompt_tokens,
    output_tokens=len(case.following),
  )
