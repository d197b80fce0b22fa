"""The cache: layouts, allocation, and exact bytes."""

from kvjax.cache.accounting import CacheBytes, cache_bytes
from kvjax.cache.kv_cache import OVERFLOW, TOO_SMALL, KVCache, allocate

__all__ = ["OVERFLOW", "TOO_SMALL", "CacheBytes", "KVCache", "allocate", "cache_bytes"]
