"""OPKV (MLSys 2026): recall at token granularity on a paged cache."""
