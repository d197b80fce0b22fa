"""Figure 9: device memory of keys and values that is saved, by context length.

Bytes are those of the cache that would be allocated, counted without allocating it. The closed form
says what they should be: an unstable head has all N pages, a stable one those of its budget and the
one that is being filled, so that with a share f of unstable heads 1 - f - (1 - f) (K + 1) / N is
saved. The page bounds (MinMax) stay on the device, two vectors for a page of C tokens: 1 / C of all
keys and values, which the paper's number seems to leave out. Both are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row, byte_fields
from kvjax import CacheConfig, make_policy, prepare
from models import families
from scripts.reproduce_flexicache.case import Case, row_of
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

COLUMNS = (
  *("budget_tokens", "prompt_tokens", "dense_kv_bytes", "device_kv_bytes", "metadata_bytes"),
  *("host_kv_bytes", "saved_ratio", "closed_form_ratio", "saved_with_metadata_ratio"),
)
PAPER_TOKENS, PAPER_SAVING = 20_000, 0.70


def run(case: Case) -> list[Row]:
  """A row for each budget and context that is longer than it."""
  heads = evenly(case.fraction, case.num_heads, case.config.num_kv_heads)
  return [
    _row(case, pages, tokens, heads)
    for pages in case.budgets
    for tokens in case.contexts
    if tokens > (pages + 1) * case.page_size
  ]


def _row(case: Case, pages: int, tokens: int, heads: list[tuple[int, int]]) -> Row:
  model = families.build(case.config)
  config = CacheConfig(1, tokens, case.page_size, "bfloat16", base_tokens=tokens)
  options = {"budget_tokens": pages * case.page_size, "page_size": case.page_size}
  policy = make_policy("flexicache", unstable_heads=heads, **options)
  tiered = prepare(model, policy, case.store, config)
  dense = prepare(model, make_policy("dense"), "resident", config).decode_bytes.keys_values
  fields = byte_fields(tiered)
  device, metadata = fields["device_kv_bytes"], fields["metadata_bytes"]
  return (
    row_of(case, "memory", pages)
    | fields
    | {
      "store": case.store,
      "prompt_tokens": tokens,
      "dense_kv_bytes": dense,
      "saved_ratio": 1 - device / dense,
      "closed_form_ratio": closed_form(case, pages, tokens),
      "saved_with_metadata_ratio": 1 - (device + metadata) / dense,
    }
  )


def closed_form(case: Case, pages: int, tokens: int) -> float:
  """Share of the pages that need not be on the device."""
  there = -(-tokens // case.page_size)
  unstable, every = case.num_unstable, case.num_heads
  kept = unstable * there + (every - unstable) * min(there, pages + 1)
  return 1 - kept / (every * there)


def evenly(fraction: float, num_heads: int, kv_heads: int) -> list[tuple[int, int]]:
  """Pairs (layer, KV head), the fraction of all: bytes do not depend on which they are."""
  count = round(fraction * num_heads)
  flat = [place * num_heads // count for place in range(count)]
  return [divmod(place, kv_heads) for place in flat]


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Saving by context."""
  lines = {}
  for row in rows:
    for name, label in (
      ("saved_ratio", "keys and values"),
      ("closed_form_ratio", "closed form"),
      ("saved_with_metadata_ratio", "with page bounds and tables"),
    ):
      xs, ys = lines.setdefault(f"{label}, budget {row['budget_tokens']:,}", ([], []))
      xs.append(row["prompt_tokens"] / 1000)
      ys.append(row[name])
  draw([Panel("tokens, thousands", "device memory saved", lines, paper=0.75)], title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """At the first context of 20,000 tokens or more."""
  ours = []
  for budget in dict.fromkeys(row["budget_tokens"] for row in rows):
    of_budget = [row for row in rows if row["budget_tokens"] == budget]
    row = min(of_budget, key=lambda row: abs(row["prompt_tokens"] - PAPER_TOKENS))
    saved = (row[f"{name}_ratio"] for name in ("saved", "closed_form", "saved_with_metadata"))
    ours.append(
      "{:.3f} (closed form {:.3f}; {:.3f} with page bounds)".format(*saved)
      + f" at {row['prompt_tokens']:,} tokens, budget {budget:,}"
    )
  return [
    Comparison(
      "Fig. 9",
      "device memory of keys and values that is saved",
      f"more than {PAPER_SAVING:.2f} above 20k tokens, limit 0.75 (budget 1,024)",
      "; ".join(ours),
      "bytes of caches that are counted, not allocated; a stable head has one page more than its "
      "budget, which the next token begins",
    )
  ]


ITEM = Item(run, plot, compare, COLUMNS)
