"""Which pages each KV head chooses, and attends to, while a text is decoded token by token.

A passage is read and decoded densely, with the tokens that follow in it whatever the model says, so
that one reading serves any number of budgets. Policies look on: at each step every one of them
ranks the pages of every head as it would if it decided.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from eval.results import write_atomically
from kvjax import CacheConfig, ModelConfig, Runner, decode_step, make_policy, prepare
from kvjax.engine.generate import prefill
from kvjax.policies._digests import DIGESTS
from kvjax.policies._kept import Kept
from kvjax.policies._lists import promised
from kvjax.policies._pages import pages_there, scores_of
from kvjax.types import DENSE, Inputs, LayerPlan, Policy, State
from models import Loaded
from scripts.page_texts import Passage


class Trace(NamedTuple):
  """What was seen of S steps of a text.

  Attributes:
    about: what was read: name and sha256 of the text, sample and sha256 of the passage's tokens
      (i32, little endian), prompt_tokens, steps, page_size, hash of the model.
    chosen: by K, bool[S, L, K, P]: the K pages that each KV head chooses.
    mass: f16[S, L, K, P]: share of attention on each page, the mean over the G query heads.
    promised: f16[S, L, K, P]: the share that page scores promise, which `flexicache_adaptive` goes
      by; None in traces of an earlier version.
  """

  about: dict[str, Any]
  chosen: dict[int, np.ndarray]
  mass: np.ndarray
  promised: np.ndarray | None = None

  @property
  def name(self) -> str:
    """Of the text."""
    return self.about["name"]

  @property
  def pages(self) -> np.ndarray:
    """i[S], pages that there are at each step."""
    lengths = self.about["prompt_tokens"] + 1 + np.arange(len(self.mass))
    return -(-lengths // self.about["page_size"])


class _Seen(NamedTuple):
  """States of the policies; what each of them chose in each layer, bool[B, K, P]; attention of each
  layer f32[B, K, P], and what page scores promise of it."""

  states: tuple[State, ...]
  chosen: tuple[tuple[jax.Array, ...], ...]
  mass: tuple[jax.Array, ...]
  promised: tuple[jax.Array, ...]


def watcher(loaded: Loaded, budgets: Sequence[int], page_size: int, tokens: int) -> Runner:
  """A runner that traces texts of up to so many tokens under these budgets of pages."""
  policies = [
    make_policy("flexicache", budget_tokens=pages * page_size, page_size=page_size, period=1)
    for pages in budgets
  ]
  capacity = -(-tokens // page_size) * page_size
  config = CacheConfig(1, capacity, page_size, base_tokens=capacity)
  return prepare(loaded.model, _looking_on(policies), "resident", config)


def about(loaded: Loaded, passage: Passage, steps: int, page_size: int) -> dict[str, Any]:
  """`Trace.about`."""
  return {
    "name": passage.name,
    "sha256": passage.sha256,
    "sample": passage.sample,
    "passage_sha256": hashlib.sha256(np.array(passage.tokens, "<i4").tobytes()).hexdigest(),
    "prompt_tokens": len(passage.tokens) - steps,
    "steps": steps,
    "page_size": page_size,
    "content_hash": loaded.content_hash,
  }


def trace(
  runner: Runner,
  loaded: Loaded,
  budgets: Sequence[int],
  passage: Passage,
  steps: int,
  progress: Callable[[int], object] = lambda tokens: None,
) -> Trace:
  """Reads a passage, its last tokens one by one.

  Args:
    runner: a `watcher` with these budgets.
    loaded: its model.
    budgets: pages.
    passage: the text.
    steps: tokens that are decoded.
    progress: called with the number of tokens that have been read since it was called.
  """
  count = len(passage.tokens) - steps
  prompt, following = passage.tokens[:count], passage.tokens[count:]
  read = 0

  def report(phase: str, done: int, total: int) -> None:
    del phase, total
    nonlocal read
    progress(done - read)
    read = done

  _, cache = prefill(runner, loaded.params, [prompt], report)
  seen = []
  for token in following:
    _, cache = decode_step(runner, loaded.params, cache, jnp.array([token], jnp.int32))
    state = cache.policy_state
    seen.append(jax.device_get((state.chosen, state.mass, state.promised)))
    progress(1)
  chosen = {
    pages: np.stack([np.concatenate(step[0][place]) for step in seen])
    for place, pages in enumerate(budgets)
  }
  mass, expected = (
    np.stack([np.concatenate(step[part]) for step in seen]).astype(np.float16) for part in (1, 2)
  )
  said = about(loaded, passage, steps, runner.decode_config.page_size)
  return Trace(said, chosen, mass, expected)


def traces_of(
  loaded: Loaded,
  read: Sequence[Passage],
  budgets: Sequence[int],
  steps: int,
  page_size: int,
  folder: Path,
) -> list[Trace]:
  """Traces of passages; those that the folder has are not made again.

  Raises:
    ValueError: the folder has one that was made of something else.
  """
  longest = max(len(one.tokens) for one in read)
  runner = watcher(loaded, budgets, page_size, longest)
  traces = []
  with tqdm(total=sum(len(one.tokens) for one in read), unit="tok", leave=False) as bar:
    for passage in read:
      path = folder / f"{passage.name}-{len(passage.tokens) - steps}-{passage.sample}.npz"
      if path.exists():
        traces.append(_kept(path, about(loaded, passage, steps, page_size), budgets))
        bar.update(len(passage.tokens))
      else:
        bar.set_description(f"{passage.name}")
        seen = trace(runner, loaded, budgets, passage, steps, bar.update)
        save(path, seen)
        traces.append(seen)
  return traces


def _kept(path: Path, about: dict[str, Any], budgets: Sequence[int]) -> Trace:
  kept = load(path)
  if kept.about != about or not {*budgets} <= {*kept.chosen}:
    raise ValueError(f"{path} is a trace of something else; delete it or choose another --out_dir")
  return kept


def save(path: Path, one: Trace) -> None:
  """Writes a trace, whole or not at all."""
  bits: dict[str, Any] = {
    f"chosen_{pages}": np.packbits(sets, axis=-1) for pages, sets in one.chosen.items()
  }
  if one.promised is not None:
    bits["promised"] = one.promised
  file = io.BytesIO()
  np.savez_compressed(file, about=np.array(json.dumps(one.about)), mass=one.mass, **bits)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, file.getvalue())


def load(path: Path) -> Trace:
  """Reads what `save` wrote.

  Raises:
    ValueError: the file is no trace.
  """
  try:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
      said, mass = json.loads(str(content["about"])), content["mass"]
      expected = content["promised"] if "promised" in content.files else None
      count = mass.shape[-1]
      chosen = {
        int(name.partition("_")[2]): np.unpackbits(content[name], axis=-1, count=count).astype(bool)
        for name in content.files
        if name.startswith("chosen_")
      }
  except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
    raise ValueError(f"{path} is no trace of pages; delete it and run again") from error
  return Trace(said, chosen, mass, expected)


def _looking_on(policies: Sequence[Policy]) -> Policy:
  """A dense policy in whose every layer these policies are asked what they would select."""

  def register(model: ModelConfig, cache: CacheConfig) -> tuple[LayerPlan, State]:
    layers, none = range(model.num_layers), (cache.batch_size, model.num_kv_heads)
    sets = tuple(jnp.zeros((*none, cache.pages_per_row), bool) for _ in layers)
    mass = tuple(jnp.zeros((*none, cache.pages_per_row), jnp.float32) for _ in layers)
    states = tuple(policy.register(model, cache)[1] for policy in policies)
    plan = LayerPlan((DENSE,) * model.num_layers, watched=tuple(layers))
    return plan, _Seen(states, (sets,) * len(policies), mass, mass)

  def watch(state: _Seen, inputs: Inputs) -> _Seen:
    layer, inputs = inputs.layer, inputs._replace(row=inputs.layer)
    states = [
      policy.preprocess(one, inputs) for policy, one in zip(policies, state.states, strict=True)
    ]
    if inputs.q.shape[1] > 1:  # a chunk of the prompt
      return state._replace(states=tuple(states))
    chosen = []
    for place, policy in enumerate(policies):
      selection, states[place] = policy.select(states[place], inputs)
      pages = _as_set(selection.pages, selection.mask, state.mass[layer].shape)
      chosen.append(_replaced(state.chosen[place], layer, pages))
    shape, kept = state.mass[layer].shape, states[0].digests[layer]
    mass = _attention(inputs).reshape(*shape, -1).sum(axis=-1)
    expected = _promised(kept, inputs, shape[-1])
    return _Seen(
      tuple(states),
      tuple(chosen),
      _replaced(state.mass, layer, mass),
      _replaced(state.promised, layer, expected),
    )

  def select(state: State, inputs: Inputs):
    raise AssertionError(f"layer {inputs.layer} of a dense policy was asked to select")

  return Policy("page_traces", None, ("resident",), register, watch, select)


def _as_set(pages: jax.Array, mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """bool[B, K, P] of pages i32[B, K, M] as far as mask bool[B, K, M, 1] counts them."""
  b, k, p = shape
  rows, heads = jnp.arange(b)[:, None, None], jnp.arange(k)[None, :, None]
  places = jnp.where(mask[..., 0], pages, p)
  return jnp.zeros(shape, bool).at[rows, heads, places].set(True, mode="drop")


def _attention(inputs: Inputs) -> jax.Array:
  """f32[B, K, T]: attention of the newest token, the mean over the G query heads."""
  b, k, _ = inputs.slot_positions.shape
  d = inputs.q.shape[-1]
  q = inputs.q.reshape(b, k, -1, d).astype(jnp.float32) * d**-0.5
  scores = jnp.einsum("bkgd,bktd->bkgt", q, inputs.keys().astype(jnp.float32))
  seen = inputs.slot_positions >= jnp.maximum(inputs.first, 0)[:, None, None]
  return jax.nn.softmax(jnp.where(seen[:, :, None], scores, -jnp.inf), axis=-1).mean(axis=2)


def _promised(kept: Kept, inputs: Inputs, total: int) -> jax.Array:
  """f32[B, K, P]: the same of pages, as Quest's bounds promise it."""
  page_size = inputs.slot_positions.shape[-1] // total
  scores = scores_of(DIGESTS["minmax"], kept, inputs, page_size)
  return promised(scores, pages_there(inputs, total, page_size), inputs.q.shape[-1])


def _replaced(layers: tuple, layer: int, value) -> tuple:
  return (*layers[:layer], value, *layers[layer + 1 :])
