"""The main module of every Bazel test target: runs pytest on the files that it is given."""

import sys

import pytest

if __name__ == "__main__":
  sys.exit(pytest.main(sys.argv[1:]))
