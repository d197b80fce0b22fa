"""Which pages a policy selects from step to step, and how much of that stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax import KVCache, Runner, decode_step, generate, selected_pages
from kvjax.types import Params


class Selections(NamedTuple):
  """What was selected while one prompt was continued greedily; R layers select.

  Attributes:
    tokens: the S new tokens that the model read, the first of them the prompt's successor.
    layers: which layers select, R of them.
    pages: bool[S, R, K, P], pages of the row that a KV head attended to; [S, R, H, P] where each
      query head has its own.
    num_pages: i32[S], pages that held a token, the new one included.
    cache: the cache after the last step.
  """

  tokens: list[int]
  layers: tuple[int, ...]
  pages: np.ndarray
  num_pages: np.ndarray
  cache: KVCache


def follow(runner: Runner, params: Params, prompt: Sequence[int], steps: int) -> Selections:
  """Continues a prompt and looks at every step before it is made, which takes twice the time.

  Args:
    runner: of batch size 1, with a policy that selects pages and a store that drops nothing.
    params: weights of its model.
    prompt: token ids; with the steps they must fit in the runner's capacity.
    steps: S, at least 1.

  Raises:
    ValueError: the policy selects nothing or its store drops, or the prompt does not fit.
  """
  if not runner.plan.select_layers or runner.store.drops:
    raise ValueError(
      f"policy {runner.policy.name!r} on store {runner.store.name!r} selects no pages of a whole "
      "cache; take one that does, such as quest"
    )
  if len(prompt) + steps > runner.decode_config.capacity_tokens:
    raise ValueError(
      f"a prompt of {len(prompt)} tokens and {steps} steps exceed the capacity of "
      f"{runner.decode_config.capacity_tokens} tokens; make a larger CacheConfig"
    )
  begun = generate(runner, params, [prompt], max_new_tokens=1)
  cache, tokens = begun.cache, list(begun.tokens[0])
  page_size, total = runner.decode_config.page_size, runner.decode_config.pages_per_row
  seen = []
  for _ in range(steps):
    newest = np.array(tokens[-1:], np.int32)
    chosen = selected_pages(runner, params, cache, newest)
    seen.append([_marked(np.asarray(pages[0]), total) for pages in chosen.values()])
    logits, cache = decode_step(runner, params, cache, newest)
    tokens.append(int(logits[0].argmax()))
  lengths = len(prompt) + 1 + np.arange(steps)
  return Selections(
    tokens[:steps], runner.plan.select_layers, np.array(seen), -(-lengths // page_size), cache
  )


def corrected_overlap(first: np.ndarray, later: np.ndarray, num_pages: np.ndarray) -> np.ndarray:
  """How much of a selection is left: 1 for all of it, 0 for no more than chance.

  FlexiCache's random-corrected overlap (MLSys 2026): with o the share of the later
  pages that were among the first and r the share that random pages would have there, the larger of
  0 and (o - r) / (1 - r). As in the authors' code, of K pages among N, r is K / N.

  Args:
    first: bool[..., P], pages of the step that is compared with.
    later: bool[..., P], pages of a step; broadcast against first.
    num_pages: i32[...], N of the later step.

  Returns:
    f64[...]; NaN where the later step selected every page, or none.
  """
  chosen = later.sum(axis=-1)
  with np.errstate(invalid="ignore", divide="ignore"):
    share, chance = (first & later).sum(axis=-1) / chosen, chosen / num_pages
    return np.maximum((share - chance) / np.where(chance < 1, 1 - chance, np.nan), 0)


def _marked(pages: np.ndarray, total: int) -> np.ndarray:
  """i32[K, M] with -1 for none -> bool[K, P]."""
  heads, places = np.nonzero(pages >= 0)
  marked = np.zeros((len(pages), total), bool)
  marked[heads, pages[heads, places]] = True
  return marked
