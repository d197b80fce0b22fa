"""A tiny model that answers at random, and questions to ask of it."""

from __future__ import annotations

import dataclasses
import random

from eval import tasks
from tests.models import tiny
from tests.models.test_tokenizer import INFO, TOKENS

NEW_TOKENS = (9, 4)  # of the two tasks


def write_model(folder):
  config = dataclasses.replace(tiny.tied(), vocab_size=len(TOKENS))
  return tiny.write_gguf(folder / "tiny.gguf", config, tiny.tensors(config), extra=INFO)


def examples(stop_ids=()):
  """Two tasks of five and two examples, ragged, not in the order of their lengths."""
  rng = random.Random(0)
  lengths = {"lookup": (40, 7, 90, 33, 64), "chain": (21, 50)}
  return [
    tasks.Example(
      task,
      f"{task[0]}{place}",
      [rng.randrange(4, len(TOKENS)) for _ in range(length)],
      ("a", "z"),
      new_tokens - place % 2,
      5,
      stop_ids=stop_ids,
    )
    for (task, sizes), new_tokens in zip(lengths.items(), NEW_TOKENS, strict=True)
    for place, length in enumerate(sizes)
  ]
