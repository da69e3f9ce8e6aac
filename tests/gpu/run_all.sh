#!/bin/bash
# Everything that needs a Hopper GPU, from the repository root: tests/gpu/run_all.sh [OUTPUT FOLDER] [PART...]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec python3 tests/gpu/run_all.py "${1:-runs/gpu}" "${@:2}"
