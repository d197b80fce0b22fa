"""Tests of the package kvjax."""
