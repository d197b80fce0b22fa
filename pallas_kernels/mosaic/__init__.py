"""Mosaic GPU kernels (Hopper and newer), one operation a file; they run on a CPU interpreted."""
