"""Checks that `scripts.gpu_check` runs on a GPU, one idea a file.

A file has SECONDS, the most that its cases may take together, and `cases(setting)`, which yields
them in a fixed order and computes nothing itself. They need jax, numpy and this repository only,
but for `step`, which needs what kvjax and models import (flax and others of setup.cfg).
"""

# In the order in which they run: what says whether kernels work comes first.
CHECKS = ("correctness", "in_place", "attention", "recall", "step", "tune")
