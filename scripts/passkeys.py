"""Trains DuoAttention's gates on passkeys that are hidden in a book, and asked for at its end."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from eval import recall
from kvjax.profiling.duo_gates import RECENT, SINKS, train_gates
from models import Loaded

PASSKEYS = 8  # of a text, all of them asked for; 10 in the original, whose texts are longer
LEARNING_RATE = 0.05  # the original's is 0.02, for ten and more times as many steps

Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]


def train(
  loaded: Loaded, text: str, *, tokens: int, steps: int, seed: int
) -> tuple[np.ndarray, list[float]]:
  """The gates f32[L, K], and the loss of each step, under a bar.

  Args:
    loaded: the model.
    text: the book.
    tokens: S, of the text of each step.
    steps: updates.
    seed: of the texts.

  Raises:
    ValueError: tokens that a streaming head would see all of, and what `batches` raises.
  """
  if tokens <= SINKS + RECENT:
    raise ValueError(
      f"streaming heads see {SINKS + RECENT} tokens, which is all of a text of {tokens}; raise "
      "--prompt_tokens"
    )
  losses: list[float] = []
  with tqdm(total=steps, unit="step", leave=False) as bar:

    def progress(step: int, loss: float) -> None:
      del step
      losses.append(loss)
      bar.update()
      bar.set_postfix(loss=f"{loss:.4f}")

    made = batches(loaded, text, tokens, seed)
    gates = train_gates(
      loaded.model,
      loaded.params,
      made,
      steps=steps,
      learning_rate=LEARNING_RATE,
      progress=progress,
    )
  return gates, losses


def batches(loaded: Loaded, text: str, tokens: int, seed: int) -> Batches:
  """One text for each step of the training; the same for the same seed and step.

  Args:
    loaded: the model, for its tokenizer.
    text: the book.
    tokens: S, of each text; what is left behind the last answer is filled with zeros.
    seed: of the passkeys, and of the piece of the book around them.

  Returns:
    `batch(step) -> tokens i32[1, S], answers bool[1, S]`, where answers has the positions from
    which the digits of a passkey are predicted.

  Raises:
    ValueError: the model has no tokenizer, or (by the batch) no text with so many passkeys is so
      short.
  """
  tokenizer = loaded.tokenizer
  if tokenizer is None:
    raise ValueError(f"{loaded.name} has no tokenizer to read a text with; use another --model")
  book = recall.plain(text)

  def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    length = min(6 * tokens, len(book))  # characters; more than fit, as a rule
    while True:
      rng = random.Random(f"{seed} {step}")
      made = recall.build("passkey", book, length, rng, facts=PASSKEYS, questions=PASSKEYS)
      ids = tokenizer.encode(made.text)
      if len(ids) <= tokens:
        break
      length = min(length - 1, length * tokens // len(ids))
    padded, answers = np.zeros((1, tokens), np.int32), np.zeros((1, tokens), bool)
    padded[0, : len(ids)] = ids
    for span in made.answers:
      start, stop = (len(tokenizer.encode(made.text[:end])) for end in span)
      answers[0, start - 1 : stop - 1] = True
    return padded, answers

  return batch
