"""Figure 14: the compute that a kept byte saves, as keys and values and as activations, by shape.

Counted from the shape alone (`kvjax.bidaw.tensor_costs`). Beside it what rebuilding costs for each
megabyte that is not kept, and for 2,048 tokens the seconds of rebuilding on the machine and of
reading what is not kept from its disk: rebuilding has to be the shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.results import Row, make_row
from kvjax.bidaw import activations_cost, keys_values_cost, why_no_activations
from kvjax.config import ModelConfig
from kvjax.sim import costs, transfer_s
from models import PRESETS
from scripts.reproduce_bidaw.case import Case
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

PAPER = "opt-13b"  # shape of the paper's numbers
SHAPES = (
  *("opt-6.7b", PAPER, "opt-30b", "opt-66b", "llama-2-7b", "llama-2-13b"),
  *("llama-2-70b", "llama-3.1-8b", "qwen2.5-7b", "qwen2.5-14b"),
)
TOKENS = 2048
COLUMNS = (
  *("model", "pays", "kv_token_bytes", "activation_token_bytes", "kv_gflop_per_mb"),
  *("activation_gflop_per_mb", "rebuild_gflop_per_saved_mb", "rebuild_s", "saved_read_s"),
)


def run(case: Case) -> list[Row]:
  """A row for each shape, that of the case among them."""
  shapes = {name: PRESETS[name] for name in SHAPES}
  return [_row(case, name, config) for name, config in (shapes | {case.model: case.config}).items()]


def _row(case: Case, name: str, config: ModelConfig) -> Row:
  """What does not pay has no saving: None."""
  machine = case.machine
  pairs, kept = (cost(config, machine.item_bytes) for cost in (keys_values_cost, activations_cost))
  saved = pairs.num_bytes - kept.num_bytes
  row = make_row(
    model=name,
    policy="bidaw",
    device=machine.name,
    task="bidaw_tensor_efficiency",
    simulated=True,
  )
  return row | {
    "pays": "no" if why_no_activations(config) else "yes",
    "kv_token_bytes": pairs.num_bytes,
    "activation_token_bytes": kept.num_bytes,
    "kv_gflop_per_mb": pairs.gflop_per_mb,
    "activation_gflop_per_mb": kept.gflop_per_mb,
    "rebuild_gflop_per_saved_mb": kept.rebuild_flops / saved / 1000 if saved > 0 else None,
    "rebuild_s": costs.rebuild_s(config, machine, TOKENS),
    "saved_read_s": transfer_s(machine, TOKENS * saved, disk=True) if saved > 0 else None,
  }


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Both forms of each shape, and rebuilding beside reading where it pays."""
  names = [row["model"] for row in rows]
  saved = {
    "keys and values": (names, [row["kv_gflop_per_mb"] for row in rows]),
    "activations": (names, [row["activation_gflop_per_mb"] for row in rows]),
  }
  paying = [row for row in rows if row["pays"] == "yes"]
  names = [row["model"] for row in paying]
  seconds = {
    "keys and values made of activations": (names, [row["rebuild_s"] for row in paying]),
    "what is not kept, read from the SSD": (names, [row["saved_read_s"] for row in paying]),
  }
  panels = [Panel("", "GFLOP saved by a MB that is kept", saved)]
  if paying:
    panels.append(Panel("", f"s for {TOKENS:,} tokens", seconds))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The paper's shape."""
  row = next(row for row in rows if row["model"] == PAPER)
  return [
    Comparison(
      "Fig. 14",
      "compute saved by a byte that is kept, GFLOP/MB: keys and values, activations (OPT-13B)",
      "30.5, 51.0",
      "{kv_gflop_per_mb:.1f}, {activation_gflop_per_mb:.1f}".format(**row),
      "the paper's count is not said to the last operation; ours is of the products alone, with "
      "1 MB = 10^6 bytes",
    ),
    Comparison(
      "text",
      f"milliseconds to make keys and values of {TOKENS:,} tokens' activations (OPT-13B)",
      "tens, less than 100",
      "{:.0f} on {}, simulated; to read from its disk what is not kept takes {:.0f}".format(
        1e3 * row["rebuild_s"], row["device"].partition(",")[0], 1e3 * row["saved_read_s"]
      ),
      "products at 0.6 of the device's peak [ours]; the paper runs them beside decoding",
    ),
  ]


ITEM = Item(run, plot, compare, COLUMNS)
