"""Named shapes of real models, shared by the tests, the tuner and the benchmark of every kernel.

Between them they cover head sizes 64 to 256, groups of 1 to 16 queries, all page sizes and dtypes.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
  """One decode step of one layer, in the letters of `kvjax.types`.

  Attributes:
    name: the model, and what differs from its usual setting.
    source: where the numbers come from.
    batch: B.
    kv_heads: K.
    groups: G, query heads of a KV head.
    head_dim: D.
    page_size: C, tokens.
    pages_selected: M, pages that a sparse method reads of each row and KV head.
    context_tokens: tokens of each row.
    dtype: numpy name of the dtype of queries, keys and values.
    embed_dim: E, width of the activations from which keys and values are projected.
  """

  name: str
  source: str
  batch: int
  kv_heads: int
  groups: int
  head_dim: int
  page_size: int
  pages_selected: int
  context_tokens: int
  dtype: str
  embed_dim: int

  @property
  def pages_per_row(self) -> int:
    """P: pages that hold the whole context of a row."""
    return -(-self.context_tokens // self.page_size)

  @property
  def num_pages(self) -> int:
    """N: pages of a pool that holds every row and KV head of one layer."""
    return self.batch * self.kv_heads * self.pages_per_row


_HUB = "config.json of {} on the Hugging Face hub"
_QUEST = "; 1,024 tokens selected as in Quest (Tang et al., ICML 2024)"

SHAPES = (
  Shape(
    "llama-3.1-8b",
    _HUB.format("meta-llama/Llama-3.1-8B") + _QUEST,
    *(8, 8, 4, 128, 16, 64, 32_768, "bfloat16", 4096),
  ),
  Shape(
    "llama-3.1-8b-pages-64",
    _HUB.format("meta-llama/Llama-3.1-8B") + "; pages of 64 tokens",
    *(8, 8, 4, 128, 64, 16, 32_768, "bfloat16", 4096),
  ),
  Shape(
    "mistral-7b-v0.2",
    _HUB.format("mistralai/Mistral-7B-Instruct-v0.2") + "; pages of 32 tokens",
    *(8, 8, 4, 128, 32, 32, 32_768, "bfloat16", 4096),
  ),
  Shape(
    "qwen2.5-7b",
    _HUB.format("Qwen/Qwen2.5-7B") + _QUEST,
    *(8, 4, 7, 128, 16, 64, 32_768, "bfloat16", 3584),
  ),
  Shape(
    "yi-9b-200k",
    _HUB.format("01-ai/Yi-9B-200K") + "; a long context",
    *(2, 4, 8, 128, 16, 128, 131_072, "bfloat16", 4096),
  ),
  Shape(
    "opt-2.7b",
    _HUB.format("facebook/opt-2.7b"),
    *(16, 32, 1, 80, 16, 16, 2048, "float16", 2560),
  ),
  Shape(
    "opt-350m-f32",
    _HUB.format("facebook/opt-350m") + "; f32",
    *(8, 16, 1, 64, 16, 16, 2048, "float32", 1024),
  ),
  Shape(
    "smollm2-135m",
    _HUB.format("HuggingFaceTB/SmolLM2-135M") + "; pages of 8 tokens",
    *(8, 3, 3, 64, 8, 64, 8192, "bfloat16", 576),
  ),
  Shape(
    "phi-3-mini",
    _HUB.format("microsoft/Phi-3-mini-4k-instruct"),
    *(8, 32, 1, 96, 16, 32, 4096, "bfloat16", 3072),
  ),
  Shape(
    "gemma-2-9b",
    _HUB.format("google/gemma-2-9b") + "; attention logits not capped",
    *(8, 8, 2, 256, 16, 64, 8192, "bfloat16", 3584),
  ),
  Shape(
    "glm-4-9b",
    _HUB.format("THUDM/glm-4-9b") + _QUEST,
    *(4, 2, 16, 128, 16, 64, 32_768, "bfloat16", 4096),
  ),
)


def named(name: str) -> Shape:
  """The shape of this name.

  Raises:
    ValueError: there is none.
  """
  for shape in SHAPES:
    if shape.name == name:
      return shape
  raise ValueError(f"unknown shape {name!r}, expected one of {', '.join(s.name for s in SHAPES)}")


def small(shape: Shape) -> Shape:
  """The same D, C, G and dtype with few rows, heads and pages, for kernels that are interpreted.

  The pages selected hold 160 tokens or a little more: two tiles of 64 and part of a third.
  """
  return shape._replace(
    name=f"{shape.name}-small",
    batch=2,
    kv_heads=2,
    pages_selected=-(-160 // shape.page_size),
    context_tokens=256,
    embed_dim=128,
  )
