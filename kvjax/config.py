"""Frozen configurations. Changing any field of them recompiles what was built from it, but for
`content_hash`, which says of a model which weights it has and changes nothing that is computed."""

from __future__ import annotations

import dataclasses

PAGE_SIZES = (8, 16, 32, 64)
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are changed to reach beyond the context of the first training.

  Which fields count depends on the kind; `models.rope` has the formulas and their sources.

  Attributes:
    kind: one of `ROPE_KINDS`.
    factor: how many times longer the context becomes.
    original_tokens: context of the first training.
    low_freq_factor: llama3: longer waves than original_tokens / this are divided by factor.
    high_freq_factor: llama3: shorter waves than original_tokens / this are left alone.
    beta_fast: yarn: dimensions that turn more often than this in original_tokens are left alone.
    beta_slow: yarn: those that turn less often are divided by factor.
    attention_factor: yarn: length of cosine and sine; None for 0.1 ln(factor) + 1.
  """

  kind: str = "default"
  factor: float = 1.0
  original_tokens: int = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None

  def __post_init__(self):
    if self.kind not in ROPE_KINDS:
      raise ValueError(f"unknown rope type {self.kind!r}, expected one of {', '.join(ROPE_KINDS)}")
    if self.factor < 1:
      raise ValueError(f"rope scaling factor {self.factor} must be at least 1")
    if self.kind in ("dynamic", "llama3", "yarn") and self.original_tokens < 1:
      raise ValueError(f"rope type {self.kind!r} needs the context of the first training in tokens")


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
    rope_scaling: change of the rotary frequencies.
    window_tokens: tokens that a query sees, itself included (sliding window); None for all.
    norm_last: OPT-350m: norms come after the residual sum, and there is no final one.
    token_dim: OPT-350m: width of the embedding, projected to E and back; None for E.
    content_hash: sha256 of the weights, as `models.Loaded` has it, for policies that need a profile
      of them; "" where they are unknown, as those that the caller made. Models of the same shape
      are equal whatever their weights, and checkpoints do not hold it.
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
  rope_scaling: RopeScaling = RopeScaling()
  window_tokens: int | None = None
  norm_last: bool = False
  token_dim: int | None = None
  content_hash: str = dataclasses.field(default="", compare=False)

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one")
    if self.window_tokens is not None and self.window_tokens < 1:
      raise ValueError(
        f"window_tokens {self.window_tokens} must be positive, or None for no window"
      )

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
    window_tokens: newest tokens that the model sees, None for all; set by the engine.
    ring_tokens: slots of a row where a new token takes the slot of one that has left the window,
      None where every token keeps its own; set by the engine.
  """

  batch_size: int
  capacity_tokens: int
  page_size: int = 16
  dtype: str = "float32"
  base_tokens: int = 1024
  window_tokens: int | None = None
  ring_tokens: int | None = None

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

  @property
  def slots_per_row(self) -> int:
    """Slots that exist: those of the ring, or one for every token of the capacity."""
    return self.ring_tokens or self.capacity_tokens

  def first_seen(self, lengths):
    """i32[B]: first position that the newest of lengths i32[B] tokens sees."""
    return lengths * 0 if self.window_tokens is None else (lengths - self.window_tokens).clip(0)

  def slot(self, position):
    """Slot i32[...] of the token at this position, i32[...]."""
    return position if self.ring_tokens is None else position % self.ring_tokens
