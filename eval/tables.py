"""Rows for reading: one aligned table of text, with every value in the unit that its name says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_HEADERS = {
  "budget_tokens": "budget",
  "compile_s": "compile",
  "ttft_s_p50": "TTFT",
  "tpot_s_p50": "TPOT p50",
  "tpot_s_p90": "TPOT p90",
  "tpot_s_p99": "TPOT p99",
  "prefill_tokens_per_s": "prefill",
  "decode_tokens_per_s": "decode",
  "speedup_vs_dense": "vs dense",
  "device_kv_bytes": "KV on device",
  "peak_kv_bytes": "KV at peak",
  "host_kv_bytes": "KV on host",
  "metadata_bytes": "metadata",
  "recall_bytes_per_step": "recalled a step",
}


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
  """Rows for reading: bytes in MB, seconds in ms when short, ratios as 1.50x, - for nothing.

  Args:
    rows: result rows, or any mappings whose names say the unit as those of `ROW_FIELDS` do.
    columns: the names to show, in order.
  """
  rows = list(rows)
  cells = [[_HEADERS.get(name, name.replace("_", " ")) for name in columns]]
  cells += [[human(name, row.get(name)) for name in columns] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  # Words begin at the left of their column, numbers end at the right.
  words = [any(isinstance(row.get(name), str) for row in rows) for name in columns]
  lines = [
    "  ".join(
      cell.ljust(width) if left else cell.rjust(width)
      for cell, width, left in zip(line, widths, words, strict=True)
    ).rstrip()
    for line in cells
  ]
  return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def human(name: str, value: Any) -> str:
  """One value in the unit that its name ends with, for a reader."""
  if value is None:
    return "-"
  if isinstance(value, str | bool):
    return str(value)
  if name.endswith("_per_s"):
    return f"{value:,.1f} tok/s"
  if "_bytes" in name:
    return human_bytes(value)
  if name.endswith("_s") or "_s_p" in name:
    return human_seconds(value)
  if name.startswith("speedup") or name.endswith("_ratio"):
    return f"{value:.2f}x" if name.startswith("speedup") else f"{value:.2f}"
  return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"


def human_bytes(value: float) -> str:
  """Bytes in decimal kB, MB or GB; the smaller unit up to 10 GB, 100 kB and 1,000 B."""
  for least, size, unit in ((1e10, 1e9, "GB"), (1e5, 1e6, "MB"), (1e3, 1e3, "kB")):
    if value >= least:
      return f"{value / size:,.1f} {unit}"
  return f"{value:,} B"


def human_seconds(value: float) -> str:
  """Seconds, in ms under one second."""
  return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"
