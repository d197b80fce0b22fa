"""Tests of the package pallas_kernels."""
