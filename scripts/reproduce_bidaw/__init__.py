"""Figures of Bidaw (FAST 2026) for `scripts.reproduce`."""
