"""Orders over keys: which one is given up when something has to go.

Plain Python, for whatever is cached: blocks, conversations. An order holds keys and says which goes
first; how much goes and when is the caller's business. `kvjax.opkv.eviction` has jitted twins.
"""

from kvjax.eviction.belady import Belady, next_uses
from kvjax.eviction.fifo import Fifo
from kvjax.eviction.lru import Lru
from kvjax.eviction.order import Order
from kvjax.eviction.s3fifo import S3Fifo

__all__ = ["Belady", "Fifo", "Lru", "Order", "S3Fifo", "next_uses"]
