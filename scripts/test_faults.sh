#!/usr/bin/env bash
# Every fault that docs/faults.md lists, brought about by a test; then chaos: runs whose processes are killed and told
# to stop at random, compared with runs that were left alone.
#
#   usage: scripts/test_faults.sh [pytest arguments]
#   reads: CHAOS_MINUTES (default 10; 0: none), CHAOS_SEED, FAULTS (slow: only the tests that make test leaves out)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE # as scripts/test.sh has them

said=$(mktemp)
trap 'rm -f "$said"' EXIT
[[ $# -gt 0 ]] || set -- "${SIDE_BY_SIDE[@]}"
[[ ${FAULTS-} == slow ]] && marks=slow || marks="fault or slow"
"$PY" -m pytest -m "$marks" --durations=20 "$@" | tee "$said"
[[ ${CHAOS_MINUTES:-10} == 0 ]] || "$PY" -m tests.faults.chaos
tail -n 1 "$said" # again, so that the last line is the one that counts
