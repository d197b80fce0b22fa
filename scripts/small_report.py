"""What the small models can recall, and the model cards that say so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from eval import recall
from kvjax import CacheConfig, Runner, generate, make_policy, prepare
from models import Loaded
from scripts.small_training import Phase

LENGTHS, DEPTHS = (512, 1024, 2048, 4000), (0.1, 0.5, 0.9)
POLICIES = (
  ("dense", None),
  *(("quest", budget) for budget in (256, 128, 64)),
  *(("streaming", budget) for budget in (1024, 256)),
)
_POLICY_LENGTH = 2048
_EXAMPLES, _ROWS = 20, 4  # of a cell, and how many of them run together
_SEED = 1_000_003  # far from the seeds that anyone trains with
_LONGEST_ANSWER = 8
_KINDS = {"llama": "A Llama", "opt": "An OPT"}


class Cell(NamedTuple):
  """One number of the tables."""

  task: str
  length: int
  depth: float | None
  policy: str
  budget_tokens: int | None


def cells() -> list[Cell]:
  """Every number that is measured: first by length and depth, then by policy."""
  dense = [
    Cell(task, length, depth, "dense", None)
    for task in recall.TASKS
    for length in LENGTHS
    for depth in DEPTHS
  ]
  by_policy = [
    Cell(task, _POLICY_LENGTH, None, *policy) for task in recall.TASKS for policy in POLICIES
  ]
  return dense + by_policy


def measure(
  loaded: Loaded, book: str, progress: Callable[[Cell], object] = lambda cell: None
) -> dict[Cell, float]:
  """Share of right answers of each cell, by `kvjax.generate`."""
  runners: dict[tuple[Any, ...], Runner] = {}
  scores = {}
  for cell in cells():
    progress(cell)
    key = (cell.length, cell.policy, cell.budget_tokens)
    if key not in runners:
      runners[key] = runner(loaded, cell.length, cell.policy, cell.budget_tokens, _ROWS)
    # The same texts for every policy.
    rng = random.Random(f"{_SEED} {cell.task} {cell.length} {cell.depth}")
    texts = [
      recall.build(cell.task, book, cell.length, rng, depth=cell.depth) for _ in range(_EXAMPLES)
    ]
    scores[cell] = sum(correct(loaded, runners[key], texts)) / len(texts)
  return scores


def runner(
  loaded: Loaded, length: int, policy: str, budget_tokens: int | None, rows: int
) -> Runner:
  """A runner for `rows` texts of `length` characters with their answers."""
  options = {} if budget_tokens is None else {"budget_tokens": budget_tokens}
  chosen = make_policy(policy, **options)
  capacity = length + 1 + _LONGEST_ANSWER
  cache = CacheConfig(rows, capacity, base_tokens=capacity)
  return prepare(loaded.model, chosen, chosen.stores[0], cache)


def correct(loaded: Loaded, prepared: Runner, texts: Sequence[recall.Recall]) -> list[bool]:
  """Whether the first answer of each text is given to the letter; runs them in batches."""
  assert loaded.tokenizer is not None
  rows, given = prepared.prefill_config.batch_size, []
  longest = max(len(text.answer) for text in texts)
  for start in range(0, len(texts), rows):
    prompts = [loaded.tokenizer.encode(text.prompt) for text in texts[start : start + rows]]
    given += generate(prepared, loaded.params, prompts, max_new_tokens=longest).tokens
  answers = [loaded.tokenizer.encode(text.answer)[1:] for text in texts]  # without the start
  return [said[: len(answer)] == answer for said, answer in zip(given, answers, strict=True)]


def card(
  loaded: Loaded,
  phases: Sequence[Phase],
  scores: Mapping[Cell, float],
  manifest: Mapping[str, Any],
  command: str,
  seconds: float,
) -> str:
  """The README.md of a model's folder, in Markdown.

  Args:
    loaded: the model as it was written.
    phases: of its training.
    scores: from `measure`.
    manifest: from `results.make_manifest`.
    command: that trains it.
    seconds: wall time of the training.
  """
  config = loaded.model.config
  count = sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
  versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
  data = "; ".join(f"{name}, sha256 `{digest}`" for name, digest in manifest["data"].items())
  tokens = sum(phase.steps * phase.length * phase.rows for phase in phases)
  return f"""# {loaded.name}

{_KINDS[config.family]} of {count:,} parameters that reads bytes: {config.num_layers} layers,
{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}, width
{config.embed_dim}, context {config.max_tokens:,} bytes, weights in bf16. It is an instrument, no
language model: it recalls facts that stand anywhere in its context when attention is dense, and
cannot when their keys and values are gone, so it shows what a cache policy loses.

    python -m scripts.generate --model=models/small/{loaded.name} --policy=dense --prompt_file=...

## Text

Ids below 256 are bytes of UTF-8, and 256 (`<s>`) starts every text; `tokenizer.json` does both.
The tasks are those of `eval/recall.py`, here with their answers:

```
{_examples()}
```

A prompt ends where its answer begins, and an answer at the end of its line. In a chain every key
but the first is only known from the answer so far.

## Accuracy

Share of answers that are right to the letter, {_EXAMPLES} texts a cell, greedy, by
`kvjax.generate` with the weights of this folder, computed in f32. There is a fact for every 128
bytes. Depth is where the needed fact stands (of a chain, its last link), 0 the beginning.

{_by_length(scores)}

A wrong passkey is mostly continued from that of another key, which begins with the same two digits.

With {_POLICY_LENGTH:,} bytes and facts anywhere, by policy and budget in tokens. Quest leaves the
first two layers dense. StreamingLLM forgets all but the first bytes and the newest, so it knows
only facts of its window, and counts positions inside its cache.

{_by_policy(scores)}

## Training

    {command}

Seeded, on texts of these tasks in pieces of a book; `scripts/small_training.py` has the recipe and
`scripts/small_models.py` the weights that it starts from.

{_table(("steps", "bytes of a text", "texts a step"), phases)}

{tokens:,} bytes in {seconds / 60:.0f} minutes, on {manifest["cpu"]}, {manifest["cores"]} cores,
which had other work too ({versions}; {manifest["utc"]}). Book: {data} (public domain).

Weights: sha256 `{loaded.content_hash}`. License: that of kvjax, Apache-2.0.
"""


def _examples() -> str:
  book = "And the earth was without form, and void; and darkness was upon the face of the deep."
  texts = [
    recall.build(task, f"{book} " * 2, 160, random.Random(0), facts=3) for task in recall.TASKS
  ]
  return "\n\n".join(text.text for text in texts)


def _by_length(scores: Mapping[Cell, float]) -> str:
  rows = [
    [task, f"{length:,}", *(_percent(scores[Cell(task, length, d, "dense", None)]) for d in DEPTHS)]
    for task in recall.TASKS
    for length in LENGTHS
  ]
  return _table(("task", "bytes", *(f"depth {depth}" for depth in DEPTHS)), rows)


def _by_policy(scores: Mapping[Cell, float]) -> str:
  rows = []
  for policy, budget in POLICIES:
    found = [scores[Cell(task, _POLICY_LENGTH, None, policy, budget)] for task in recall.TASKS]
    rows.append([policy, budget or "all", *map(_percent, found)])
  return _table(("policy", "budget", *recall.TASKS), rows)


def _percent(share: float) -> str:
  return f"{share:.0%}"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
