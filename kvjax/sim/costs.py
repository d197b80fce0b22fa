"""Seconds of a prefill, a decode step and a transfer, from a model's shape and a machine.

Products and reading overlap within each of the two parts of a layer, its weights and its attention,
so a part takes the longer of the two; the parts follow each other.

    prefill   2 * W * B*S / products + 4 * H*D * L * B * (visible pairs) / attention
    step      max(2 * W * B / products, bytes of W / reading)
              + max(4 * H*D * L * B*T / attention, bytes of keys, values and digests / reading)
              + L * layer_s

where W are the numbers of all matrices that a token is multiplied with, the head included; in a
prefill the head is multiplied with the last token only. Norms, position rules and sampling are in
layer_s. With one row, weights are read at the rate of one row; with more at that of a few.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.config import ModelConfig
from kvjax.sim.hardware import Machine


def layer_numbers(config: ModelConfig) -> int:
  """Numbers of the matrices of one layer; a gated feed-forward has three of E * F, OPT's two."""
  heads = 2 * config.num_heads + 2 * config.num_kv_heads
  matrices = 2 if config.family == "opt" else 3
  return config.embed_dim * (heads * config.head_dim + matrices * config.ffn_dim)


def head_numbers(config: ModelConfig) -> int:
  """Numbers of the head, E * V."""
  return config.embed_dim * config.vocab_size


def kv_bytes(config: ModelConfig, tokens: int, item_bytes: int) -> int:
  """Keys and values of so many tokens in all layers."""
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * tokens * item_bytes


def activation_bytes(config: ModelConfig, tokens: int, item_bytes: int) -> int:
  """Normalised input of every layer, of so many tokens: keys and values can be made of it."""
  return config.num_layers * config.embed_dim * tokens * item_bytes


def rebuild_s(config: ModelConfig, machine: Machine, tokens: int) -> float:
  """Seconds to make keys and values of the normalised input of all layers."""
  numbers = config.num_layers * config.embed_dim * 2 * config.num_kv_heads * config.head_dim
  return 2 * numbers * tokens / machine.product_flops_per_s


def digest_bytes(config: ModelConfig, tokens: int, page_size: int, item_bytes: int) -> int:
  """Minimum and maximum of every page of so many tokens in all layers: what ranking reads."""
  return kv_bytes(config, -(-tokens // page_size), item_bytes)


def prefill_s(
  config: ModelConfig, machine: Machine, tokens: int, *, past_tokens: int = 0, batch_size: int = 1
) -> float:
  """Seconds until prompts of so many tokens, after so many that are there already, are read.

  Args:
    config: the model's shape.
    machine: from `hardware`.
    tokens: of each prompt, at least 1.
    past_tokens: of each row, whose keys and values are on the device.
    batch_size: rows, read one beside the other.
  """
  layers, rows = config.num_layers, batch_size
  weights = layers * layer_numbers(config)
  products = 2 * (weights * tokens + head_numbers(config)) * rows / machine.product_flops_per_s
  read = (weights + head_numbers(config)) * machine.item_bytes / machine.read_bytes_per_s
  pairs = tokens * past_tokens + tokens * (tokens + 1) // 2
  attention = 4 * config.num_heads * config.head_dim * layers * rows * pairs
  return max(products, read) + attention / machine.attention_flops_per_s + layers * machine.layer_s


def decode_step_s(
  config: ModelConfig,
  machine: Machine,
  attended_tokens: Sequence[int],
  *,
  ranked_bytes: float = 0,
) -> float:
  """Seconds of a decode step.

  Args:
    config: the model's shape.
    machine: from `hardware`.
    attended_tokens: of each row, tokens that a head reads: its length for dense, the budget for a
      policy that selects; the mean over heads where they differ.
    ranked_bytes: digests that are read to select, of all rows; see `digest_bytes`.
  """
  rows, layers = len(attended_tokens), config.num_layers
  weights = layers * layer_numbers(config) + head_numbers(config)
  few = machine.few_rows_bytes_per_s
  reading = weights * machine.item_bytes / (machine.read_bytes_per_s if rows == 1 else few)
  products = 2 * weights * rows / machine.product_flops_per_s
  tokens = sum(attended_tokens)
  attending = (kv_bytes(config, tokens, machine.item_bytes) + ranked_bytes) / few
  scores = 4 * config.num_heads * config.head_dim * layers * tokens / machine.attention_flops_per_s
  return max(reading, products) + max(attending, scores) + layers * machine.layer_s


def transfer_s(machine: Machine, num_bytes: float, *, disk: bool = False, parts: int = 1) -> float:
  """Seconds to move bytes between host and device, or from disk to the host.

  Args:
    machine: from `hardware`.
    num_bytes: in all.
    disk: from or to the SSD.
    parts: transfers that it takes, each with its own beginning.
  """
  rate = machine.disk_bytes_per_s if disk else machine.link_bytes_per_s
  return (parts * machine.transfer_s + num_bytes / rate) if num_bytes else 0.0
