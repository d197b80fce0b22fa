"""The cache: layouts, allocation, and exact bytes."""

from kvjax.cache.accounting import CacheBytes, cache_bytes
from kvjax.cache.kv_cache import OVERFLOW, KVCache, allocate

__all__ = ["OVERFLOW", "CacheBytes", "KVCache", "allocate", "cache_bytes"]
