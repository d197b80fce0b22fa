"""Bidaw: conversations whose history lives in host memory and on disk between turns (FAST 2026).

Host code without arrays: where histories lie (`Placement`), who leaves host memory (an `Eviction`),
who is read from disk and who is served (`DualQueue`), which pages of the device are whose
(`MixedPages`). What is simulated is what runs. `kvjax.bidaw.tensor_cache`, which keeps activations
instead of keys and values, has arrays and is imported by its own name.
"""

from kvjax.bidaw.buddy import MixedPages, NoRoom, Page
from kvjax.bidaw.conversations import Placement, Where
from kvjax.bidaw.disk import Disk, Read, TimedDisk
from kvjax.bidaw.eviction import Eviction, belady, fifo, lru, queue_lru, s3fifo
from kvjax.bidaw.in_order import InOrder
from kvjax.bidaw.in_the_wild import InTheWild
from kvjax.bidaw.previous_answer import PreviousAnswer
from kvjax.bidaw.scheduler import DualQueue
from kvjax.bidaw.tensor_costs import (
  TensorCost,
  activations_cost,
  keys_values_cost,
  why_no_activations,
)

__all__ = [
  "Disk",
  "DualQueue",
  "Eviction",
  "InOrder",
  "InTheWild",
  "MixedPages",
  "NoRoom",
  "Page",
  "Placement",
  "PreviousAnswer",
  "Read",
  "TensorCost",
  "TimedDisk",
  "Where",
  "activations_cost",
  "belady",
  "fifo",
  "keys_values_cost",
  "lru",
  "queue_lru",
  "s3fifo",
  "why_no_activations",
]
