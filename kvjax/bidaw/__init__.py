"""Bidaw: conversations whose history lives in host memory and on disk between turns (FAST 2026).

Host code without arrays: where histories lie (`Placement`), who leaves host memory (an `Eviction`),
who is read from disk and who is served (`DualQueue`), which pages of the device are whose
(`MixedPages`). What is simulated is what runs.
"""

from kvjax.bidaw.buddy import MixedPages, NoRoom, Page
from kvjax.bidaw.conversations import Placement, Where
from kvjax.bidaw.disk import Disk, Read, TimedDisk
from kvjax.bidaw.eviction import Eviction, belady, fifo, lru, queue_lru, s3fifo
from kvjax.bidaw.in_the_wild import InTheWild
from kvjax.bidaw.previous_answer import PreviousAnswer
from kvjax.bidaw.scheduler import DualQueue

__all__ = [
  "Disk",
  "DualQueue",
  "Eviction",
  "InTheWild",
  "MixedPages",
  "NoRoom",
  "Page",
  "Placement",
  "PreviousAnswer",
  "Read",
  "TimedDisk",
  "Where",
  "belady",
  "fifo",
  "lru",
  "queue_lru",
  "s3fifo",
]
