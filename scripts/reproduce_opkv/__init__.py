"""The figures of OPKV (MLSys 2026), one module each; `scripts.reproduce` runs them."""
