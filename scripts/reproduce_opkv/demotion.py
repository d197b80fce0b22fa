"""Would a partition of the host for OP blocks that the device gave up pay?

OPKV demotes such a block to the host, and it comes back whole when it is a hit again. What it holds
lies in the ordered pages of the host as well, so that the partition saves no token but copies:
one of a block in place of one for each missing token. What else the block holds moves too.

Foretold beside `op_block` as it is: each block that is given up is remembered, only the newest if
the partition is small. The missing tokens of a list are then covered with remembered blocks by the
rule of hits: of a block at least theta are missing, the block with the most first, and no token
counts twice. A block that came back is no longer in the partition.

Beside that stands what `op_block:host_blocks=...` really moves. There what came back changes what
the device has later: whole blocks, with tokens that nobody asked for, in place of full new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eval.results import Row
from kvjax.opkv.retrieval import least_tokens
from scripts.reproduce_opkv.case import Case, row_of
from scripts.reproduce_opkv.drawing import bar_panels, draw
from scripts.reproduce_opkv.driving import driven
from scripts.reproduce_opkv.following import Followed, follow
from scripts.reproducing import Comparison, Item

PARTITIONS = (0.25, 1.0, None)  # blocks, in pools of the device; None for all of them
RHO = 0.6  # `op_block`'s own
COLUMNS = (
  *("policy", "partition", "demoted_per_step", "back_per_step", "copies_ratio"),
  *("recalled_ratio", "moved_ratio", "measured_recalled_ratio", "measured_moved_ratio"),
)


def run(case: Case) -> list[Row]:
  """A row for each policy and size of the partition: blocks by layer and step, and ratios.

  `copies_ratio` is copies from the host with the partition over those without, `recalled_ratio`
  tokens copied from it, and `moved_ratio` the same with the tokens that are demoted. The ratios of
  the store itself have `measured_` before their names.
  """
  rows = []
  for spec in case.policies:
    followed = follow(case, spec)
    found = changes(followed, case.page_size)
    without = sum(int((change.new[:, 1:] >= 0).sum()) for change in found)
    for pools in PARTITIONS:
      rows.append(
        row_of(case, followed.runner, "demotion")
        | count(found, case.page_size, pools)
        | measured(followed, pools, case.page_size, without)
        | {"store": "op_block", "partition": "all" if pools is None else f"{pools} pools"}
      )
  return rows


class Change(NamedTuple):
  """What a step changed in the pool of a layer; i[..., 1 + C] are list and tokens of blocks.

  Attributes:
    row: the layer.
    new: blocks of the tokens that were missing.
    gone: blocks that were given up.
    size: blocks of the pool.
  """

  row: int
  new: np.ndarray
  gone: np.ndarray
  size: int


def changes(followed: Followed, page_size: int) -> list[Change]:
  """Of all layers and steps but the first."""
  found, before = [], np.zeros(0)
  for row, step, cache in driven(followed, "op_block", page_size):
    blocks = cache.store_state.blocks[0]
    after = np.concatenate([np.array(blocks.owner)[:, None], np.array(blocks.tokens)], axis=1)
    if step:
      changed = (after != before).any(axis=1)
      gone = before[changed & (before[:, 0] >= 0)]
      found.append(Change(row, after[changed], gone, len(after)))
    before = after
  return found


def count(found: Sequence[Change], page_size: int, pools: float | None) -> Row:
  """What a partition as large as so many pools of the device would do, None for any size."""
  theta, demoted, back, covered, missing = least_tokens(RHO, page_size), 0, 0, 0, 0
  partition, row = np.zeros((0, 1 + page_size), int), -1
  for change in found:
    if change.row != row:
      partition, row = partition[:0], change.row
    taken, tokens = came_back(partition, change.new, theta)
    missing, demoted = missing + int((change.new[:, 1:] >= 0).sum()), demoted + len(change.gone)
    back, covered = back + int(taken.sum()), covered + tokens
    partition = np.concatenate([partition[~taken], change.gone])
    if pools is not None:
      partition = partition[max(0, len(partition) - int(pools * change.size)) :]
  recalled, most = missing - covered + back * page_size, max(1, missing)
  return {
    "demoted_per_step": demoted / max(1, len(found)),
    "back_per_step": back / max(1, len(found)),
    "copies_ratio": (missing - covered + back) / most,
    "recalled_ratio": recalled / most,
    "moved_ratio": (recalled + demoted * page_size) / most,
  }


def measured(followed: Followed, pools: float | None, page_size: int, without: int) -> Row:
  """What the store moves in all steps but the first, over the tokens that come from the host
  without a partition."""
  total = np.zeros(2, np.int64)  # tokens from the host, and tokens demoted
  pools = len(followed.selected) if pools is None else pools  # no step demotes more than one
  for _, step, cache in driven(followed, f"op_block:host_blocks={pools}", page_size):
    counts = cache.store_state.traffic.moved, cache.store_state.partition.demoted
    now = np.array([np.sum(count) for count in counts], np.int64)
    total -= now * (step == 0)
    total += now * (step + 1 == len(followed.selected))
  recalled, demoted = (total / max(1, without)).tolist()
  return {"measured_recalled_ratio": recalled, "measured_moved_ratio": recalled + demoted}


def came_back(partition: np.ndarray, new: np.ndarray, theta: int) -> tuple[np.ndarray, int]:
  """Which blocks of a partition would come back, and how many missing tokens they hold.

  Args:
    partition: i[N, 1 + C], list and tokens of each block, -1 in an empty slot.
    new: i[n, 1 + C], blocks of the tokens that are missing.
    theta: least missing tokens of a block that comes back.
  """
  taken, covered = np.zeros(len(partition), bool), 0
  for x in np.unique(new[:, 0]):
    wanted = new[new[:, 0] == x, 1:]
    wanted = {*wanted[wanted >= 0].tolist()}
    theirs = np.flatnonzero(partition[:, 0] == x)
    gains = np.isin(partition[theirs, 1:], [*wanted]).sum(axis=1)
    for block in theirs[np.argsort(-gains, kind="stable")][: (gains >= theta).sum()]:
      found = wanted & {*partition[block, 1:].tolist()}
      if len(found) >= theta:
        taken[block], covered, wanted = True, covered + len(found), wanted - found
  return taken, covered


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Copies and tokens with the partition over those without."""
  fields = {
    "copies_ratio": "copies, over those without a partition",
    "moved_ratio": "tokens that cross, over those without",
  }
  draw(bar_panels(rows, "partition", fields), title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """The largest partition."""
  return [
    Comparison(
      "CPU partition for OP blocks",
      f"what it saves, {row['policy']}",
      "in the design, not measured",
      f"{row['copies_ratio']:.2f} of the copies, {row['moved_ratio']:.2f} times the tokens",
      "all tokens are on the host in any case; a demoted block must be written there first",
    )
    for row in rows
    if row["partition"] == "all"
  ]


ITEM = Item(run, plot, compare, COLUMNS)
