#!/usr/bin/env bash
# Run the tests, all but those that take long (make test-faults has them), a few files at a time;
# with arguments, which go to pytest, one after the other.
#
#   usage: scripts/test.sh [pytest arguments]
#   makes: .pycache/, compiled modules (or PYTHONPYCACHEPREFIX)
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/test_lib.sh

prepare_pytest
[[ $# -gt 0 ]] || set -- "${SIDE_BY_SIDE[@]}"
exec "${PYTEST[@]}" -m "not slow" "$@"
