"""kvjax: KV-cache management for long-context inference in JAX."""
