"""What a history costs as keys and values and as activations (Bidaw, FAST 2026, Fig. 14).

For D the width of a model whose heads fill it and whose feed-forward is 4 D wide, as OPT's are, the
products of L layers take 24 D^2 L operations a token, of which 4 D^2 L make keys and values. The
paper ranks what could be kept between turns by the compute that a kept byte saves; in 16 bits

    keys and values    24 D^2 L / (4 D L bytes) = 6 D       30.7 GFLOP/MB for OPT-13B (paper: 30.5)
    activations        20 D^2 L / (2 D L bytes) = 10 D      51.2 GFLOP/MB             (paper: 51.0)

with 1 MB = 10^6 bytes. Attention scores, norms and the head are left out, as the paper's numbers
leave them out: with them they would grow with the length.
"""

from __future__ import annotations

from typing import NamedTuple

from kvjax.config import ModelConfig


class TensorCost(NamedTuple):
  """One token in all layers, kept in one of the two forms.

  Attributes:
    num_bytes: kept.
    rebuild_flops: to have keys and values again; 0 where they are what is kept.
    saved_flops: of a full pass, because it is kept.
  """

  num_bytes: int
  rebuild_flops: int
  saved_flops: int

  @property
  def gflop_per_mb(self) -> float:
    """Compute saved by a kept byte, the paper's cost efficiency."""
    return self.saved_flops / self.num_bytes / 1000


def why_no_activations(config: ModelConfig) -> str | None:
  """Why keeping activations does not pay for a model of this shape; None where it does.

  They are E numbers a token and layer, keys and values 2*K*D: with grouped-query attention of two
  query heads a KV head both are the same, with more keys and values are fewer.
  """
  own, pair = config.embed_dim, 2 * config.num_kv_heads * config.head_dim
  if own < pair:
    return None
  return (
    f"activations are {own} numbers a token and layer, keys and values {pair}, so keeping "
    "activations does not pay; keep keys and values of models with fewer KV heads than query heads"
  )


def pass_flops(config: ModelConfig) -> int:
  """Operations of all products of one token in all layers, two for each number of a matrix."""
  heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
  feed_forward = (2 if config.family == "opt" else 3) * config.ffn_dim
  return 2 * config.num_layers * config.embed_dim * (heads + feed_forward)


def keys_values_cost(config: ModelConfig, item_bytes: int = 2) -> TensorCost:
  """Keys and values of numbers of so many bytes."""
  numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
  return TensorCost(numbers * item_bytes, 0, pass_flops(config))


def activations_cost(config: ModelConfig, item_bytes: int = 2) -> TensorCost:
  """The input of every layer's projections instead, if `why_no_activations` has nothing to say."""
  numbers = config.num_layers * config.embed_dim
  rebuild = 4 * numbers * config.num_kv_heads * config.head_dim
  return TensorCost(numbers * item_bytes, rebuild, pass_flops(config) - rebuild)
