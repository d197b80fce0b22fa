"""Attention and page operations, one a file: the portable XLA path and a plain reference.

Imports jax only. Pools, segments and tables are plain arrays here; what they mean is said in
`kvjax.cache`.
"""
