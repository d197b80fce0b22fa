"""The test suite; `scripts/test.sh` runs it."""
