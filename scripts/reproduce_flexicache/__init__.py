"""The figures of FlexiCache (MLSys 2026), one module each; `scripts.reproduce` runs them."""
