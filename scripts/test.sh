#!/usr/bin/env bash
# Run the tests, all but those that take long (make test-faults has them), a few files at a time; with arguments, which
# go to pytest, one after the other.
#
#   usage: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

# One thread a process: the tests' models are tiny, and several of them train at once. Where a test takes more all the
# same, threads that wait must not keep the cores from those that work: four runs side by side took seven times as long.
[[ $# -gt 0 ]] || set -- "${SIDE_BY_SIDE[@]}"
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE exec "$PY" -m pytest -m "not slow" "$@"
