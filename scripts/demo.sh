#!/usr/bin/env bash
# The main job on a fresh machine: environment, model, and scripts/quickstart.py with the given flags.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# The caller's folder stays the current one, so that relative paths in flags mean what they say;
# -P keeps a folder there that is called scripts or eval from hiding ours.
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m scripts.quickstart "$@"
