"""Attention over selected pages, beside the time of reading their bytes once.

    python -m scripts.bench_selected_attention
    python -m scripts.bench_selected_attention --tokens=1024 --batch_sizes=1,4

All layers of SmolLM2's shape in f32, without the rest of the model. As in a decode step the pages
of a layer depend on what the layer before it gave: XLA would otherwise copy the pages of all layers
before it multiplies the first. The floor is the bytes of the selected keys and values over the
bandwidth of `eval.floor`, read in the same rounds. Times are the best of all rounds, for other work
on the machine only ever adds to them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from eval import cli
from eval.floor import bandwidth_reader
from eval.results import device_kind
from eval.tables import table
from kvjax import ModelConfig
from models import PRESETS
from pallas_kernels.page_copies import copies_of_pages
from pallas_kernels.selected_decode_attention import selected_decode_attention

SHAPE = "smollm2-135m"
COLUMNS = (
  "batch_size",
  "selected_tokens",
  "selected_bytes",
  "floor_s",
  "copies_s",
  "attention_s",
  "floor_ratio",
)

Layer = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_list("batch_sizes", ["1", "2", "4", "8"], "Rows, separated by commas.")
  flags.DEFINE_list("tokens", ["1024", "2048"], "Selected tokens a row and KV head, with commas.")
  flags.DEFINE_integer("context_tokens", 8192, "Tokens of a row, which pages are selected from.")
  flags.DEFINE_integer("rounds", 12, "Times that each is measured.", lower_bound=1)
  cli.define_page_size_flag()


def main(args: flags.FlagValues) -> None:
  """Measures every batch size with every number of tokens, prints the table."""
  batch_sizes = cli.positive_ints("batch_sizes", args.batch_sizes)
  tokens = cli.positive_ints("tokens", args.tokens)
  _check_tokens(tokens, args.context_tokens, args.page_size)
  config = PRESETS[SHAPE]
  print(f"{SHAPE}'s shape, {config.num_layers} layers, {args.context_tokens:,} tokens a row")
  print(f"f32 on {device_kind()}, best of {args.rounds} rounds\n", flush=True)
  context_pages = args.context_tokens // args.page_size
  keys, values = _pools(config, max(batch_sizes), context_pages, args.page_size)
  read, rows = bandwidth_reader(), []
  for batch_size, count in tqdm(list(itertools.product(batch_sizes, tokens)), "shapes"):
    pages = _page_ids(config, batch_size, context_pages, count // args.page_size)
    step = _chain_of(_attend, config, batch_size, keys, values, pages)
    copy = _chain_of(_copy, config, batch_size, keys, values, pages)
    attention_s, copies_s, bandwidths = [], [], []
    for _ in range(args.rounds):
      bandwidths.append(read())
      attention_s.append(step())
      copies_s.append(copy())
    rows.append(row(config, batch_size, count, max(bandwidths), min(attention_s), min(copies_s)))
  print(table(rows, COLUMNS))


def row(
  config: ModelConfig,
  batch_size: int,
  tokens: int,
  bandwidth: float,
  attention_s: float,
  copies_s: float,
) -> dict[str, Any]:
  """A row of the table.

  Args:
    config: of the layers that were measured.
    batch_size: B.
    tokens: selected ones of each row and KV head.
    bandwidth: bytes/s.
    attention_s: seconds of the attention of all layers.
    copies_s: seconds of copying the same pages and nothing else.
  """
  selected = batch_size * config.num_layers * 2 * config.num_kv_heads * config.head_dim * tokens
  floor_s = selected * 4 / bandwidth
  return {
    "batch_size": batch_size,
    "selected_tokens": tokens,
    "selected_bytes": selected * 4,
    "floor_s": floor_s,
    "copies_s": copies_s,
    "attention_s": attention_s,
    "floor_ratio": attention_s / floor_s,
  }


def _check_tokens(tokens: Sequence[int], context_tokens: int, page_size: int) -> None:
  for count in (*tokens, context_tokens):
    if count % page_size or not 0 < count <= context_tokens:
      raise ValueError(
        f"--tokens and --context_tokens: {count} is not a multiple of --page_size={page_size} from "
        f"{page_size} to {context_tokens}"
      )


def _pools(config: ModelConfig, batch_size: int, context_pages: int, page_size: int):
  """Keys and values f32[N, C, D] of all layers, rows and heads; a few random pages, repeated."""
  count = config.num_layers * batch_size * config.num_kv_heads * context_pages
  few = jax.random.normal(jax.random.key(0), (2, 64, page_size, config.head_dim))
  repeats = -(-count // few.shape[1])
  return [jnp.tile(pages, (repeats, 1, 1))[:count] for pages in few]


def _page_ids(config: ModelConfig, batch_size: int, context_pages: int, count: int):
  """i32[layers, B, K, M]: each head's own choice among the pages of its row, in random order."""
  rng = np.random.default_rng(0)
  shape = (config.num_layers, batch_size, config.num_kv_heads)
  first = np.arange(np.prod(shape)).reshape(*shape, 1) * context_pages
  chosen = [rng.permutation(context_pages)[:count] for _ in range(first.size)]
  return jnp.asarray(first + np.reshape(chosen, (*shape, count)), jnp.int32)


def _attend(q, keys, values, pages):
  mask = jnp.ones((*pages.shape, keys.shape[1]), bool)
  return selected_decode_attention(q, keys, values, pages, mask)


def _copy(q, keys, values, pages):
  copies = [copies_of_pages(pool, pages) for pool in (keys, values)]
  return q * sum(x[0, 0, 0, 0, 0] for x in jax.lax.optimization_barrier(copies))


def _chain_of(layer: Layer, config, batch_size, keys, values, pages) -> Callable[[], float]:
  """A function that runs one layer after the other and returns the seconds that it took."""
  group = config.num_heads // config.num_kv_heads
  q = jnp.ones((batch_size, config.num_kv_heads, group, config.head_dim))

  @jax.jit
  def chain(q, keys, values, pages):
    for of_layer in pages:
      q = q + 1e-3 * layer(q, keys, values, of_layer + (0 * q.sum()).astype(jnp.int32))
    return q

  arguments = (q, keys, values, list(pages))
  jax.block_until_ready(chain(*arguments))

  def timed() -> float:
    start = time.perf_counter()
    jax.block_until_ready(chain(*arguments))
    return time.perf_counter() - start

  return timed


if __name__ == "__main__":
  cli.run(main, define_flags)
