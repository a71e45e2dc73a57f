#!/usr/bin/env bash
# A test for every fault of docs/faults.md; then chaos: runs whose processes are killed and stopped at
# random, compared with runs that were left alone.
#
#   usage: scripts/test_faults.sh [pytest arguments]
#   reads: CHAOS_MINUTES (default 10; 0: none), CHAOS_SEED, FAULTS (slow: only the tests that make
#          test leaves out), PART (I/N: one part of the tests in N; default all)
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/test_lib.sh

prepare_pytest
output=$(mktemp)
trap 'rm -f "$output"' EXIT
[[ $# -gt 0 ]] || set -- "${SIDE_BY_SIDE[@]}"
marks="fault or slow"
[[ ${FAULTS-} != slow ]] || marks=slow
"${PYTEST[@]}" -m "$marks" --durations=20 ${PART:+--part="$PART"} "$@" | tee "$output"
[[ ${CHAOS_MINUTES:-10} == 0 ]] || "$PY" -m tests.faults.chaos
tail -n 1 "$output" # again, so that the last line is the one that counts
