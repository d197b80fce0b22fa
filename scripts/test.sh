#!/usr/bin/env bash
# Every check of the project, as CI runs it. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"

echo "== lint: ruff check"
"$python" -m ruff check .
echo "== format: ruff format --check"
"$python" -m ruff format --check .
echo "== types: pyrefly check"
"$python" -m pyrefly check
echo "== tests: pytest"
# Most tests compile small programs, which one core does: two workers, each with whole files, since
# the tests of a file share what they have compiled; in the order of tests/conftest.py.
"$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
