"""Frozen configurations. Changing any field of them recompiles what was built from it."""

from __future__ import annotations

import dataclasses

PAGE_SIZES = (8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The static shape of a decoder-only transformer.

  Attributes:
    family: the module of `models/` that defines the forward pass, e.g. "llama".
    num_layers: L.
    num_heads: H, query heads.
    num_kv_heads: K; H must be a multiple of K.
    head_dim: D, even.
    embed_dim: E.
    ffn_dim: F.
    vocab_size: V.
    max_tokens: longest context the model was trained for, in tokens.
    rope_theta: base of the rotary embedding.
    norm_eps: epsilon of the layer norms.
    tied_embeddings: the head is the transposed embedding.
  """

  family: str
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  embed_dim: int
  ffn_dim: int
  vocab_size: int
  max_tokens: int
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-5
  tied_embeddings: bool = False

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one")

  @property
  def group_size(self) -> int:
    """G: query heads that share one KV head."""
    return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class CacheConfig:
  """The static shape of a cache.

  Attributes:
    batch_size: B.
    capacity_tokens: most tokens that one row can hold; the last page is whole.
    page_size: C, tokens of a page; one of `PAGE_SIZES`.
    dtype: numpy name of the dtype of keys and values.
    base_tokens: tokens that rows are expected to reach. A step that reads everything reads this
      many in one piece, the fastest way, and what lies beyond only as far as rows have grown into
      it. Prompt and new tokens where both are known.
  """

  batch_size: int
  capacity_tokens: int
  page_size: int = 16
  dtype: str = "float32"
  base_tokens: int = 1024

  def __post_init__(self):
    if self.page_size not in PAGE_SIZES:
      raise ValueError(f"page_size {self.page_size} is not one of {PAGE_SIZES}")
    for name in ("batch_size", "capacity_tokens", "base_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} {getattr(self, name)} must be positive")

  @property
  def pages_per_row(self) -> int:
    """P: width of the page table."""
    return -(-self.capacity_tokens // self.page_size)
